"""receipt.json: the same bytes for the same inputs, every changed file named, strict reading."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from attar.checkpoints.receipts import receipt, recorded
from attar.formats.packed import PackedTensor
from attar.kernels import dispatch
from attar.kernels.native import linear as native
from attar.kernels.operands import Linear
from attar.model.decoder import Decoder
from tests.checkpoints.conftest import make_probes
from tests.errors import user_error

Make = Callable[..., Decoder]

SOURCE = {"model.safetensors": "aa" * 32, "config.json": "bb" * 32}
LAYER = {"name": "model.layers.0.mlp.down_proj", "scheme": "w4g32", "error": 0.01, "rtn_error": 0.02}


def about(**changes: Any) -> dict[str, Any]:
    return receipt.environment() | {"recipe": {"name": "rtn-w4g32"}, "calibration": None, "seed": 0} | changes


@pytest.fixture
def folder(tmp_path: Path, tiny_decoder: Make) -> Path:
    """An output as far as receipts care: some files, and a receipt of `tiny_decoder(0)`."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "model.safetensors").write_bytes(bytes(range(256)))
    (output / "config.json").write_text("{}")
    (output / "sub").mkdir()
    (output / "sub" / "x.jinja").write_text("template")
    (output / ".cache").mkdir()
    (output / ".cache" / "x.json").write_text("not ours")
    receipt.write(output, about(), SOURCE, [LAYER], 4.5, None, make_probes(tiny_decoder(0), 0))
    return output


def test_what_it_holds(folder: Path) -> None:
    read = receipt.read_receipt(folder)
    assert read is not None
    value = read.value
    assert set(value) == {
        "format", "source", "recipe", "calibration", "seed", "versions", "layers", "bits_per_weight", "evaluation",
        "files", "probes",
    }  # fmt: skip
    assert set(value["versions"]) == {"attar", "torch", "python", "instruction_set", "threads", "kernels"}
    assert value["versions"]["kernels"] == "native"
    assert value["source"] == {"files": SOURCE, "sha256": receipt.combined_hash(SOURCE)}
    assert value["evaluation"] == dict.fromkeys(("ppl", "bits_per_byte", "kl_mean", "kl_p999", "top1", "tokens"))
    assert set(read.files) == {"model.safetensors", "config.json", "sub/x.jinja"}
    assert read.files["model.safetensors"] == hashlib.sha256(bytes(range(256))).hexdigest()
    assert value["layers"] == [LAYER]


def test_the_same_inputs_give_the_same_bytes(folder: Path, tiny_decoder: Make, tmp_path: Path) -> None:
    first = (folder / "receipt.json").read_bytes()
    elsewhere = tmp_path / "another place"
    folder.rename(elsewhere)
    (elsewhere / "receipt.json").unlink()
    time.sleep(0.01)
    order = dict(reversed(about().items()))
    receipt.write(elsewhere, order, dict(reversed(SOURCE.items())), [LAYER], 4.5, None, make_probes(tiny_decoder(0), 0))
    assert (elsewhere / "receipt.json").read_bytes() == first
    assert str(tmp_path).encode() not in first
    assert json.dumps(json.loads(first), sort_keys=True, indent=1, ensure_ascii=False) + "\n" == first.decode()


def test_combined_hash_depends_on_names_and_contents_not_on_order() -> None:
    assert receipt.combined_hash(SOURCE) == receipt.combined_hash(dict(reversed(SOURCE.items())))
    assert receipt.combined_hash(SOURCE) != receipt.combined_hash(SOURCE | {"config.json": "aa" * 32})
    assert receipt.combined_hash({"a": "00"}) == hashlib.sha256(b"00  a\n").hexdigest()


