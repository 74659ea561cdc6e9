"""Vision towers in plans, against the towers that attar really loads and runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.sources import vision as loading
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.engine import deployment
from attar.formats.scheme import Scheme
from attar.images.settings import ImageSettings, PixelSettings
from attar.kernels import dispatch, ops
from attar.kernels.operands import Linear
from attar.kernels.tiles import faster
from attar.model.vision.config import VisionConfig
from attar.model.vision.model import VisionModel
from attar.model.vision.tiles import TILE, Tiles, attention_multiply_adds, products, tower_rows
from attar.plan import vision
from attar.plan.rates.profile import MachineProfile, Rate
from attar.plan.vision import TowerWeights
from tests.errors import user_error
from tests.model.vision import seen, tiny
from tests.pretend_rates import FLOATS, PROFILE

NEAR = 1e-9  # relative, of sums of floats


def weights(path: Path) -> TowerWeights:
    found = deployment.subject_at("a model", path).tower
    assert found is not None
    return found


def multiply_adds(config: VisionConfig, tiles: Tiles) -> int:
    """Return the multiply-adds of tower and projector for an image."""
    each = sum(product.multiply_adds for product in products(config, tiles))
    return tiles.shape[0] * (each + attention_multiply_adds(config, tiles))


def loaded(path: Path) -> VisionModel:
    """Return the tower as a server loads it, in the layouts of the kernels."""
    store = dispatch.store()
    if store is None:
        pytest.skip("the native kernels do not load here")
    found = loading.load_vision(path, torch.float32, store)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every tiny model stored in bfloat16, as real ones are."""
    found = {}
    for kind in tiny.MODELS:
        found[kind] = tmp_path_factory.mktemp(kind)
        model = tiny.MODELS[kind]().to(torch.bfloat16)
        model.save_pretrained(found[kind], save_original_format=True)
    return found


