"""Which text a run walks, and what it asks once its output is written: the cost, where blocks were compressed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attar.checkpoints.sources import hf, opening
from attar.compression.calibration import texts
from attar.compression.calibration.amount import BESIDES, Amount
from attar.compression.request.request import CompressionRequest
from attar.compression.runs import run
from attar.compression.runs.pipeline import Compressed, compress, compress_request
from attar.compression.runs.run import Run
from attar.compression.training import tune
from attar.kernels import dispatch
from tests.errors import user_error

Ids = list[list[int]]

TENSORS = 1 << 14  # bytes at the end of a GGUF file that hold tensors: what is before them has its name


def written(source: Path, count: int, length: int) -> torch.Tensor:
    """What the model writes to go with a text of the default seed."""
    return texts.sample_from(hf.load(source, torch.float32), Amount(drawn=count).besides(length))


def test_what_the_model_writes_is_walked_after_the_text(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    drawn = written(tiny, 3, len(calibration[0]))
    compress_request(
        CompressionRequest(tiny, tmp_path / "drawn", recipe="gptq-w4g32", calibration=calibration, drawn=3)
    )
    compress(tiny, tmp_path / "given", recipe="gptq-w4g32", calibration=[*calibration, *drawn.tolist()])
    compress(tiny, tmp_path / "without", recipe="gptq-w4g32", calibration=calibration)
    drawn_file, given, without = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("drawn", "given", "without")
    )
    assert drawn_file == given != without
    receipts = [json.loads((tmp_path / name / "receipt.json").read_bytes()) for name in ("drawn", "given")]
    assert [receipt.get("drawn") for receipt in receipts] == [3, None]
    assert receipts[0]["calibration"] == receipts[1]["calibration"]
    assert not list(tmp_path.glob(".*")), "what was drawn is kept until the output is there"


def test_the_given_text_alone_judges(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked, ids = [], torch.tensor(calibration)
    monkeypatch.setattr(run, "Walk", lambda *args: walked.append(args[3]) or _stop())  # type: ignore[func-returns-value]
    with pytest.raises(InterruptedError):
        compress_request(
            CompressionRequest(tiny, tmp_path / "out", recipe="gptq+tune-w4g32", calibration=calibration, drawn=3)
        )
    expected = torch.cat([tune.without_judges(ids), written(tiny, 3, ids.shape[1])])
    assert torch.equal(walked[0], expected)


def _stop() -> None:
    raise InterruptedError


def test_text_is_drawn_once_for_all_recipes_tried_and_kept_for_a_run_that_resumes(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, real = [], texts.sample_from
    monkeypatch.setattr(texts, "sample_from", lambda *args, **also: drawn.append(args[1]) or real(*args, **also))  # type: ignore[func-returns-value]

    def start(progress: Callable[[str, int, int], None] | None = None, resume: bool = True) -> Compressed:
        return compress_request(
            CompressionRequest(
                tiny, tmp_path / "out", recipe="gptq-w4g32,gptq-w4g64", calibration=calibration, drawn=3, resume=resume
            ),
            progress,
        )

    def stop_in_second(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("recipes", 1):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        start(stop_in_second)
    assert len(drawn) == 1
    with pytest.raises(InterruptedError):
        start(stop_in_second, resume=False)
    assert len(drawn) == 2
    assert start().selection is not None
    assert [(amount.samples, amount.seed) for amount in drawn] == [(3, BESIDES)] * 2
    assert not list(tmp_path.glob(".*"))


def test_recipes_tried_on_other_text_are_tried_again(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    tried: list[int] = []

    def start(drawn: int, last: int) -> Compressed:
        def progress(stage: str, done: int, total: int) -> None:
            if stage == "recipes":
                tried.append(done)
                if done == last:
                    raise InterruptedError

        return compress_request(
            CompressionRequest(
                tiny, tmp_path / "out", recipe="rtn-w4g32,gptq-w4g32", calibration=calibration, drawn=drawn
            ),
            progress,
        )

    with pytest.raises(InterruptedError):
        start(drawn=0, last=1)
    tried.clear()
    assert start(drawn=3, last=99).selection is not None
    assert tried == [0, 1, 2]
    assert json.loads((tmp_path / "out" / "receipt.json").read_bytes())["drawn"] == 3


def test_importances_are_of_drawn_text_too(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    drawn = written(tiny, 3, len(calibration[0])).tolist()
    compress_request(CompressionRequest(tiny, tmp_path / "drawn.gguf", recipe="q4_0", calibration=calibration, drawn=3))
    compress(tiny, tmp_path / "given.gguf", recipe="q4_0", calibration=[*calibration, *drawn])
    compress(tiny, tmp_path / "without.gguf", recipe="q4_0", calibration=calibration)
    names = ("drawn", "given", "without")
    found, given, without = ((tmp_path / f"{name}.gguf").read_bytes()[-TENSORS:] for name in names)
    assert found == given != without


@pytest.mark.parametrize("recipe", ["rtn-w4g32", "hqq-w4g32"])
def test_text_is_not_drawn_for_recipes_that_read_none(
    recipe: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    with user_error("calibration_unused"):
        compress_request(CompressionRequest(tiny, tmp_path / "out", recipe=recipe, calibration=calibration, drawn=3))


def test_text_is_not_drawn_for_several_recipes_that_read_none(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    with user_error("calibration_unused"):
        compress_request(
            CompressionRequest(tiny, tmp_path / "out", recipe="rtn-w4g32,hqq-w4g32", calibration=calibration, drawn=3)
        )


def measuring(device: str) -> Run:
    """What is asked of a run that has written its output."""
    made, texts = Run.__new__(Run), {"held_out": [1, 2], "tokenizer": SimpleNamespace(added_bos=None)}
    made.request, made._resolved = SimpleNamespace(device=device), SimpleNamespace(**texts)  # type: ignore[assignment]
    made.source = SimpleNamespace(folder=SimpleNamespace(path=Path("original")))  # type: ignore[assignment]
    made.made, made.report = Path("output"), lambda stage, done, total: None
    return made


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_the_cost_is_measured_where_blocks_were_compressed(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(dispatch, "store", lambda device, dtype: f"a store of {device}")
    monkeypatch.setattr(opening, "load", lambda *how: loaded.append(how))
    monkeypatch.setattr(run, "measure", lambda *_, **__: SimpleNamespace(to_dict=lambda: {"kl_mean": 0.5}))
    assert measuring(device).measure() == {"kl_mean": 0.5}
    store = None if device == "cpu" else "a store of cuda"
    (output, *how), (original, *how_again) = loaded
    assert (output, original.folder.path) == (Path("output"), Path("original"))  # the latter is open already
    assert how == how_again == [dtype, None, store]


def test_a_card_without_room_for_both_models_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(dispatch, "store", lambda device, dtype: None)
    monkeypatch.setattr(opening, "load", full)
    with user_error("memory_insufficient"):
        measuring("cuda").measure()
