"""`compress --eval-images`: figures in the receipt are those of `attar eval --images`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from attar.checkpoints.receipts.receipt import read_receipt
from attar.cli.main import app
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.evaluation.image_report import evaluate_images
from attar.evaluation.outputs import read
from tests.engine.images import models
from tests.errors import user_error
from tests.images.test_decoding import picture
from tests.images.test_pairs import write

KINDS = ("smolvlm", "qwen2_vl", "gemma3")


def pictures(folder: Path) -> Path:
    write(folder, [("a.png", "a cat"), ("b.png", "what is this?"), ("none.png", "lost")], {})
    for number, name in enumerate(("a.png", "b.png")):
        picture(50 + number, 40, number).save(folder / name)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_those_of_eval(kind: str, tmp_path: Path) -> None:
    models.save(kind, tmp_path / "model")
    images = pictures(tmp_path / "set")
    request = CompressionRequest(tmp_path / "model", tmp_path / "out", recipe="rtn-w4g32", evaluation_images=images)
    done = compress_request(request)
    wanted = evaluate_images(tmp_path / "out", images, against=tmp_path / "model").to_dict()
    assert done.images == wanted
    assert wanted["kl_mean"] > 0
    receipt = read_receipt(tmp_path / "out")
    assert receipt is not None
    assert receipt.value["images"] == json.loads(json.dumps(wanted))
    assert read(tmp_path / "out").images["kl_mean"].value == wanted["kl_mean"]


def test_the_command_prints_them_and_names_what_was_left_out(tmp_path: Path) -> None:
    models.save("llava", tmp_path / "model")
    result = CliRunner().invoke(app, [
        "compress", str(tmp_path / "model"), str(tmp_path / "out"), "--recipe", "rtn-w4g32", "--eval-images",
        str(pictures(tmp_path / "set")), "--quiet",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "tokens behind 2 images: mean KL" in result.stdout
    assert "1 pair of 3 left out: 'none.png'" in result.stderr


def test_what_cannot_be_measured_is_refused_before_the_work(demo: Path, tmp_path: Path) -> None:
    models.save("llava", tmp_path / "model")
    images = pictures(tmp_path / "set")
    out = tmp_path / "out"
    for source, folder, code in (
        (demo, images, "feature_unsupported"),
        (tmp_path / "model", tmp_path / "none", "file_not_found"),
    ):
        with user_error(code):
            compress_request(CompressionRequest(source, out, recipe="rtn-w4g32", evaluation_images=folder))
        assert not out.exists()
