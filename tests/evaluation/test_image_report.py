"""`attar eval --images`: figures on texts behind images against transformers' logits, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from attar.checkpoints.receipts.receipt import read_receipt
from attar.cli.main import app
from attar.compression.runs.pipeline import compress
from attar.evaluation import page
from attar.evaluation.image_report import evaluate_images
from attar.evaluation.outputs import read
from tests.engine.images import models
from tests.errors import user_error
from tests.images import oracle
from tests.images.test_decoding import picture
from tests.images.test_pairs import write
from tests.model.vision import tiny

EQUAL = 2e-3  # relative, of losses and divergences from logits in float32
TEXTS = ["a cat. what is this?", "row 3 crops to help you see", "User: a cat."]
PICTURES = [picture(100, 37), picture(31, 65, 1), picture(64, 64, 2)]


@dataclass(frozen=True)
class Seen:
    kind: str
    original: Path
    out: Path
    set: Path
    reference: Any


@pytest.fixture(scope="module", params=models.KINDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A model, a compressed copy and a folder of images."""
    base = tmp_path_factory.mktemp("seen")
    reference = models.save(request.param, base / "model")
    compress(base / "model", base / "out", recipe="rtn-w4g32")
    names = [f"{number}.png" for number in range(len(TEXTS))]
    write(base / "set", list(zip(names, TEXTS, strict=True)), {})
    for name, each in zip(names, PICTURES, strict=True):
        each.save(base / "set" / name)
    return Seen(request.param, base / "model", base / "out", base / "set", reference)


@torch.inference_mode()
def losses(kind: str, model: Any, ids: tuple[int, ...], image: Any, behind: int) -> torch.Tensor:
    """Return transformers' loss of each token from `behind` on."""
    given = oracle.processor(kind)(images=[[image]] if kind == "smolvlm" else [image], return_tensors="pt")
    more = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    tokens = torch.tensor([ids])
    if kind == "qwen2_vl":
        more["mm_token_type_ids"] = (tokens == models.IMAGE).int()
    if kind == "gemma3":
        more["token_type_ids"] = (tokens == models.IMAGE).long()
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **more).logits[0]
    return torch.nn.functional.cross_entropy(logits[behind - 1 : -1].double(), tokens[0, behind:], reduction="none")


def test_losses_are_those_of_transformers(seen: Seen) -> None:
    from attar.checkpoints import vocabulary
    from attar.images.pairs import PairPrompts
    from attar.images.settings import read_settings

    settings = read_settings(seen.original)
    assert settings is not None
    prompts = list(PairPrompts(seen.set, settings, vocabulary.tokenizer(seen.original), 512))
    wanted = torch.cat([
        losses(seen.kind, seen.reference, each.ids, image, each.behind)
        for each, image in zip(prompts, PICTURES, strict=True)
    ])  # fmt: skip
    found = evaluate_images(seen.original, seen.set)
    assert found.tokens == len(wanted)
    assert torch.from_numpy(found.measurement.nll).sub(wanted).abs().max() <= EQUAL
    assert found.to_dict()["protocol"]["images"] == len(TEXTS)
    assert found.to_dict()["protocol"]["image_rows"] == sum(each.image.rows for each in prompts)


def test_a_copy_diverges_and_the_original_does_not(seen: Seen) -> None:
    told: list[tuple[str, int, int]] = []
    found = evaluate_images(seen.out, seen.set, against=seen.original, progress=lambda *each: told.append(each))
    kl = found.figures["kl_mean"]
    assert kl.value > 0
    assert kl.low is not None
    assert kl.low <= kl.value <= (kl.high or 0)
    assert told[-1] == ("evaluating", 3, 3)
    own = evaluate_images(seen.original, seen.set, against=seen.original).figures
    assert own["kl_mean"].value == 0
    assert own["top1"].value == own["ear"].value == 1
    assert found.figures["ppl_base"].value == pytest.approx(own["ppl"].value)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    base = tmp_path_factory.mktemp("llava")
    reference = models.save("llava", base / "model")
    compress(base / "model", base / "out", recipe="rtn-w4g32")
    write(base / "set", [("a.png", "a cat"), ("b.png", "what is this?"), ("none.png", "lost")], {})
    for name, each in zip(("a.png", "b.png"), PICTURES, strict=False):
        each.save(base / "set" / name)
    return Seen("llava", base / "model", base / "out", base / "set", reference)


