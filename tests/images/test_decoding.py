"""Tiles equal those of transformers' PIL image processors, before they are rescaled."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.errors import UserError
from attar.images import decoding
from attar.images._containers import Refused, parse
from attar.images.decoding import MAX_BASE64, MAX_FILE, ImageSource, count_rows, decode
from attar.images.settings import ImageSettings, read_settings
from attar.protocol.image_limits import MAX_IMAGES
from attar.protocol.images import ImageInput, check_images
from attar.text.limited_child import LimitedChild
from tests.images import oracle

Image = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
ImageOps = pytest.importorskip("PIL.ImageOps")
from tests.images import hostile  # noqa: E402

ANSWERED = 2.0  # seconds on a machine that runs other tests too; alone: 0.35
LEVELS = 1  # of grey by which pixels may differ from transformers'; measured: 0
SIZES = [(64, 64), (1, 1), (100, 37), (37, 100), (33, 200), (31, 65), (128, 127), (5, 600)]  # width, height


def picture(width: int, height: int, seed: int = 0, channels: int = 3) -> Any:
    """Return a picture of smooth areas and noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, channels))
    ramp = np.linspace(0, 255, width)[None, :, None] + np.linspace(0, 255, height)[:, None, None]
    return Image.fromarray(((noise + ramp) // 3).astype(np.uint8).squeeze())


def file(image: Any, form: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def array(image: ImageInput) -> np.ndarray[Any, Any]:
    """Return an image's tiles as numbers."""
    return np.frombuffer(image.tiles, np.uint8).reshape(*image.shape, 3)


@pytest.mark.parametrize("case", oracle.CASES)
def test_tiles_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    settings = read_settings(oracle.write(case, tmp_path))
    assert settings is not None
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    for each in pictures:
        (made,) = decode(settings, [ImageSource.of_bytes(file(each))])
        wanted = oracle.tiles(case, each).astype(int)
        assert array(made).shape == wanted.shape
        assert np.abs(array(made).astype(int) - wanted).max() <= LEVELS
        assert made.size == each.size[::-1]
        assert made.rows == count_rows(settings, made.shape[0], made.grid, made.size)
        check_images([made], made.rows)


@pytest.fixture
def settings(tmp_path: Path) -> ImageSettings:
    found = read_settings(oracle.write("idefics3", tmp_path))
    assert found is not None
    return found


def refused(settings: ImageSettings, *sources: ImageSource) -> UserError:
    with pytest.raises(UserError) as caught:
        decode(settings, sources)
    return caught.value


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_set_upright_by_its_orientation(orientation: int, settings: ImageSettings) -> None:
    turned = picture(60, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for form in ("PNG", "JPEG", "WEBP"):
        data = file(turned, form, exif=exif, **({} if form == "PNG" else {"quality": 95}))
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        (made,) = decode(settings, [ImageSource.of_bytes(data)])
        assert np.abs(array(made).astype(int) - oracle.tiles("idefics3", upright)).max() <= LEVELS
        assert made.size == upright.size[::-1]


def modes() -> list[Any]:
    colours = picture(50, 41, channels=4)
    palette = picture(50, 41).quantize(16)
    clear = palette.copy()
    clear.info["transparency"] = 3
    grey = picture(50, 41).convert("L")
    return [colours, palette, clear, grey, grey.convert("1"), grey.convert("LA"), colours.convert("RGB")]


@pytest.mark.parametrize("image", modes(), ids=lambda image: image.mode)
def test_every_mode_becomes_the_rgb_of_transformers(image: Any, settings: ImageSettings) -> None:
    data = file(image, **({"transparency": 3} if "transparency" in image.info else {}))
    (made,) = decode(settings, [ImageSource.of_bytes(data)])
    wanted = oracle.tiles("idefics3", Image.open(io.BytesIO(data)))
    assert np.abs(array(made).astype(int) - wanted).max() <= LEVELS


@pytest.mark.parametrize("name", hostile.CORPUS)
def test_a_hostile_image_harms_nothing(name: str, settings: ImageSettings) -> None:
    make, code = hostile.CORPUS[name]
    data = make()
    began = time.monotonic()
    if code is None:
        decode(settings, [ImageSource.of_bytes(data)])
    else:
        error = refused(settings, ImageSource.of_bytes(data))
        assert error.code == code
        assert not any(word in str(error) for word in ("PIL", "libpng", "Truncated", "decoder", "/", "0x"))
    assert time.monotonic() - began < ANSWERED


def test_the_largest_images_fit_into_memory(settings: ImageSettings) -> None:
    """Transparent ones take most: Pillow, and libwebp's canvases."""
    largest = Image.new("RGBA", (4000, 4000), (10, 200, 30, 128))
    for data in (file(largest), file(largest, "WEBP", lossless=True, method=0, quality=0)):
        (made,) = decode(settings, [ImageSource.of_bytes(data)])
        assert made.size == (4000, 4000)


def test_a_decoder_that_takes_too_long_is_killed(settings: ImageSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "DECODE_SECONDS", 0.1)  # a fast processor needs less than a second
    scans = Image.new("RGB", (4000, 4000))
    data = file(scans, "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    slow = data[:last] + data[last:-2] * 60 + data[-2:]
    began = time.monotonic()
    error = refused(settings, ImageSource.of_bytes(slow))
    assert error.code == "image_invalid"
    assert time.monotonic() - began < ANSWERED + 1


def test_base64_is_decoded_strictly_and_within_bounds(settings: ImageSettings) -> None:
    data = file(picture(20, 20))
    text = base64.b64encode(data).decode()
    (bare,) = decode(settings, [ImageSource.of_bytes(data)])
    for url in (f"data:image/png;base64,{text}", f"DATA:image/PNG;BASE64,{text}"):
        assert decode(settings, [ImageSource.of_url(url)]) == (bare,)
    for bad in (text + "!", text[:-1], " " * 10**6 + text, "", "=" * 100):
        assert refused(settings, ImageSource.of_base64(bad)).code == "image_invalid"
    assert "JPEG" in str(refused(settings, ImageSource.of_base64(text, "image/jpeg")))


BAD_URLS = [
    "", "data:", "data:image/png,abc", "data:image/png;base64", "data:;base64,AAAA", "data:" + " " * 10**6,
    "data:image/svg+xml;base64,AAAA", "data:text/html;base64,AAAA", "data:" + "a" * (1 << 20) + "/png;base64,AAAA",
    "http://127.0.0.1/cat.png", "https://example.org/cat.png", "file:///etc/passwd", "FILE:/etc/passwd", "ftp://a/b",
    "/etc/passwd", "data:image/png;base64,\u00e9",
]  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS, ids=lambda url: url[:24])
def test_only_data_urls_are_taken(url: str) -> None:
    with pytest.raises(UserError) as caught:
        ImageSource.of_url(url)
    assert caught.value.code == "image_invalid"
    assert len(str(caught.value)) < 200


def test_limits_of_a_request_are_named(settings: ImageSettings) -> None:
    with pytest.raises(UserError) as caught:
        ImageSource.of_base64("A" * (MAX_BASE64 + 4))
    assert "16 MiB" in str(caught.value)
    with pytest.raises(UserError) as caught:
        ImageSource.of_bytes(bytes(MAX_FILE + 1))
    assert caught.value.code == "image_too_large"
    small = ImageSource.of_bytes(file(picture(8, 8)))
    assert str(MAX_IMAGES) in str(refused(settings, *[small] * (MAX_IMAGES + 1)))
    large = ImageSource.of_bytes(hostile.png(4000, 3900))
    error = refused(settings, large, large, large)
    assert error.code == "image_too_large"
    assert "32000000" in str(error)


def test_tiles_of_a_request_have_a_limit(tmp_path: Path) -> None:
    folder = oracle.write("gemma3", tmp_path)
    oracle.put(folder / "preprocessor_config.json", {"size": {"height": 2048, "width": 2048}})
    found = read_settings(folder)
    assert found is not None
    small = ImageSource.of_bytes(file(picture(8, 8)))
    assert len(decode(found, [small] * 3)) == 3
    error = refused(found, *[small] * 5)
    assert (error.code, "48 MiB" in str(error)) == ("image_too_large", True)


PROBE = """
import os, resource, socket, sys
from attar.images import _decode_child as child
def answer(body):
    found = [str(resource.getrlimit(resource.RLIMIT_AS)[1]), ",".join(sorted(os.environ)), ",".join(child.Image.OPEN)]
    for act in (lambda: open("/etc/passwd"), lambda: socket.socket(), lambda: os.fork() and os.wait()):
        try:
            act()
            found.append("done")
        except OSError as error:
            found.append(type(error).__name__)
    return b"+" + "|".join(found).encode()
child.answer = answer
main = child.main
"""


def test_the_process_has_no_files_sockets_environment_or_other_decoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTAR_API_KEY", "a secret")
    (tmp_path / "probing.py").write_text(PROBE)
    child = LimitedChild("probing", ("PIL",), "probe", lambda text, code: UserError("image_invalid", text))
    folders = child._folders
    child._folders = lambda: [*folders(), str(tmp_path)]  # type: ignore[method-assign]
    try:
        memory, environment, decoders, files, sockets, _ = child.ask(b"", 5.0).split("|")
    finally:
        child.close()
    assert 0 < int(memory) <= 512 << 20
    own = {"GOMP_SPINCOUNT", "LC_CTYPE"}  # that Python and attar set themselves
    assert set(environment.split(",")) <= {"", "LD_LIBRARY_PATH", *own}
    assert set(decoders.split(",")) == {"PNG", "JPEG", "WEBP"}
    assert (files, sockets) == ("OSError", "OSError")


def test_without_pillow_the_error_names_the_extra(settings: ImageSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "PIL" else find(name))
    error = refused(settings, ImageSource.of_bytes(b""))
    assert (error.code, "attar[vision]" in str(error)) == ("package_missing", True)


def test_each_request_has_a_process_of_its_own(settings: ImageSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = []
    spawn = LimitedChild.spawn
    monkeypatch.setattr(LimitedChild, "spawn", lambda self: spawned.append(spawn(self)) or spawned[-1])
    small = ImageSource.of_bytes(file(picture(8, 8)))
    decode(settings, [small, small])
    with pytest.raises(UserError):
        decode(settings, [small, ImageSource.of_bytes(b"")])
    assert len(spawned) == 2
    assert all(each.poll() is not None for each in spawned)


@given(st.binary(max_size=400), st.sampled_from(["PNG", "JPEG", "WEBP"]), st.integers(0, 2**32))
def test_damaged_files_are_refused_or_read_and_nothing_else(noise: bytes, form: str, seed: int) -> None:
    data = bytearray(FILES[form])
    for at, value in enumerate(noise):
        data[(seed * (at + 1) * 2654435761) % len(data)] ^= value
    with contextlib.suppress(Refused):
        found = parse(bytes(data))
        assert min(found.width, found.height) >= 1
        assert len(found.data) <= len(data) + 64
    with contextlib.suppress(Refused):
        parse(FILES[form][: seed % len(FILES[form])] + noise)


FILES = {form: file(picture(30, 20), form) for form in ("PNG", "JPEG", "WEBP")}