@pytest.fixture(params=[False, True], ids=["float32", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor has tiles, as loading sees it."""
    monkeypatch.setattr(loading, "faster", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_bytes_are_those_that_a_server_loads(kind: str, halves: dict[str, Path], tiles: bool) -> None:
    whole = tiny.folder(kind)
    assert weights(whole).bytes(tiles) == loaded(whole).nbytes
    assert weights(halves[kind]).bytes(tiles) == loaded(halves[kind]).nbytes
    assert weights(halves[kind]).on_amx(tiles) == tiles


@pytest.mark.parametrize("scheme", vision.QUANTIZED)
@pytest.mark.parametrize("kind", ["smolvlm", "llava", "qwen2_5_vl", "gemma3"])
def test_bytes_of_a_quantized_tower_are_known_before(
    kind: str, scheme: str, halves: dict[str, Path], tiles: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    compress_request(CompressionRequest(halves[kind], out, recipe="rtn-w8", vision=scheme))
    made = loaded(out).nbytes
    assert weights(out).bytes(tiles) == made
    before = weights(halves[kind]).choices(tiles)
    assert before[scheme] == made
    assert set(weights(out).choices(tiles)) == {"stored"}, "a tower is quantized once"


class Counting:
    """Multiply-adds of the products and of the attention that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        linear, attention = ops.linear, F.scaled_dot_product_attention

        def product(x: Tensor, linears: tuple[Linear, ...], *more: Any) -> Tensor:
            self.count += sum(len(x) * math.prod(each.shape) for each in linears)
            return linear(x, linears, *more)

        def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.count += 2 * q.numel() * k.shape[-2]
            return attention(q, k, v)

        monkeypatch.setattr(ops, "linear", product)
        monkeypatch.setattr(F, "scaled_dot_product_attention", mixed)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_multiply_adds_are_those_that_run(kind: str, counting: Counting) -> None:
    model = seen.vision(kind)
    for picture in seen.pictures(kind):
        counting.count = 0
        model.encode(picture)
        assert multiply_adds(model.config, Tiles(picture.shape, picture.grid, picture.size)) == counting.count > 0


def load(config: VisionConfig, picture: seen.Picture, count: int = 1) -> vision.ImageLoad:
    return vision.ImageLoad(count, Tiles(picture.shape, picture.grid, picture.size), picture.rows)


def free(rate: float) -> MachineProfile:
    """A machine that multiplies at one rate, reads in no time, and has no overhead."""
    rows = (1, 1024)
    curve = replace(PROFILE.products["bf16"], rows=rows, seconds=tuple(2 * n / rate for n in rows), spread=0.25)
    beside = replace(PROFILE.overheads, element=0.0)
    return replace(PROFILE, products={"bf16": curve}, bf16=Rate(rate, 0.25), overheads=beside)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava", "gemma3"])
def test_the_time_is_products_attention_and_overhead(kind: str) -> None:
    """The range holds products by the spread of their curve, and all else from half to double."""
    picture, stored = seen.pictures(kind)[-1], weights(tiny.folder(kind))
    config, one, profile = stored.config, load(stored.config, picture), free(FLOATS)
    found = vision.encoding(stored, one, profile, amx=False)
    all_of, mixing = multiply_adds(config, one.tiles), one.tiles.shape[0] * attention_multiply_adds(config, one.tiles)
    assert found.seconds == pytest.approx(2 * all_of / FLOATS, rel=NEAR)
    assert found.spread == pytest.approx((0.25 * (all_of - mixing) + mixing) / all_of, rel=NEAR)
    assert found.evidence == "fitted"
    assert found.range == (found.seconds / (1 + found.spread), found.seconds * (1 + found.spread))
    more = vision.encoding(stored, load(config, picture, 3), profile, amx=False)
    assert more.seconds == pytest.approx(3 * found.seconds, rel=NEAR)
    slower = vision.encoding(stored, one, replace(profile, overheads=PROFILE.overheads), amx=False)
    own = one.tiles.shape[0] * config.layers * tower_rows(config, one.tiles) * config.hidden
    assert slower.seconds - found.seconds == pytest.approx(own * PROFILE.overheads.element, rel=1e-6)


def test_products_are_as_many_at_once_as_the_tower_computes() -> None:
    """Where reading weights takes all the time, rows that the tower computes at once take it once."""
    stored = weights(tiny.folder("qwen2_vl"))
    linear = next(each for each in products(stored.config, Tiles((1, 64, 64), (16, 16), (64, 64))))
    curve = replace(PROFILE.products["bf16"], rows=(1, 1024), seconds=(3.0, 3.0))
    profile = replace(PROFILE, products={"bf16": curve})
    for rows, reads in ((1, 1), (TILE, 1), (TILE + TILE // 2, 2), (2 * TILE, 2)):
        seconds, _ = vision._product(stored, replace(linear, rows=rows), profile)
        assert seconds == pytest.approx(3.0 * reads * linear.outputs * linear.columns, rel=NEAR)


def test_a_quantized_tower_takes_the_curve_of_its_scheme() -> None:
    """w8a8 has a curve of its own, and is faster here than dense weights; w8 is fitted."""
    picture, stored = seen.pictures("smolvlm")[1], weights(tiny.folder("smolvlm"))
    one = load(stored.config, picture)
    seconds = {"stored": vision.encoding(stored, one, PROFILE, amx=False).seconds}
    for name in vision.QUANTIZED:
        seconds[name] = vision.encoding(stored.quantized(Scheme.parse(name)), one, PROFILE, amx=False).seconds
    assert seconds["w8a8"] < seconds["stored"]
    assert len(set(seconds.values())) == 3


def test_a_tower_on_tiles_needs_their_rate(halves: dict[str, Path]) -> None:
    picture, stored = seen.pictures("smolvlm")[0], weights(halves["smolvlm"])
    one = load(stored.config, picture)
    with user_error("option_conflict", "bench --rates"):
        vision.encoding(stored, one, PROFILE, amx=True)
    found = vision.encoding(stored, one, replace(free(FLOATS), bf16_tiles=Rate(1e12, 0.1)), amx=True)
    assert found.seconds == pytest.approx(2e-12 * multiply_adds(stored.config, one.tiles), rel=NEAR)
    assert 0.1 < found.spread < 1


SETTINGS = {
    "smolvlm": PixelSettings("idefics3", 1, edge=128, tile=32),
    "llava_next": PixelSettings("llava_next", 1, tile=24, pinpoints=((24, 48), (48, 24), (48, 48)), patch=4),
    "qwen2_vl": PixelSettings("qwen2_vl", 1, patch=4, merge=2, min_pixels=64, max_pixels=4096),
    "llava": PixelSettings("llava", 1, size=(24, 24), patch=4),
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("size", [(768, 1024), (31, 100), (500, 20)])
def test_rows_of_an_image_are_those_that_the_tower_counts(kind: str, size: tuple[int, int]) -> None:
    """The tower counts an image that is made of zeros as the plan does, by sizes alone."""
    model, settings = seen.vision(kind), ImageSettings(SETTINGS[kind], 0, 0, None, 0)
    found = vision.images(model.config, settings, 2, size)
    image = seen.Picture(bytes(3 * math.prod(found.tiles.shape)), found.tiles.shape, found.tiles.grid, size, 0)
    assert found.rows == model.count(image)
    assert found.tokens == 2 * found.rows
    assert found.feature_bytes(model.config) == 2 * model.encode(replace(image, rows=found.rows)).nbytes


def test_without_a_preprocessor_one_tile_has_its_rows() -> None:
    for kind in ("llava", "gemma3"):
        config = seen.vision(kind).config
        assert vision.images(config, None, 1, vision.SIZE).rows == seen.pictures(kind)[0].rows
    for kind in ("smolvlm", "llava_next", "qwen2_vl"):
        with user_error("file_not_found"):
            vision.images(seen.vision(kind).config, None, 1, vision.SIZE)


def test_this_machine_says_whether_it_has_tiles() -> None:
    assert deployment.has_amx() == faster()
