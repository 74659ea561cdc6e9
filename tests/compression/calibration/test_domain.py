"""Of what kind texts are: surprise against whole forward passes, shares of texts by hand, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.checkpoints.receipts.place import receipt_path
from attar.checkpoints.sources import hf
from attar.compression.calibration import domain, hidden_states, importance
from attar.compression.calibration import texts as calibrate
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.domain import RUN, DomainCheck, shared, surprise
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.model.cache import ForwardBatch
from attar.text.tokenizer import Tokenizer
from tests.conftest import token_ids

Ids = list[list[int]]

WHOLE = 1e-3  # nats between float32 products of all rows of the output matrix and of some, after rounding to 4 digits

NOVEL = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair. He had been walking for an hour along the road "
    "by the river when he saw that the old woman was sitting at the door of her house, as she had sat there every "
    "evening that summer; and, taking off his hat, he wished her a good evening and asked whether her son had come "
    "back from the town."
)


def texts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(receipt_path(folder).read_text())["texts"]
    return found


@pytest.mark.parametrize("model", ["tiny", "demo"])
def test_surprise_is_that_of_whole_passes(
    model: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the output matrix in parts, and some of the sequences, evenly spread."""
    folder = request.getfixturevalue(model)
    monkeypatch.setattr(domain, "TOKENS", 80)
    monkeypatch.setattr(hidden_states, "HEAD_ROWS", 100)
    monkeypatch.setattr(domain, "ROWS", 7)
    ids = torch.tensor(token_ids(5, 24))
    decoder, nats, expected = hf.load(folder, torch.float32), [], []
    for row in ids[[0, 1, 3]]:
        found = decoder.forward(row, ForwardBatch((24,), 24)).double().log_softmax(-1)[:-1]
        nats.append(-found.gather(1, row[1:, None]).mean())
        expected.append(-(found.exp() * found).sum(-1).mean())
    whole = DomainCheck(3 * 23, float(sum(nats)) / 3, float(sum(expected)) / 3)
    told = surprise(hf.Checkpoint.open(folder), ids, tmp_path)
    assert told is not None
    assert told.tokens == whole.tokens
    assert told.nats == pytest.approx(whole.nats, abs=WHOLE)
    assert told.expected == pytest.approx(whole.expected, abs=WHOLE)
    assert told == surprise(hf.Checkpoint.open(folder), ids, tmp_path), "deterministic"
    assert not list(tmp_path.iterdir())


