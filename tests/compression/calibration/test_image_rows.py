"""Calibration sequences with images: states as transformers computes them, statistics, receipts, and refusals."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from attar.checkpoints.receipts.receipt import read_receipt
from attar.checkpoints.sources import hf
from attar.cli.main import app
from attar.compression.calibration import gradients, image_rows, importance
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.calibration.image_rows import ImageRows
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.images.pairs import METADATA
from attar.model import decoder
from attar.model.assembly import build_ends, build_final_norm
from tests.engine.images import models
from tests.errors import user_error
from tests.images import oracle
from tests.images.test_decoding import picture
from tests.images.test_pairs import hostile_folder, write

EQUAL = 2e-4  # |difference| of logits, float32
RELATIVE = 1e-4
KINDS = ("smolvlm", "llava", "llava_next", "qwen2_vl", "gemma3")
LENGTH = 160
MEMORY = 1 << 30
TEXTS = ["a cat. what is this?", "row 3 crops to help you see"]
PICTURES = [picture(100, 37), picture(31, 65, 1)]


@dataclass(frozen=True, eq=False)
class Seen:
    kind: str
    model: Path
    set: Path
    text: Tensor
    reference: Any
    source: hf.Checkpoint
    images: ImageRows


def pictures(folder: Path) -> Path:
    names = [f"{number}.png" for number in range(len(TEXTS))]
    write(folder, list(zip(names, TEXTS, strict=True)), {})
    for name, each in zip(names, PICTURES, strict=True):
        each.save(folder / name)
    return folder


def texts(vocab: int, count: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(8, vocab, (count, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=KINDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    base = tmp_path_factory.mktemp("seen")
    reference = models.save(request.param, base / "model")
    source = hf.Checkpoint.open(base / "model")
    text = texts(source.config.vocab_size)
    found = image_rows.make(pictures(base / "set"), source, text, 8, MEMORY)
    return Seen(request.param, base / "model", base / "set", text, reference, source, found)


@torch.inference_mode()
def theirs(seen: Seen, number: int) -> Any:
    """Return transformers' outputs for a sequence with an image."""
    ids = seen.images.ids[number]
    tokens = torch.where(ids >= seen.images.first, torch.tensor(models.IMAGE), ids)[None]
    image = PICTURES[number]
    given = oracle.processor(seen.kind)(images=[[image]] if seen.kind == "smolvlm" else [image], return_tensors="pt")
    more = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if seen.kind == "gemma3":
        more["token_type_ids"] = (tokens == models.IMAGE).long()
    if seen.kind == "qwen2_vl":
        more["mm_token_type_ids"] = (tokens == models.IMAGE).int()
    return seen.reference(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, output_hidden_states=True, **more
    )


def test_sequences_have_an_image_its_text_and_calibration_text(seen: Seen) -> None:
    ids = seen.images.ids
    assert ids.shape == (2, LENGTH)
    beyond = ids[ids >= seen.images.first]
    assert torch.equal(beyond, torch.arange(len(beyond)) + seen.images.first)
    assert len(beyond) == len(seen.images.features)
    for number, line in enumerate(ids):
        behind = line[int((line >= seen.images.first).nonzero()[-1, 0]) + 1 :]
        assert any(torch.equal(behind[-20:], each[at : at + 20]) for each in seen.text for at in range(LENGTH - 19)), (
            number
        )