def test_verify_a_sound_folder(folder: Path, tiny_decoder: Make) -> None:
    loaded: list[Decoder] = []

    def load() -> Decoder:
        loaded.append(tiny_decoder(0))
        return loaded[0]

    verdict = receipt.verify(folder, load)
    replayed = "8 probes of 8 replayed within the noise"
    assert verdict == receipt.Verdict(
        True,
        None,
        f"3 files have the hashes of the receipt; exact: {replayed}",
        {"exact": receipt.PathVerdict(True, None, replayed)},
    )
    assert len(loaded) == 1
    assert (
        receipt.verify(folder, tiny_decoder(0), hashes=False, probes="one").detail
        == "exact: 1 probe of 8 replayed within the noise"
    )
    assert receipt.verify(folder, None, probes="none").ok
    assert verdict.sentence == f"ok: {verdict.detail}"
    assert verdict.to_dict() == {
        "ok": True,
        "first_divergence": None,
        "detail": verdict.detail,
        "paths": {"exact": {"ok": True, "first_divergence": None, "detail": replayed}},
    }


@pytest.fixture
def packed(tmp_path: Path, tiny_decoder: Make) -> Path:
    """A folder whose receipt is of `tiny_decoder(0, scheme="w4g32")`."""
    receipt.write(tmp_path, about(), SOURCE, [LAYER], 4.5, None, make_probes(tiny_decoder(0, scheme="w4g32"), 0))
    return tmp_path


@pytest.mark.parametrize("count", ["one", "all"])
def test_each_kernel_path_has_its_verdict(packed: Path, tiny_decoder: Make, count: Literal["one", "all"]) -> None:
    rounding = tiny_decoder(0, scheme="w4g32", store=dispatch.store())
    verdict = receipt.verify(packed, rounding, probes=count)
    assert verdict.ok
    assert {path: found.ok for path, found in verdict.paths.items()} == {"exact": True, "int8_activations": True}
    assert "exact: " in verdict.detail
    assert "int8_activations: " in verdict.detail
    exact = receipt.verify(packed, tiny_decoder(0, scheme="w4g32", store=dispatch.store("exact")), probes=count)
    assert {path: found.ok for path, found in exact.paths.items()} == {"exact": True}


def test_little_damage_to_a_model_that_rounds_rows_is_named(packed: Path, tiny_decoder: Make) -> None:
    """The exact path sees it, though the model does not run on it."""
    decoder = tiny_decoder(0, scheme="w4g32")
    weight = decoder.blocks[1].attention.output.weight
    assert isinstance(weight, PackedTensor)
    weight.parts["scale"].view(-1)[3] *= -1
    store = dispatch.store()
    assert store is not None
    for linear in (linear for block in decoder.blocks for linear in block.linears()):
        store.take(linear)
    verdict = receipt.verify(packed, decoder, hashes=False, probes="one")
    assert (verdict.ok, verdict.first_divergence) == (False, "model.layers.1")
    assert verdict.sentence.startswith("failed: on the exact kernels model.layers.1 differs by")
    assert verdict.paths["exact"].ok is False
    assert verdict.paths["int8_activations"].ok is True


