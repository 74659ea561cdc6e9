"""Vision towers of GGUF models: what is written is read back, names are gguf-py's, and wrong files are refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from attar import LLM, SamplingParams
from attar.checkpoints import image_settings
from attar.checkpoints.convert.run import convert
from attar.checkpoints.gguf import mmproj, mmproj_writer
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.writer import atomic_gguf
from attar.checkpoints.receipts import receipt
from attar.checkpoints.receipts.place import receipt_path
from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.sources import vision
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.errors import UserError
from attar.evaluation.planning import questions
from attar.formats.codecs import ggml_round
from attar.formats.codecs.ggml import TYPES
from attar.images.settings import ImageSettings
from attar.kernels import dispatch
from attar.model.vision import assembly
from attar.model.vision.tensors import tensors
from attar.model.vision.wrappers import OUTSIDE
from attar.protocol.images import ImageInput, digest_of
from tests.engine.images import models

KINDS = ("smolvlm", "llava", "qwen2_vl", "qwen2_5_vl", "gemma3")
RENAMED = {"qwen2_vl": "<|image_pad|>", "qwen2_5_vl": "<|image_pad|>", "gemma3": "<image_soft_token>"}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
ROUNDED = 1e-5  # of rows and log-probabilities: a file rounds the mean and deviation of pixels to float32
EIGHT_BITS = 0.02  # the relative error of rows of a tower in Q8_0


def save(kind: str, folder: Path) -> Path:
    """Write a tiny model whose image token has the name that its family gives it."""
    models.save(kind, folder)
    if kind in RENAMED:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            text = (folder / name).read_text()
            (folder / name).write_text(text.replace('"<image>"', json.dumps(RENAMED[kind])))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["chat_template"] = settings["chat_template"].replace("<image>", RENAMED[kind])
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind == "gemma3":  # files have no words for another scale of attention
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Folder and GGUF file of a kind."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind)
            made[kind] = save(kind, place / "folder"), place / f"{kind}.gguf"
            convert(*made[kind], to="gguf")
        return made[kind]

    return of


def image_of(settings: ImageSettings) -> ImageInput:
    """An image of noise, as the decoding process cuts it."""
    side = settings.pixels.tile or (settings.pixels.size or settings.pixels.crop or (32, 32))[0]
    count = settings.pixels.patch if settings.pixels.family == "qwen2_vl" else 0
    tiles = np.random.default_rng(1).integers(0, 256, side * side * 3, dtype=np.uint8).tobytes()
    grid = (side // count, side // count) if count else (0, 0)
    rows = settings.tile_rows or (side // count // settings.pixels.merge) ** 2
    shape, size = (1, side, side), (side, side)
    return ImageInput(digest_of(b"", shape, size, tiles), tiles, shape, grid, size, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_computes_the_same_rows_from_a_folder_and_from_a_file(
    kind: str, pair: Callable[[str], tuple[Path, Path]]
) -> None:
    folder, file = pair(kind)
    ours, theirs = vision.vision_of(folder, torch.float32), vision.vision_of(file, torch.float32)
    image = image_of(vision.image_settings(folder))
    if ours.config.mean == theirs.config.mean:
        assert torch.equal(ours.encode(image), theirs.encode(image))
    torch.testing.assert_close(ours.encode(image), theirs.encode(image), rtol=ROUNDED, atol=ROUNDED)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"llava"}))
def test_answers_are_those_of_the_folder(kind: str, pair: Callable[[str], tuple[Path, Path]]) -> None:
    """LLaVA's images get margins from a file, and are cropped from its folder."""
    picture = Image.fromarray(np.random.default_rng(2).integers(0, 256, (40, 56, 3), dtype=np.uint8))
    place = "<start_of_image>" if kind == "gemma3" else RENAMED.get(kind, "<image>")
    found = []
    for path in pair(kind):
        llm = LLM(path)
        answer = llm.generate(f"a {place} b", GREEDY, images=[picture])[0]
        assert answer.logprobs is not None
        found.append((answer.token_ids, [each.logprob for each in answer.logprobs]))
        blind = llm.generate("a  b", GREEDY)[0]
        assert blind.token_ids != answer.token_ids or blind.logprobs != answer.logprobs
        llm.close()
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=ROUNDED)