def test_states_are_those_of_transformers(seen: Seen, tmp_path: Path) -> None:
    """Text sequences beside them keep the states that they have alone."""
    ids, config = torch.cat((seen.text, seen.images.ids)), seen.source.config
    shape = (*ids.shape, config.hidden)
    with closing(HiddenStates(tmp_path / "a.f32", shape, 0, places=seen.images.places(len(ids)))) as states:
        gradients.through(seen.source, ids, [states] * (config.layers + 1), images=seen.images)
        rows = states.read(range(len(ids))).view(shape)
    norm, head = build_final_norm(config, seen.source), build_ends(config, seen.source)[1]
    for number in range(len(seen.images.ids)):
        logits = decoder.logits(config, norm, head, rows[len(seen.text) + number])
        assert (logits - theirs(seen, number).logits[0]).abs().max() <= EQUAL
    with closing(HiddenStates(tmp_path / "b.f32", (*seen.text.shape, config.hidden), 0)) as states:
        gradients.through(seen.source, seen.text, [states] * (config.layers + 1))
        alone = states.read(range(len(seen.text))).view(-1, LENGTH, config.hidden)
    assert (rows[: len(seen.text)] - alone).abs().max() <= EQUAL


def test_rows_behind_images_enter_the_statistics(seen: Seen, tmp_path: Path) -> None:
    """The mean squares of the LM head's inputs, over image rows and the text behind them, are transformers'."""
    found = importance.collect(
        seen.source, seen.images.ids, tmp_path, "k", 0, lambda *_: None, seen.images
    )[seen.source.config.names.head]  # fmt: skip
    wanted = torch.cat([theirs(seen, number).hidden_states[-1][0] for number in range(2)]).double().square().mean(0)
    assert torch.allclose(found.double(), wanted, rtol=RELATIVE)
    for text in seen.text.split(1):
        alone = importance.collect(seen.source, text, tmp_path, "t", 0, lambda *_: None)
        assert not torch.allclose(found, alone[seen.source.config.names.head], rtol=1e-2)


def asked(seen: Seen, out: Path, recipe: str = "gptq-w4g32", **more: Any) -> CompressionRequest:
    given: dict[str, Any] = {"calibration": seen.text.tolist(), "calib_images": seen.set, **more}
    return CompressionRequest(seen.model, out, recipe=recipe, **given)