def test_predictions_that_are_no_numbers_surprise_nobody(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leave no file, however it ends."""
    ids, source = torch.tensor(token_ids(2, 8)), hf.Checkpoint.open(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(domain, "_at_head", lambda *rest: (torch.tensor([1.0, torch.nan]), torch.ones(2)))
        assert surprise(source, ids, tmp_path) is None
    monkeypatch.setattr(domain.gradients, "advance", lambda *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        surprise(source, ids, tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_token_surprises_nobody(tiny: Path, tmp_path: Path) -> None:
    assert surprise(hf.Checkpoint.open(tiny), torch.tensor([[1], [2]]), tmp_path) is None
    done = compress(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=[[1], [2]])
    assert done.texts is None
    assert "texts" not in json.loads((tmp_path / "out" / "receipt.json").read_text())


@pytest.mark.parametrize("recipe, out", [("smoothquant-w8a8", "out"), ("q8_0", "out.gguf")])
def test_text_of_another_kind_is_warned_about(recipe: str, out: str, demo: Path, tmp_path: Path) -> None:
    """Random characters; whether linears' inputs are read or importances alone."""
    (tmp_path / "noise").write_text("".join(chr(33 + each) for each in token_ids(1, 200, vocab=90)[0]))
    done = compress_request(
        CompressionRequest(demo, tmp_path / out, recipe=recipe, calibration=tmp_path / "noise", length=64)
    )
    found = texts(tmp_path / out)["calibration"]
    assert found["nats"] - found["expected"] > 4
    (sentence,) = (each for each in done.warnings if "surprises the model" in each)
    assert f"by {found['nats']:.2f} nats a token, and its own would by {found['expected']:.2f}" in sentence
    assert done.to_dict()["texts"] == {"calibration": found, "shared": None}


def test_prose_is_not(demo: Path, tmp_path: Path) -> None:
    ids = calibrate.windows(Tokenizer.load(demo).encode(NOVEL, add_special_tokens=False), 128, 64, None)
    found = surprise(hf.Checkpoint.open(demo), ids, tmp_path)
    assert list(domain.warnings(found, None)) == []
    assert found is not None
    (sentence,) = domain.warnings(DomainCheck(9, 1.0 + domain.LIMIT + 1e-3, 1.0), 0.0)
    assert "surprises the model by 2.00 nats" in sentence


def test_the_models_own_text_surprises_as_expected(demo: Path, tmp_path: Path) -> None:
    """Over 252 tokens, whose standard error is about 0.15 nats, with numbers that are drawn once and for all."""
    own = calibrate.sample_from(hf.load(demo, torch.float32), Amount(4, 64, 0))
    found = surprise(hf.Checkpoint.open(demo), own, tmp_path)
    assert found is not None
    assert abs(found.nats - found.expected) < 0.5


def test_shares_by_hand() -> None:
    first, second = list(range(100, 100 + 4 * RUN)), list(range(500, 500 + 4 * RUN))
    read = torch.tensor([[7, *first], [7, *second]])
    assert shared(first, read) == 1.0
    assert shared(list(range(3 * RUN)), read) == 0.0
    assert shared([*range(2 * RUN), *second[: 2 * RUN]], read) == 0.5
    assert shared([1, *first[1 : 3 * RUN]], read) == pytest.approx(2 / 3), "runs begin where they were cut"
    assert shared(first[: RUN - 1], read) == 0.0
    assert shared([*first[:RUN], *first[:RUN]], read) == 1.0
    assert shared([5] * 40, torch.full((2, 2 * RUN + 1), 5)) == 1.0, "runs that overlap count once"


def test_evaluation_on_what_calibrated_or_chose_is_warned_about(demo: Path, tmp_path: Path) -> None:
    """The figure is in the receipt either way; text that a choice was made on counts too."""
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text(NOVEL)
    other.write_text(NOVEL[::-1])
    ids = Tokenizer.load(demo).encode(NOVEL, add_special_tokens=False)
    rows = [ids[at : at + 32] for at in range(0, len(ids) - 31, 32)]
    settings: dict[str, Any] = {"calibration": rows, "eval_tokens": 96}
    for name, recipe in (("one", "smoothquant-w8a8"), ("several", "rtn-w8,rtn-w4")):
        done = compress_request(CompressionRequest(demo, tmp_path / name, recipe=recipe, evaluation=text, **settings))
        share = texts(tmp_path / name)["shared"]
        assert share > 0.4
        assert any(each.startswith(f"{share:.1%} of the evaluation text is in the cal") for each in done.warnings)
    done = compress_request(
        CompressionRequest(demo, tmp_path / "apart", recipe="smoothquant-w8a8", evaluation=other, **settings)
    )
    assert texts(tmp_path / "apart")["shared"] == 0.0
    assert not any("of the evaluation text" in each for each in done.warnings)


def test_importances_say_what_text_was_too_little_for(demo: Path, tiny: Path, tmp_path: Path) -> None:
    few = importance.make(tiny, tmp_path / "few.gguf", calibration=token_ids(2, 32))
    assert few.warnings[0].startswith("the calibration text has 64 tokens and the widest linear 256 input columns")
    assert few.to_dict()["warnings"] == list(few.warnings)
    own = calibrate.sample_from(hf.load(tiny, torch.float32), Amount(16, 32, 0)).tolist()
    assert importance.make(tiny, tmp_path / "enough.gguf", calibration=own).warnings == ()
    done = compress(tiny, tmp_path / "out.gguf", recipe="q4_0", calibration=token_ids(2, 32))
    assert done.warnings == few.warnings
