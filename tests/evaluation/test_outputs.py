"""What is read off a receipt, and what a damaged or hostile one is refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attar.checkpoints.receipts.recorded import record_tasks
from attar.compression.runs.pipeline import compress
from attar.evaluation.outputs import Figure, Layer, Speed, front, read, tell_apart
from tests.errors import user_error

BENCH = {"decode_tok_s": 30.5, "prefill_tok_s": 700.0, "batch": 1, "threads": 2, "isa": "amx"}


@pytest.fixture
def output(tiny: Path, tmp_path: Path) -> Path:
    return compress(tiny, tmp_path / "out", recipe="rtn-w4g32").path


def change(folder: Path, **values: Any) -> Path:
    """Replace parts of a receipt: `evaluation` is merged, others are taken as they are."""
    path = folder / "receipt.json"
    value = json.loads(path.read_text())
    if isinstance(evaluation := values.get("evaluation"), dict):
        values["evaluation"] = value["evaluation"] | evaluation
    path.write_text(json.dumps(value | values))
    return folder


def test_what_is_read(output: Path) -> None:
    figures = {"kl_mean": 0.25, "ppl": 10.0, "intervals": {"kl_mean": [0.2, 0.3], "ppl": None}, "tokens": 99}
    found = read(change(output, evaluation=figures))
    assert found.recipe == found.label == "rtn-w4g32"
    assert found.bytes == (output / "model.safetensors").stat().st_size
    assert found.figures == {"kl_mean": Figure(0.25, 0.2, 0.3), "ppl": Figure(10.0), "tokens": Figure(99.0)}
    assert len(found.layers) == 21
    assert found.gain is None, "all was stored the plain way"
    layers = [each | {"error": each["rtn_error"] / 2} for each in found.receipt["layers"]]
    assert read(change(output, layers=layers)).gain == pytest.approx(0.5)
    assert (found.layers[0].layer, found.layers[0].kind) == (0, "self_attn.q_proj")
    assert found.bits_per_weight == found.receipt["bits_per_weight"]


def test_what_compares(output: Path) -> None:
    assert read(output).measured_on is None
    figures = {"kl_mean": 0.25, "ppl_base": 7.0, "tokens": 99, "protocol": {"context": 64, "windows": 2}}
    one, same = read(change(output, evaluation=figures)), read(output)
    assert one.measured_on == same.measured_on is not None
    assert read(change(output, evaluation={"ppl_base": 7.1})).measured_on != one.measured_on
    assert read(change(output, evaluation={"protocol": {"context": 32}})).measured_on != one.measured_on


@pytest.mark.parametrize(
    "damage",
    [
        {"evaluation": []},
        {"evaluation": {"kl_mean": "0.1"}},
        {"evaluation": {"kl_mean": 10**400}},
        {"layers": {}},
        {"layers": [{"name": 1, "scheme": "w4", "error": 0.1, "rtn_error": 0.1}]},
        {"layers": [{"name": "a", "scheme": "w4", "error": True, "rtn_error": 0.1}]},
        {"recipe": "rtn"},
        {"layers": [{"name": "a", "scheme": "w4", "error": 1e308, "rtn_error": 0.1}]},
        {"layers": [{"name": "a", "scheme": "w4", "error": -0.1, "rtn_error": 0.1}]},
        {"bits_per_weight": None},
        {"source": 1},
    ],
)
def test_damaged_receipts_are_refused(output: Path, damage: dict[str, Any]) -> None:
    with user_error("receipt_invalid"):
        read(change(output, **damage))


def test_a_source_that_is_no_text_compares_as_one(output: Path) -> None:
    figures = {"kl_mean": 0.25, "ppl_base": 7.0, "tokens": 99}
    found = read(change(output, evaluation=figures, source={"sha256": ["a", {}]})).measured_on
    assert {found} == {read(output).measured_on}


def test_recorded_tasks(output: Path) -> None:
    assert read(output).tasks == {}
    told = {"items": 2, "shots": 0, "version": "1.0"}
    record_tasks(output, {"piqa": {**told, "acc": 0.5, "intervals": {"acc": [0.25, 0.75]}}, "ifeval": {**told, "x": 1}})
    assert read(output).tasks == {"piqa acc": Figure(0.5, 0.25, 0.75), "ifeval x": Figure(1.0)}
    record_tasks(output, {"piqa": {"acc": "high"}})
    with user_error("receipt_invalid"):
        read(output)


def test_an_output_needs_a_receipt(output: Path) -> None:
    (output / "receipt.json").unlink()
    with user_error("receipt_invalid"):
        read(output)


def test_names_within_a_block() -> None:
    def layer(name: str) -> Layer:
        return Layer(name, "w4", "weight", 0.1, 0.1)

    assert (layer("lm_head").layer, layer("lm_head").kind) == (None, "lm_head")
    expert = layer("model.layers.12.mlp.experts.3.up_proj")
    assert (expert.layer, expert.kind) == (12, "mlp.experts.*.up_proj")


def test_labels_tell_outputs_apart(output: Path, tiny: Path) -> None:
    other = compress(tiny, output.parent / "other", recipe="rtn-w4g32").path
    third = compress(tiny, output.parent / "third", recipe="rtn-w8").path
    assert [o.label for o in tell_apart([read(output), read(third)])] == ["rtn-w4g32", "rtn-w8"]
    assert [o.label for o in tell_apart([read(output), read(other)])] == ["rtn-w4g32 (out)", "rtn-w4g32 (other)"]
    assert len({o.label for o in tell_apart([read(output), read(output.parent / "other" / ".." / "other")])}) == 2


def test_the_front_of_a_published_table() -> None:
    """Share of the size kept and score of quantized files of one model; higher scores are better. By the definition:
    a file is on the front unless another is no larger and no worse, and better in one of the two."""
    table = {
        "Q5_0": (34.81, 69.92), "Q4_K_S": (29.14, 69.17), "Q4_K_M": (30.57, 69.15), "Q4_0": (29.0, 68.0),
        "Q3_K_L": (26.86, 67.0), "Q3_K_M": (25.0, 66.6), "Q3_K_S": (22.77, 65.49), "Q5_1": (37.7, 69.4),
    }  # fmt: skip
    points = [(kept, -score) for kept, score in table.values()]
    beaten = {i for i, a in enumerate(points) if any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in points)}
    found = front(points)
    assert set(found) == set(range(len(points))) - beaten
    assert [list(table)[i] for i in found] == ["Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_K_S", "Q5_0"]
    assert front([]) == []
    assert front([(1, 1), (1, 1), (1, 2)]) == [0, 1]


def test_speed() -> None:
    assert Speed.of(BENCH, "f") == Speed(30.5, 700.0, 1, 2, "amx")
    for key in ("decode_tok_s", "batch"):
        with user_error("file_wrong_kind"):
            Speed.of(BENCH | {key: None}, "f")
