"""VILA's three folders: logits of the converted folder against torch and transformers, its use, and refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from attar.checkpoints.convert.run import convert
from attar.checkpoints.folder import Folder
from attar.checkpoints.receipts.receipt import read_receipt
from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.sources import hf
from attar.checkpoints.sources.vision import image_settings, load_vision
from attar.cli.main import app
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.engine.llm.llm import LLM
from attar.images.decoding import ImageSource, decode
from attar.model.cache import Features, ForwardBatch
from attar.protocol.request import SamplingParams
from tests.checkpoints.convert import vila
from tests.checkpoints.convert.vila import Vila, change, put
from tests.checkpoints.sources.loopback_hub import COMMIT, Hub, files
from tests.errors import user_error
from tests.images.test_decoding import file, picture

EQUAL = 1e-4  # max |difference| of logits, float32; they vary by about 1
PICTURES = [picture(100, 37), picture(31, 65, 1), picture(30, 30, 2)]
KINDS = [
    *((projector, "siglip", known) for projector in vila.PROJECTORS for known in (False, True)),
    ("mlp_downsample", "clip", False),
    ("mlp2x_gelu", "clip", False),
]
GREEDY = SamplingParams(max_tokens=8, temperature=0, seed=0, ignore_eos=True)


def _pixels(image: Any, ratio: str) -> Tensor:
    """Return the pixels [3, H, W] that VILA makes of an image, by Pillow and torch alone."""
    from PIL import Image

    image = image.convert("RGB")
    if ratio == "pad":
        side = max(image.size)
        square = Image.new("RGB", (side, side), tuple(int(each * 255) for each in vila.MEAN))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        image = square
    small = image.resize((vila.IMAGE_SIZE, vila.IMAGE_SIZE))
    values = torch.from_numpy(np.asarray(small).copy()).float() / 255
    return ((values - torch.tensor(vila.MEAN)) / torch.tensor(vila.STD)).permute(2, 0, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Vila:
    made = vila.write(tmp_path_factory.mktemp("vila") / "VILA")
    convert(made.path, made.path.parent / "out")
    return made


@pytest.fixture
def broken(base: Vila, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(base.path, tmp_path / "VILA"))


def _close(made: Vila, out: Path, ratio: str = "resize") -> None:
    folder = Folder(out)
    decoder, vision, settings = hf.load(out), load_vision(folder, torch.float32), image_settings(out)
    assert vision is not None
    token = vision.image_token
    images = decode(settings, [ImageSource(file(each)) for each in PICTURES])
    for count in (0, 1, 3):
        draw = torch.Generator().manual_seed(count)
        ids = torch.randint(8, 100, (6,), generator=draw).tolist()
        for image in images[:count]:
            ids += [token] * image.rows + torch.randint(8, 100, (3,), generator=draw).tolist()
        theirs = made.logits(ids, token, [_pixels(each, ratio) for each in PICTURES[:count]])
        at = torch.tensor([number for number, each in enumerate(ids) if each == token], dtype=torch.int64)
        values = torch.cat([vision.encode(each) for each in images[:count]]) if count else None
        features = None if values is None else Features(at, values)
        known = torch.tensor([0 if each == token else each for each in ids])
        ours = decoder.forward(known, ForwardBatch((len(ids),), len(ids), features=features))
        assert theirs.std() >= 0.3
        assert (ours - theirs).abs().max() <= EQUAL


@pytest.mark.parametrize(("projector", "tower", "known"), KINDS)
def test_logits_equal_the_reference(projector: str, tower: str, known: bool, tmp_path: Path) -> None:
    made = vila.write(tmp_path / "VILA", projector, tower, known)
    done = convert(made.path, tmp_path / "out")
    assert (done.format, done.rounded, done.packed) == ("dense", 0, 0)
    _close(made, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["image_token_index"] == (5 if known else made.llm.config.vocab_size)
    assert config["model_type"] == ("llava" if projector == "mlp2x_gelu" else "llava_downsample")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "LICENSE" in names
    assert not any(name.endswith(".py") for name in names)


def test_pixels_of_images_that_are_padded(tmp_path: Path) -> None:
    made = vila.write(tmp_path / "VILA", ratio="pad")
    convert(made.path, tmp_path / "out", to="dense")
    _close(made, tmp_path / "out", "pad")


def test_transformers_loads_the_projector_of_llava(tmp_path: Path) -> None:
    from transformers import LlavaForConditionalGeneration

    made = vila.write(tmp_path / "VILA", "mlp2x_gelu", known=True)
    convert(made.path, tmp_path / "out")
    model, info = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    pixels = _pixels(PICTURES[0], "resize")
    theirs = model.eval().get_image_features(pixels[None], return_dict=True).pooler_output[0]
    assert (theirs - made.rows(pixels)).abs().max() <= EQUAL


def test_the_output_is_compressed_and_answers(base: Vila, tmp_path: Path) -> None:
    """The converted folder goes through the engine, and through `attar compress` with images and with its tower."""
    out = base.path.parent / "out"
    llm, token = LLM(out), base.llm.config.vocab_size
    parts = [{"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "what is this?"}]
    found = llm.chat([{"role": "user", "content": parts}], GREEDY)
    ids = list(found.prompt_token_ids)
    assert ids.count(token) == 16
    wanted = list[int]()
    while len(wanted) < GREEDY.max_tokens:
        own = base.logits(ids + wanted, token, [_pixels(PICTURES[0], "resize")])
        wanted.append(int(own[-1].argmax()))
    assert list(found.token_ids) == wanted
    assert llm.generate("<image>what?", GREEDY, images=[PICTURES[1]])[0].token_ids
    images = tmp_path / "images"
    images.mkdir()
    PICTURES[1].save(images / "0.png")
    put(images / "metadata.jsonl", {"file_name": "0.png", "text": "a cat. what is this?"})
    text = torch.randint(8, 100, (3, 60), generator=torch.Generator().manual_seed(3)).tolist()
    compress_request(
        CompressionRequest(
            out, tmp_path / "small", recipe="gptq-w8", calibration=text, calib_images=images, vision="w8"
        )
    )
    receipt = read_receipt(tmp_path / "small")
    assert receipt is not None
    assert receipt.value["calibration_images"]["count"] == 1
    assert receipt.value["vision"]["scheme"] == "w8"
    small = LLM(tmp_path / "small").chat([{"role": "user", "content": parts}], GREEDY)
    assert small.prompt_token_ids == found.prompt_token_ids


def test_the_receipt_is_replayed_and_names_the_layout(base: Vila) -> None:
    out = base.path.parent / "out"
    receipt = read_receipt(out)
    assert receipt is not None
    assert receipt.value["original"]["format"] == "vila"
    verify(out)


def test_a_dtype_holds_for_every_part(base: Vila, tmp_path: Path) -> None:
    done = convert(base.path, tmp_path / "out", dtype="bfloat16")
    assert done.rounded
    folder = Folder(tmp_path / "out")
    assert {folder.info(name).dtype for name in folder.names()} == {"bfloat16"}


def test_other_commands_name_the_conversion(base: Vila, tmp_path: Path) -> None:
    model, out = str(base.path), str(tmp_path / "out")
    lines = [
        ["generate", model, "--prompt", "a"], ["serve", model], ["inspect", model], ["plan", model],
        ["chat", model], ["compress", model, out, "--recipe", "rtn-w8"],
    ]  # fmt: skip
    for line in lines:
        result = CliRunner().invoke(app, line)
        assert result.exit_code != 0
        assert "attar convert" in result.output, (line, result.output)
    with user_error("architecture_unsupported", "attar convert"):
        LLM(base.path)
    with user_error("feature_unsupported", "--to dense"):
        convert(base.path, tmp_path / "out.gguf", to="gguf")
    with user_error("option_missing", "--to"):
        convert(base.path.parent / "out", tmp_path / "again")


def test_the_command(base: Vila, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(base.path), str(tmp_path / "out"), "--quiet"])
    assert result.exit_code == 0, result.output
    assert "are exact" in result.output


def _moved(part: str, name: Any) -> Callable[[Path], None]:
    return lambda path: change(path / "config.json", **{f"{part}_cfg": name})


def _linked(path: Path) -> None:
    shutil.move(path / "mm_projector", path.parent / "elsewhere")
    (path / "mm_projector").symlink_to(path.parent / "elsewhere")


def _outer(**changes: Any) -> Callable[[Path], None]:
    return lambda path: change(path / "config.json", **changes)


def _inner(part: str, **changes: Any) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        change(path / "config.json", **{f"{part}_cfg": None})  # else the outer one contradicts
        change(path / part / "config.json", **changes)

    return changed


def _index(path: Path) -> None:
    index = path / "llm" / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] |= dict.fromkeys(value["weight_map"], "../../secret.safetensors")
    put(index, value)


def _tokenizer(path: Path) -> None:
    (path.parent / "secret").write_text("{}")
    (path / "llm" / "tokenizer_config.json").unlink()
    (path / "llm" / "generation_config.json").unlink()
    (path / "llm" / "generation_config.json").symlink_to(path.parent / "secret")


BAD: list[tuple[Callable[[Path], Any], str, str]] = [
    (lambda path: shutil.rmtree(path / "mm_projector"), "checkpoint_incomplete", "mm_projector"),
    (lambda path: shutil.rmtree(path / "vision_tower"), "checkpoint_incomplete", "vision_tower"),
    (lambda path: shutil.rmtree(path / "llm"), "checkpoint_incomplete", "llm"),
    (lambda path: os.unlink(path / "vision_tower" / "preprocessor_config.json"), "checkpoint_incomplete", "vision"),
    (lambda path: os.unlink(path / "vision_tower" / "model.safetensors"), "checkpoint_incomplete", "vision_tower"),
    (_moved("llm", "../other"), "file_unsafe", "llm_cfg"),
    (_moved("llm", "/etc"), "file_unsafe", "llm_cfg"),
    (_moved("llm", ".."), "file_unsafe", "llm_cfg"),
    (_moved("llm", "a\nb"), "file_unsafe", "llm_cfg"),
    (_moved("llm", "other"), "checkpoint_incomplete", "other"),
    (_moved("llm", 3), "config_invalid", "llm_cfg"),
    (_linked, "file_unsafe", "mm_projector"),
    (_index, "checkpoint_malformed", "secret"),
    (_tokenizer, "file_unsafe", "generation_config.json"),
    (_outer(hidden_size=65), "checkpoint_mismatch", "hidden_size"),
    (_outer(mm_hidden_size=33), "checkpoint_mismatch", "mm_hidden_size"),
    (_inner("llm", hidden_size=32), "checkpoint_mismatch", "hidden_size"),
    (_inner("llm", vocab_size=50), "checkpoint_mismatch", "embed_tokens"),
    (_inner("vision_tower", intermediate_size=64), "checkpoint_mismatch", "fc1"),
    (_inner("vision_tower", image_size=60), "checkpoint_mismatch", "image_size"),
    (_inner("mm_projector", mm_projector_type="mlp2x_gelu"), "checkpoint_incomplete", "multi_modal_projector"),
    (_inner("mm_projector", mm_projector_type="mlp_downsample_3x3_fix"), "feature_unsupported", "3x3_fix"),
    (_inner("mm_projector", mm_projector_type="linear"), "feature_unsupported", "linear"),
    (_inner("mm_projector", mm_projector_type=["linear"]), "feature_unsupported", "linear"),
    (_inner("vision_tower", model_type="intern_vit_6b"), "feature_unsupported", "intern_vit_6b"),
    (_inner("llm", model_type="gemma"), "feature_unsupported", "gemma"),
    (_inner("llm", quantization_config={"quant_method": "awq"}), "quantization_unsupported", "llm"),
    (_outer(s2=True), "feature_unsupported", "s2"),
    (_outer(image_aspect_ratio="dynamic"), "feature_unsupported", "dynamic"),
    (_outer(mm_vision_select_feature="patch"), "feature_unsupported", "mm_vision_select_feature"),
    (_outer(mm_vision_select_layer=-9), "feature_unsupported", "vision_feature_layer"),
    (_outer(mm_use_im_start_end=True), "feature_unsupported", "mm_use_im_start_end"),
    (_outer(vision_resolution=336), "feature_unsupported", "vision_resolution"),
    (_outer(llm_cfg={"num_hidden_layers": 7}), "checkpoint_mismatch", "num_hidden_layers"),
]


@pytest.mark.parametrize(("damage", "code", "word"), BAD)
def test_bad_folders_are_refused(
    broken: Path, tmp_path: Path, damage: Callable[[Path], Any], code: str, word: str
) -> None:
    damage(broken)
    with user_error(code, word):
        convert(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _cached(path: Path, cache: Path) -> Path:
    """Put a folder into a cache as `huggingface_hub` does, files as links to blobs; return its snapshot."""
    repo = cache / "models--org--vila"
    for each in sorted(path.rglob("*")):
        if each.is_file():
            name = each.relative_to(path)
            blob, link = repo / "blobs" / name.as_posix().replace("/", "-"), repo / "snapshots" / COMMIT / name
            for place in (blob, link):
                place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(each, blob)
            link.symlink_to(os.path.relpath(blob, link.parent))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return repo / "snapshots" / COMMIT


@pytest.mark.parametrize("known", [False, True])
def test_the_cache_of_the_hub_is_converted(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its snapshot's folder, whose files are links to blobs, and by its id without a network."""
    made = vila.write(tmp_path / "vila", known=known)
    snapshot = _cached(made.path, tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = [convert(name, tmp_path / f"out{i}") for i, name in enumerate((made.path, snapshot, "org/vila"))]
    assert len({each.sha256 for each in found}) == 1
    for each in found[1:]:
        assert all(not file.is_symlink() for file in each.path.iterdir())
        assert sorted(os.listdir(each.path)) == sorted(os.listdir(found[0].path))
    (snapshot / "llm" / "generation_config.json").unlink()
    (snapshot / "llm" / "generation_config.json").symlink_to(tmp_path / "vila" / "LICENSE")
    with user_error("file_unsafe", "generation_config.json"):
        convert(snapshot, tmp_path / "unsafe")


def test_a_hub_id_downloads_the_three_folders_for_the_conversion_alone(base: Vila, hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/vila"] = {**files(base.path), "llm/deep/config.json": b"{}", "other/model.safetensors": b""}
    for line in (["generate", "org/vila", "--prompt", "a"], ["inspect", "org/vila"], ["plan", "org/vila"]):
        result = CliRunner().invoke(app, line)
        assert result.exit_code != 0
        assert "attar convert" in result.output, (line, result.output)
    assert not [name for name in hub.whole if name.endswith(".safetensors")]
    done = convert("org/vila", tmp_path / "out")
    assert done.sha256 == convert(base.path, tmp_path / "again").sha256
    sent = set(hub.whole)
    assert {"llm", "vision_tower", "mm_projector"} <= {name.split("/")[0] for name in sent if "safetensors" in name}
    assert not sent & {"llm/deep/config.json", "other/model.safetensors", "modeling_vila.py"}