def test_kernels_that_compute_something_else_are_named(
    packed: Path, tiny_decoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded rows alone: the weights are sound, the kernel that rounds is not."""
    decoder = tiny_decoder(0, scheme="w4g32", store=dispatch.store())
    product = native.linear

    def broken(x: torch.Tensor, linears: Sequence[Linear]) -> torch.Tensor:
        out, weight = product(x, linears), linears[0].weight
        assert isinstance(weight, native.PackedWeight)
        return out.roll(1, 1) if weight.integer else out

    monkeypatch.setattr(native, "linear", broken)
    verdict = receipt.verify(packed, decoder, hashes=False, probes="one")
    assert (verdict.ok, verdict.first_divergence) == (False, "model.layers.0")
    assert verdict.paths["exact"].ok is True
    assert verdict.sentence.startswith("failed: on the int8_activations kernels")


def test_a_path_without_a_floor_is_said_not_to_be_replayed(
    tmp_path: Path, tiny_decoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as where_no_kernels_are:
        where_no_kernels_are.setattr(dispatch, "store", lambda form="int8": None)
        assert receipt.environment()["kernels"] == "ref"
        receipt.write(tmp_path, about(), SOURCE, [LAYER], 4.5, None, make_probes(tiny_decoder(0, scheme="w4g32"), 0))
    verdict = receipt.verify(tmp_path, tiny_decoder(0, scheme="w4g32", store=dispatch.store()))
    assert verdict.ok
    assert {path: found.ok for path, found in verdict.paths.items()} == {"exact": True, "int8_activations": None}
    assert "no noise floor for the int8_activations kernels" in verdict.detail
    with user_error("device_unsupported"):
        receipt.verify(tmp_path, tiny_decoder(0, scheme="w8a8"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "sub/x.jinja"])
def test_one_flipped_bit_names_its_file(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    verdict = receipt.verify(folder, None, probes="none")
    assert (verdict.ok, verdict.first_divergence) == (False, name)


def test_recorded_tasks_leave_all_else_as_it_was(folder: Path, tiny_decoder: Make, tmp_path: Path) -> None:
    before, known = receipt.read_receipt(folder), receipt.known(folder)
    assert before is not None
    recorded.record_tasks(folder, {"piqa": {"acc": 0.5}, "arc_easy": {"acc": 0.25}})
    recorded.record_tasks(folder, {"piqa": {"acc": 0.75}})
    after = receipt.read_receipt(folder)
    assert after is not None
    assert after.value["tasks"] == {"piqa": {"acc": 0.75}, "arc_easy": {"acc": 0.25}}
    assert {key: after.value[key] for key in before.value} == dict(before.value)
    assert set(known) < set(receipt.known(folder))  # a draft head that names the receipt keeps its model
    assert receipt.verify(folder, tiny_decoder()).ok
    with user_error("receipt_invalid"):
        recorded.record_tasks(tmp_path / "none", {})


def test_a_recorded_plan_replaces_an_earlier_one(folder: Path, tiny_decoder: Make, tmp_path: Path) -> None:
    known = receipt.known(folder)
    recorded.record_plan(folder, {"kv": "int8"})
    recorded.record_plan(folder, {"kv": "bfloat16"})
    after = receipt.read_receipt(folder)
    assert after is not None
    assert after.value["plan"] == {"kv": "bfloat16"}
    assert set(known) < set(receipt.known(folder))
    assert receipt.verify(folder, tiny_decoder()).ok
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(folder / "model.safetensors", copy)
    assert receipt.carry(after, folder, copy, "00" * 32, None) is None
    carried = receipt.read_receipt(copy)
    assert carried is not None
    assert "plan" not in carried.value, "a conversion has another layout, and other times"
    with user_error("receipt_invalid"):
        recorded.record_plan(tmp_path / "none", {})


@pytest.mark.parametrize(
    ("copied", "has_tower", "expected"),
    [
        (None, True, {"copied": {"tower": "bfloat16"}, "vision": {"scheme": None}, "images": {"kl_mean": 0.5}}),
        ({"tower": "float32"}, True,
         {"copied": {"tower": "float32"}, "vision": {"scheme": None}, "images": {"kl_mean": 0.5}}),
        (None, False, {}), ({}, False, {}),
    ],
)  # fmt: skip
def test_a_conversion_says_of_the_tower_what_its_output_has(
    copied: dict[str, str] | None, has_tower: bool, expected: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    receipt.amend(folder, {"copied": {"tower": "bfloat16"}, "vision": {"scheme": None}, "images": {"kl_mean": 0.5}})
    found = receipt.read_receipt(folder)
    assert found is not None
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert receipt.carry(found, folder, copy, "00" * 32, None, copied, has_tower) is None
    carried = json.loads((copy / "receipt.json").read_text())
    assert {key: carried[key] for key in ("copied", "vision", "images") if key in carried} == expected


def test_missing_and_added_files_are_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ evil }}")
    verdict = receipt.verify(folder, None, probes="none")
    assert (verdict.ok, verdict.first_divergence) == (False, "chat_template.jinja")
    (folder / "chat_template.jinja").rename(folder / "notes.txt")  # a file that no loader reads
    assert receipt.verify(folder, None, probes="none").ok
    (folder / "config.json").unlink()
    verdict = receipt.verify(folder, None, probes="none")
    assert (verdict.ok, verdict.first_divergence) == (False, "config.json")


def test_changed_weights_name_their_layer(folder: Path, tiny_decoder: Make) -> None:
    decoder = tiny_decoder(0)
    decoder.blocks[2].attention.output.weight *= 1.1  # type: ignore[operator, assignment]
    verdict = receipt.verify(folder, decoder, hashes=False)
    assert (verdict.ok, verdict.first_divergence) == (False, "model.layers.2")
    assert "model.layers.2 differs by" in verdict.detail


def test_a_foreign_checkpoint_has_no_receipt(tmp_path: Path) -> None:
    assert receipt.read_receipt(tmp_path) is None
    verdict = receipt.verify(tmp_path, None)
    assert not verdict.ok
    assert "no receipt" in verdict.detail


def test_a_receipt_beside_a_file(tmp_path: Path, tiny_decoder: Make) -> None:
    output = tmp_path / "model.gguf"
    output.write_bytes(b"GGUF")
    path = receipt.write(output, about(), SOURCE, [LAYER], 4.5, {"ppl": 3.0}, make_probes(tiny_decoder(0), 0))
    assert path == tmp_path / "model.gguf.receipt.json"
    assert receipt.verify(output, None, probes="none").ok
    read = receipt.read_receipt(output)
    assert read is not None
    assert read.value["evaluation"]["ppl"] == 3.0
    renamed = tmp_path / "renamed.gguf"
    for each in (output, path):
        shutil.copy(each, tmp_path / each.name.replace("model", "renamed"))
    assert receipt.verify(renamed, None, probes="none").ok
    for each in (output, renamed):  # a loader reads it as the model's vision tower
        added = each.with_name(f"mmproj-{each.name}")
        added.write_bytes(b"GGUF")
        assert receipt.verify(each, None, probes="none").first_divergence == added.name
        added.unlink()
    output.write_bytes(b"GGUG")
    assert receipt.verify(output, None, probes="none").first_divergence == "model.gguf"


def test_what_is_not_finite_is_not_written(tmp_path: Path, tiny_decoder: Make) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        receipt.write(tmp_path, about(), SOURCE, [LAYER | {"error": float("nan")}], 4.5, None, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": 2}, "receipt_invalid"),
        ({"files": {"../../etc/passwd": "00"}}, "receipt_invalid"),
        ({"files": {"/etc/passwd": "00"}}, "receipt_invalid"),
        ({"files": {"a//b": "00"}}, "receipt_invalid"),
        ({"files": {"a": 5}}, "receipt_invalid"),
        ({"files": []}, "receipt_invalid"),
        ({"probes": 3}, "receipt_invalid"),
        ({"seed": None, "layers": ...}, "receipt_invalid"),
    ],
)
def test_a_damaged_receipt_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    value = json.loads((folder / "receipt.json").read_text()) | change
    value = {key: each for key, each in value.items() if each is not ...}
    (folder / "receipt.json").write_text(json.dumps(value))
    with user_error(message):
        receipt.read_receipt(folder)


def test_verify_a_model_by_its_name(stories: Path, tmp_path: Path) -> None:
    """The way of the command line: hashes first, then the model is loaded and replayed; damage fails both ways."""
    from attar.checkpoints.receipts import verify
    from attar.checkpoints.sources import hf

    output = tmp_path / "copy"
    shutil.copytree(stories, output, copy_function=shutil.copyfile)
    output.chmod(0o755)
    receipt.write(output, about(), SOURCE, [], 16.0, None, make_probes(hf.load(output, torch.float32), 0))
    stages: set[str] = set()
    verdict = verify.verify(str(output), progress=lambda stage, done, total: stages.add(stage))
    assert verdict.ok, verdict.sentence
    assert stages == {"loading"}
    weights = output / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-40_000] ^= 0x40  # a high bit of a weight
    weights.write_bytes(content)
    assert verify.verify(output).first_divergence == "model.safetensors"