def weights(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


@pytest.mark.parametrize("recipe", ["gptq-w4g32", "awq-w4g32", "guided-w4g32", "smoothquant+gptq-w8a8"])
def test_images_change_what_is_rounded(seen: Seen, tmp_path: Path, recipe: str) -> None:
    with_images = compress_request(asked(seen, tmp_path / "a", recipe))
    assert with_images.records
    compress_request(asked(seen, tmp_path / "b", recipe, calib_images=None))
    assert weights(tmp_path / "a") != weights(tmp_path / "b")
    receipt = read_receipt(tmp_path / "a")
    assert receipt is not None
    assert receipt.value["calibration_images"] == {"count": 2, "sha256": seen.images.digest}
    plain = read_receipt(tmp_path / "b")
    assert plain is not None
    assert "calibration_images" not in plain.value
    assert receipt.value["calibration"] != plain.value["calibration"]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    base = tmp_path_factory.mktemp("llava")
    reference = models.save("llava", base / "model")
    source = hf.Checkpoint.open(base / "model")
    text = texts(source.config.vocab_size)
    found = image_rows.make(pictures(base / "set"), source, text, 8, MEMORY)
    return Seen("llava", base / "model", base / "set", text, reference, source, found)


def test_a_run_has_equal_bytes_again_and_resumes(llava: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run finds its rows of images again, also where the images are gone."""
    compress_request(asked(llava, tmp_path / "a"))
    compress_request(asked(llava, tmp_path / "b"))
    assert (tmp_path / "a" / "receipt.json").read_bytes() == (tmp_path / "b" / "receipt.json").read_bytes()
    images = Path(shutil.copytree(llava.set, tmp_path / "set"))
    from attar.compression.runs import block_pass

    finish, calls = block_pass.RunState.finish_block, []

    def killed(self: Any, layer: int, *more: Any) -> None:
        finish(self, layer, *more)
        calls.append(layer)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(block_pass.RunState, "finish_block", killed)
    with pytest.raises(KeyboardInterrupt):
        compress_request(asked(llava, tmp_path / "c", calib_images=images))
    for path in images.glob("*.png"):
        path.unlink()
    compress_request(asked(llava, tmp_path / "c", calib_images=images))
    assert calls == [0, 1]
    assert weights(tmp_path / "a") == weights(tmp_path / "c")


def test_other_images_give_another_receipt(llava: Seen, tmp_path: Path) -> None:
    other = pictures(tmp_path / "set")
    picture(50, 50, 9).save(other / "0.png")
    found = image_rows.make(other, llava.source, llava.text, 8, MEMORY)
    assert found.digest != llava.images.digest
    assert image_rows.make(llava.set, llava.source, llava.text, 1, MEMORY).to_dict()["count"] == 1


def test_damaged_rows_are_made_anew(llava: Seen, tmp_path: Path) -> None:
    at = tmp_path / "images-x"
    first = image_rows.kept_or_made(llava.set, llava.source, llava.text, 8, at, MEMORY)
    file = next(at.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    again = image_rows.kept_or_made(llava.set, llava.source, llava.text, 8, at, MEMORY)
    assert torch.equal(first.features, again.features)
    kept = image_rows.kept_or_made(tmp_path, llava.source, llava.text, 8, at, MEMORY)  # the images are not read
    assert torch.equal(kept.ids, first.ids)
    assert kept.to_dict() == first.to_dict()


def test_hostile_files_are_left_out_with_a_warning(llava: Seen, tmp_path: Path) -> None:
    reasons = hostile_folder(tmp_path / "set")
    lines = [{"file_name": name, "text": "a cat"} for name in [*reasons, "good.png"]]
    (tmp_path / "set" / METADATA).write_text("\n".join(map(json.dumps, lines)))
    done = compress_request(asked(llava, tmp_path / "out", calib_images=tmp_path / "set", samples=64))
    (warning,) = [each for each in done.warnings if "left out" in each]
    assert f"images: {len(reasons)} pairs of {len(lines)} left out: 'link.png' (a symbolic link" in warning
    assert str(tmp_path) not in warning
    receipt = read_receipt(tmp_path / "out")
    assert receipt is not None
    assert receipt.value["calibration_images"]["count"] == 1
    assert warning in receipt.value["warnings"]


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        ({"calibration": None}, "calibration_missing", "images go with a calibration text"),
        ({"recipe": "rtn-w4g32"}, "calibration_unused", "leave the images out"),
        ({"calib_images": Path("/none")}, "file_not_found", "no such folder"),
        ({"calib_memory": 64}, "memory_insufficient", "--samples"),
    ],
)
def test_what_does_not_go_is_refused(llava: Seen, tmp_path: Path, more: dict[str, Any], code: str, word: str) -> None:
    recipe = more.pop("recipe", "gptq-w4g32")
    with user_error(code, word):
        compress_request(asked(llava, tmp_path / "out", recipe, **more))
    assert not (tmp_path / "out").exists()


def test_sequences_that_are_too_short_name_the_tokens(llava: Seen, tmp_path: Path) -> None:
    with user_error("image_invalid", "at most 12 fit"):
        image_rows.make(llava.set, llava.source, texts(llava.source.config.vocab_size, length=12), 8, MEMORY)


def test_a_model_that_takes_no_images_is_refused(llava: Seen, demo: Path, tmp_path: Path) -> None:
    with user_error("feature_unsupported", "vision tower"):
        compress_request(CompressionRequest(demo, tmp_path / "out", calibration="self", calib_images=llava.set))


def test_the_command(llava: Seen, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("User: what is this?\n\nAssistant: a cat.\n\n\nrow_3_col_1 crops to help " * 30)
    result = CliRunner().invoke(app, [
        "compress", str(llava.model), str(tmp_path / "out"), "--recipe", "gptq-w4g32", "--calib",
        str(tmp_path / "text.txt"), "--calib-images", str(llava.set), "--samples", "4", "--length", "80", "--quiet",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    receipt = read_receipt(tmp_path / "out")
    assert receipt is not None
    assert receipt.value["calibration_images"]["count"] == 2