def test_the_image_counts(llava: Seen, tmp_path: Path) -> None:
    """Other pictures behind the same names give other figures."""
    other = write(tmp_path / "set", [("a.png", "a cat"), ("b.png", "what is this?")], {})
    for name in ("a.png", "b.png"):
        picture(50, 50, 9).save(other / name)
    assert evaluate_images(llava.out, llava.set).figures["ppl"] != evaluate_images(llava.out, other).figures["ppl"]


def test_towers_that_differ_are_each_used(llava: Seen, tmp_path: Path) -> None:
    """A model whose tower alone was changed diverges from the original."""
    import shutil

    from safetensors.torch import load_file, save_file

    changed = Path(shutil.copytree(llava.original, tmp_path / "changed"))
    (file,) = changed.glob("*.safetensors")
    tensors = load_file(file)
    name = next(each for each in tensors if each.endswith("multi_modal_projector.linear_1.weight"))
    save_file({**tensors, name: tensors[name] * 1.5}, file, metadata={"format": "pt"})
    assert evaluate_images(changed, llava.set, against=llava.original).figures["kl_mean"].value > 0


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments, "--quiet", "--json"])


def test_the_command_prints_and_records(llava: Seen) -> None:
    given = [str(llava.out), "--images", str(llava.set), "--against", str(llava.original)]
    result = run(*given, "--record")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert "KL" in result.stdout.upper()
    assert "tokens behind 2 images" in result.stdout
    assert "'none.png' (there is no such file)" in result.stderr
    assert told["warnings"]
    receipt = read_receipt(llava.out)
    assert receipt is not None
    assert receipt.value["images"]["kl_mean"] == told["kl_mean"] > 0
    seen = read(llava.out)
    assert seen.images["kl_mean"].value == told["kl_mean"]
    assert "KL behind images" in page.html(page.Contents([seen]))
    few = json.loads(run(*given, "--limit", "1").stdout.splitlines()[-1])
    assert few["protocol"]["images"] == 1
    assert few["intervals"]["kl_mean"] is None


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--text", "x.txt"], "option_conflict"),
        (["--task", "piqa"], "option_conflict"),
        (["--kv", "int8"], "option_conflict"),
        (["--max-tokens", "9"], "option_conflict"),
        (["--greedy", "2"], "option_conflict"),
        (["--tp", "2"], "option_conflict"),
        (["--record"], "option_missing"),
        (["--record", "--against", "demo", "--limit", "1"], "option_conflict"),
    ],
)
def test_options_of_other_measurements_are_refused(llava: Seen, more: list[str], code: str) -> None:
    result = run(str(llava.out), "--images", str(llava.set), *more)
    assert result.exit_code == 2, result.output
    assert json.loads(result.stdout.splitlines()[-1])["code"] == code


def test_models_without_vision_are_refused(llava: Seen, demo: Path, tmp_path: Path) -> None:
    with user_error("feature_unsupported", "takes no images"):
        evaluate_images(demo, llava.set)
    with user_error("feature_unsupported", "takes no images"):
        evaluate_images(llava.out, llava.set, against=demo)
    bare = tiny.folder("llava")
    with user_error("feature_unsupported", "preprocessor_config.json"):
        evaluate_images(bare, llava.set)


def test_a_tower_of_other_tiles_is_refused(llava: Seen, tmp_path: Path) -> None:
    models.save("smolvlm", tmp_path / "other")
    with user_error("image_invalid", "the tower takes 64 x 64"):
        evaluate_images(llava.out, llava.set, against=tmp_path / "other")