def test_llavas_margins_are_said_and_read(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    folder, file = pair("llava")
    (note,) = (each for each in convert(folder, tmp_path / "again.gguf", to="gguf").notes if "resizes" in each)
    assert "crop" in note
    found = vision.image_settings(file).pixels
    assert found.square == (122, 116, 104)
    assert found.crop is None


@pytest.mark.parametrize(
    ("kind", "word"), [("smolvlm", None), ("llava", "25814"), ("llava_siglip", None), ("qwen2_5_vl", "112")]
)
def test_what_llama_cpp_would_compute_otherwise_is_said(kind: str, word: str | None, tmp_path: Path) -> None:
    notes = convert(save(kind, tmp_path / "folder"), tmp_path / "out.gguf", to="gguf").notes
    said = [each for each in notes if "llama.cpp" in each]
    assert len(said) == (word is not None)
    assert all(word is not None and word in each for each in said)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_have_the_names_of_gguf_py(kind: str, pair: Callable[[str], tuple[Path, Path]]) -> None:
    import gguf

    folder, file = pair(kind)
    tower = vision.tower_at(folder)
    assert tower is not None
    prefixes = assembly.prefixes(tower.config, tower.files)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    stored = set(GgufFile(mmproj.path_of(file)).names())
    known = set()
    for part, name, _ in tensors(tower.config):
        full = prefixes[part] + name
        # The spellings that llama.cpp's converter makes before it looks a name up.
        if full.startswith("vision_tower.") and "vision_model" not in full:
            full = full.replace("vision_tower.", "vision_tower.vision_model.")
        full = full.removeprefix("model.").replace("mm_input_projection_weight", "mm_input_projection.weight")
        for each in ("q", "k", "v") if ".qkv." in full else ("",):
            one = full.replace("qkv", each) if each else full
            found = table.get_name(one, (".weight", ".bias")) or table.get_name(f"model.{one}", (".weight", ".bias"))
            assert found is not None, one
            known.add(found.replace("mm.1.", "mm.0.") if kind == "llava" else found)  # mm.1 is Pixtral's name
    assert stored - {mmproj.SECOND_FRAME} == known


def test_receipt_and_verify_cover_the_tower_of_a_file(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    folder, _ = pair("smolvlm")
    images = tmp_path / "images"
    images.mkdir()
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(images / "a.png")
    (images / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a b c"}) + "\n")
    request = CompressionRequest(folder, tmp_path / "out.gguf", recipe="q8_0", evaluation_images=images)
    done = compress_request(request)
    assert mmproj.path_of(done.path).is_file()
    assert done.images is not None
    assert done.vision is not None
    assert verify(done.path).ok
    for each in (done.path, mmproj.path_of(done.path), receipt_path(done.path)):
        shutil.copy(each, tmp_path / each.name.replace("out", "renamed"))
    assert verify(tmp_path / "renamed.gguf").ok
    other = mmproj.path_of(pair("smolvlm")[1]).read_bytes()
    mmproj.path_of(done.path).write_bytes(other[:-4096] + bytes(4096))
    for hashes, divergence in ((True, "mmproj-out.gguf"), (False, "vision tower")):
        verdict = verify(done.path, hashes=hashes)
        assert not verdict.ok
        assert verdict.first_divergence == divergence
    mmproj.path_of(done.path).unlink()
    assert verify(done.path).first_divergence == "mmproj-out.gguf"


def _receipt(output: Path) -> Mapping[str, Any]:
    found = receipt.read_receipt(output)
    assert found is not None
    return found.value


@pytest.mark.parametrize("kind", ["smolvlm", "llava", "qwen2_5_vl", "gemma3"])
def test_a_receipt_has_the_dtypes_of_the_tower_that_the_files_have(kind: str, tmp_path: Path) -> None:
    """A file has norms, biases and tables in float32, where the folder has them in bfloat16."""
    source = save(kind, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    halves = {name: each.to(torch.bfloat16) for name, each in tensors.items()}
    save_file(halves, source / "model.safetensors", metadata={"format": "pt"})
    folder, file = tmp_path / "folder", tmp_path / "file.gguf"
    compress(source, folder, recipe="rtn-q8_0")
    compress(source, file, recipe="q8_0")
    convert(folder, tmp_path / "converted.gguf", to="gguf")
    modules = list(_receipt(folder)["copied"])
    assert modules == sorted(OUTSIDE[_architecture(source)])
    assert set(_receipt(folder)["copied"].values()) == {"bfloat16"}
    for each in (file, tmp_path / "converted.gguf"):
        stored = GgufFile(mmproj.path_of(each))
        projector = {stored.info(name).kind.name for name in stored.names() if name.startswith("mm.")}
        said = _receipt(each)["copied"]
        assert list(said) == modules
        assert said[OUTSIDE[_architecture(source)][0]] == "bfloat16 and float32"
        both = ["bfloat16" for kind in projector if kind == "BF16"] + ["float32" for kind in projector if kind == "F32"]
        assert len(modules) == 1 or said[OUTSIDE[_architecture(source)][1]] == " and ".join(both)
        assert set(_receipt(each)["files"]) == {each.name, mmproj.path_of(each).name}
        verdict = verify(each)
        assert verdict.ok
        assert "vision tower" in verdict.detail


def _architecture(folder: Path) -> str:
    found: str = json.loads((folder / "config.json").read_text())["architectures"][0]
    return found


def test_a_receipt_of_an_output_without_the_tower_has_nothing_of_it(tmp_path: Path) -> None:
    source, file = save("smolvlm", tmp_path / "source"), tmp_path / "file.gguf"
    compress(source, file, recipe="q8_0")
    assert {"copied", "vision"} <= _receipt(file).keys()
    convert(file, tmp_path / "folder", to="compressed-tensors")
    assert not {"copied", "vision"} & _receipt(tmp_path / "folder").keys()
    assert verify(tmp_path / "folder").ok
    (source / "preprocessor_config.json").unlink()
    compress(source, tmp_path / "blind.gguf", recipe="q8_0")
    assert not mmproj.path_of(tmp_path / "blind.gguf").exists()
    assert not {"copied", "vision"} & _receipt(tmp_path / "blind.gguf").keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_the_tower_by_headers(
    kind: str, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are those that a server loads, and the two headers are enough."""
    _, file = pair(kind)
    store = dispatch.store()
    if store is None:
        pytest.skip("the native kernels do not load here")
    monkeypatch.setattr(vision, "faster", lambda: False)
    loaded = vision.load_vision(file, torch.float32, store)
    whole = questions.subject(str(file))
    assert whole.tower is not None
    assert loaded is not None
    assert whole.tower.bytes(False) == loaded.nbytes
    for each in (file, mmproj.path_of(file)):
        (tmp_path / each.name).write_bytes(each.read_bytes()[: GgufFile(each).header.data])
    assert questions.subject(str(tmp_path / file.name)) == replace(whole, name=str(tmp_path / file.name))


def test_a_file_that_is_there_is_kept(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    folder, _ = pair("smolvlm")
    (tmp_path / "mmproj-out.gguf").write_bytes(b"mine")
    for make in (lambda: convert(folder, tmp_path / "out.gguf", to="gguf"),
                 lambda: compress(folder, tmp_path / "out.gguf", recipe="q8_0")):  # fmt: skip
        with pytest.raises(UserError) as failed:
            make()
        assert failed.value.code == "output_exists"
    assert (tmp_path / "mmproj-out.gguf").read_bytes() == b"mine"
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("compresses", [False, True])
def test_an_output_without_a_tower_leaves_no_mmproj_file(
    compresses: bool, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    def make(overwrite: bool = False) -> None:
        if compresses:
            compress_request(CompressionRequest(source, output, recipe="q8_0", overwrite=overwrite))
        else:
            convert(source, output, to="gguf", overwrite=overwrite)

    output = tmp_path / "out.gguf"
    source, stale = tmp_path / "source", tmp_path / "mmproj-out.gguf"
    shutil.copytree(pair("smolvlm")[0], source)
    (source / "preprocessor_config.json").unlink()
    shutil.copy(mmproj.path_of(pair("smolvlm")[1]), stale)
    with pytest.raises(UserError) as failed:
        make()
    assert failed.value.code == "output_exists"
    assert stale.is_file()
    make(overwrite=True)
    assert vision.load_vision(output, torch.float32) is None
    assert not stale.exists()
    assert verify(output).ok == compresses, "only compression writes a receipt of its own"


@pytest.mark.parametrize("name", ["out.gguf", "other.gguf"])
def test_all_files_of_an_output_lie_beside_the_target_of_a_link(
    name: str, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, disk = tmp_path / "folder", tmp_path / "disk"
    compress(pair("smolvlm")[0], folder, recipe="rtn-q8_0")
    disk.mkdir()
    (tmp_path / "out.gguf").symlink_to(disk / name)
    expected = {name, f"mmproj-{name}", f"{name}.receipt.json"}
    convert(folder, tmp_path / "out.gguf", to="gguf")
    for overwrite in (True, False):
        assert {each.name for each in disk.iterdir() if not each.name.startswith(".")} == expected
        assert verify(disk / name).ok
        assert not (tmp_path / f"mmproj-{name}").exists()
        if overwrite:
            source = pair("smolvlm")[0]
            compress_request(CompressionRequest(source, tmp_path / "out.gguf", recipe="q8_0", overwrite=True))


def test_a_folder_made_of_a_pair_says_that_the_tower_stays(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    done = convert(pair("smolvlm")[1], tmp_path / "out", to="dense")
    assert any("mmproj-smolvlm.gguf" in note for note in done.notes)
    assert image_settings.read(tmp_path / "out") is None


def _rewritten(
    file: Path, into: Path, kind_of: Callable[[str], str], name_of: Callable[[str], str] = str,
    metadata: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a pair anew: the tower's tensors under other names, in other types, with other metadata."""
    into.mkdir()
    target = into / file.name
    target.write_bytes(file.read_bytes())
    source = GgufFile(mmproj.path_of(file))
    tower = vision.tower_at(file)
    assert tower is not None
    words = {
        key: list(value) if not isinstance(value, str | int | float | bool) else value
        for key, value in source.metadata.items()
    } | dict(metadata or {})  # fmt: skip
    tensors = {name_of(name): (TYPES[kind_of(name)], source.info(name).shape) for name in source.names()}
    with atomic_gguf(mmproj.path_of(target), words, tensors) as writer:
        for name in source.names():
            values = source.read(name).view(torch.float32)
            writer.write(name_of(name), ggml_round.encode(TYPES[kind_of(name)], values))
    return target


def test_quantized_linears_are_read(pair: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    _, file = pair("smolvlm")

    def kind(name: str) -> str:
        return "Q8_0" if (".attn_" in name or ".ffn_up" in name) and name.endswith(".weight") else "F32"

    small = _rewritten(file, tmp_path / "small", kind)
    image = image_of(vision.image_settings(file))
    exact, rough = (vision.vision_of(path, torch.float32).encode(image) for path in (file, small))
    assert 0 < (exact - rough).norm() / exact.norm() < EIGHT_BITS


def test_feed_forwards_with_each_others_names_are_read(
    pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, file = pair("qwen2_vl")

    def swapped(name: str) -> str:
        return name.replace("ffn_up", "ffn_x").replace("ffn_down", "ffn_up").replace("ffn_x", "ffn_down")

    old = _rewritten(file, tmp_path / "old", lambda name: "F32", swapped)
    image = image_of(vision.image_settings(file))
    assert torch.equal(*(vision.vision_of(path, torch.float32).encode(image) for path in (file, old)))


WRONG: list[tuple[str, str, object, str]] = [
    ("smolvlm", "clip.projector_type", "resampler", "feature_unsupported"),
    ("smolvlm", "general.architecture", "llama", "file_wrong_kind"),
    ("smolvlm", "clip.vision.embedding_length", 2**30, "config_invalid"),
    ("smolvlm", "clip.vision.embedding_length", 64, "checkpoint_mismatch"),
    ("smolvlm", "clip.vision.attention.head_count", 7, "config_invalid"),
    ("smolvlm", "clip.vision.block_count", 40, "checkpoint_incomplete"),
    ("smolvlm", "clip.vision.image_size", 2**20, "config_invalid"),
    ("smolvlm", "clip.vision.projector.scale_factor", 3, "config_invalid"),
    ("smolvlm", "clip.vision.image_std", [0.5, 0.5], "config_invalid"),
    ("smolvlm", "clip.vision.image_mean", [0.5] * 1000, "config_invalid"),
    ("smolvlm", "clip.use_silu", True, "config_invalid"),
    ("llava", "clip.vision.feature_layer", [1, 1], "feature_unsupported"),
    ("llava", "clip.vision.feature_layer", [9], "config_invalid"),
    ("llava", "clip.vision.image_grid_pinpoints", [32, 64], "feature_unsupported"),
    ("qwen2_vl", "clip.vision.image_max_pixels", 16, "config_invalid"),
    ("qwen2_5_vl", "clip.vision.window_size", 4, "config_invalid"),
]


@pytest.mark.parametrize(("kind", "key", "value", "code"), WRONG)
def test_wrong_metadata_are_named(
    kind: str, key: str, value: object, code: str, pair: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    bad = _rewritten(pair(kind)[1], tmp_path / "bad", lambda name: "F32", metadata={key: value})
    with pytest.raises(UserError) as failed:
        vision.load_vision(bad, torch.float32)
    assert failed.value.code == code


def test_any_value_of_any_key_is_read_or_refused(pair: Callable[[str], tuple[Path, Path]]) -> None:
    source, generator = random.Random(0), np.random.default_rng(0)
    numbers = (-1, 0, 1, 2**40, 0.0, -0.5, float("nan"), float("inf"))
    strange: tuple[Any, ...] = (*numbers, None, "", "x", True, [], [[]], [1e30])
    for kind in KINDS:
        file = pair(kind)[1]
        found, language = GgufFile(mmproj.path_of(file)), GgufFile(file).metadata
        plain = dict(found.metadata)
        for _ in range(200):
            key = source.choice(list(plain))
            value = strange[int(generator.integers(len(strange)))]
            try:
                read = mmproj.of(file, {**plain, key: value}, found.names(), language)
            except UserError:
                continue
            assert read.config.hidden > 0


def test_a_model_without_an_image_token_is_refused(pair: Callable[[str], tuple[Path, Path]]) -> None:
    file = pair("qwen2_vl")[1]
    found, language = GgufFile(mmproj.path_of(file)), dict(GgufFile(file).metadata)
    language["tokenizer.ggml.tokens"] = ["a", "b"]
    with pytest.raises(UserError) as failed:
        mmproj.of(file, found.metadata, found.names(), language)
    assert failed.value.code == "config_invalid"
    assert "<|image_pad|>" in str(failed.value)


@pytest.mark.parametrize("change", [{"newline": True}, {"activation": "relu"}, {"rescale": 1.0}])
def test_a_tower_that_a_file_cannot_describe_is_not_written(
    change: dict[str, Any], pair: Callable[[str], tuple[Path, Path]]
) -> None:
    from dataclasses import replace

    folder, file = pair("smolvlm")
    tower = vision.tower_at(folder)
    assert tower is not None
    config, language = replace(tower.config, **change), GgufFile(file).metadata
    with pytest.raises(UserError) as failed:
        mmproj_writer.plan(config, tower.files, vision.image_settings(folder), language, "x")
    assert failed.value.code == "gguf_inexpressible"


def test_parts_of_a_model_have_one_mmproj_file() -> None:
    assert mmproj.path_of(Path("a/m-00001-of-00003.gguf")) == Path("a/mmproj-m.gguf")
    assert mmproj.path_of(Path("a/m.gguf")) == Path("a/mmproj-m.gguf")
