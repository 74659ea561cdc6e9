"""The walk as a whole: what comes out, that a killed run resumes to the same bytes, and that bad input is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import attar
from attar.checkpoints.safetensors import TensorFile
from attar.checkpoints.sources import hf
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.block_pass import STATE
from attar.compression.runs.pipeline import compress, compress_request
from attar.model.cache import ForwardBatch
from tests.errors import user_error

Ids = list[list[int]]

SAME_ROUNDING = 1.5  # how much larger an error may be and still be the same rounding on other scales


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    return hf.load(folder, torch.float32).forward(torch.tensor(ids), ForwardBatch((len(ids),), len(ids)))


class Stop(Exception):
    pass


def stop_after(blocks: int):  # type: ignore[no-untyped-def]
    """A progress callback that ends the run once so many blocks are done."""

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "blocks" and done == blocks:
            raise Stop

    return progress


RECIPES = ("rtn-w4g32", "rtn-w3g64-asym", "awq-w4g32", "gptq-w4g128", "smoothquant-w8a8", "smoothquant-w8a8-o3",
           "smoothquant+gptq-w8a8", "awq+gptq-w4g64", "gptq-fp8", "rtn-fp8-weight")  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_holds_what_the_schemes_declare(recipe: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration)
    file = TensorFile(tmp_path / "out" / "model.safetensors")
    stored = {name: file.info(name) for name in file.names()}
    checkpoint = hf.Checkpoint.open(tmp_path / "out")
    bits = weights = 0
    for record in done.records:
        scheme = checkpoint.scheme_of(record.name)
        shape = checkpoint.linear_shape(record.name)
        assert scheme is not None
        assert scheme.name == record.scheme
        of_linear = sum(part.bytes for name, part in stored.items() if name.startswith(record.name + "."))
        static = 4 if scheme.static else 0  # the activation scale, float32, belongs to the linear
        assert of_linear - static == scheme.bytes(shape)
        bits += 8 * scheme.bytes(shape)
        weights += math.prod(shape)
    assert done.bits_per_weight == bits / weights
    assert done.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert len(done.records) == 3 * 7
    assert logits(tmp_path / "out", calibration[0]).isfinite().all()


def test_rtn_without_calibration_and_kept_layers(tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "recipe: rtn-w4g32\noverrides:\n"
        "  - {match: '*.layers.0.*', scheme: keep}\n  - {match: '*.down_proj', scheme: w8}\n"
    )
    done = compress(tiny, tmp_path / "out", recipe=recipe)
    checkpoint = hf.Checkpoint.open(tmp_path / "out")
    assert checkpoint.scheme_of("model.layers.0.mlp.down_proj") is None
    assert checkpoint.scheme_of("model.layers.1.mlp.down_proj") is not None
    assert {r.scheme for r in done.records} == {"w4g32", "w8"}
    source, out = load_file(tiny / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in source.keys() & out.keys():
        assert torch.equal(source[name], out[name])
    assert "model.layers.0.mlp.up_proj.weight" in out


def test_folding_scales_changes_nothing_but_the_rounding(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """At 8 bits rounding is slight, with scales or without; a scale folded in the wrong place would not be."""
    base = logits(tiny, calibration[0])
    costs = {}
    for recipe in ("rtn-w8g32", "awq-w8g32"):
        compress(tiny, tmp_path / recipe, recipe=recipe, calibration=calibration)
        costs[recipe] = float((logits(tmp_path / recipe, calibration[0]) - base).square().mean().sqrt())
    assert costs["awq-w8g32"] < SAME_ROUNDING * costs["rtn-w8g32"] < 0.1 * float(base.std())


@pytest.mark.parametrize("recipe", ["gptq-w4g32", "awq-w4g32", "smoothquant-w8a8-o3"])
def test_a_stopped_run_resumes_to_the_same_bytes(recipe: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "whole", recipe=recipe, calibration=calibration)
    for blocks in (0, 1, 2, 3):
        with pytest.raises(Stop):
            compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration, progress=stop_after(blocks))
        assert not (tmp_path / "out").exists()
    seen: list[int] = []
    compress(
        tiny, tmp_path / "out", recipe=recipe, calibration=calibration,
        progress=lambda stage, done, total: seen.append(done) if stage == "blocks" else None,
    )  # fmt: skip
    assert seen == [3], "all blocks were done already"
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_killed_runs_resume_to_the_same_bytes(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """The real thing, SIGKILL at whatever it is doing; `bench/kill_resume.py` does it twenty times."""
    compress(tiny, tmp_path / "whole", recipe="gptq-w4g32", calibration=calibration)
    script = (
        "import attar, os, signal, threading, time\n"
        "def progress(what, done, *rest):\n"
        "    if (what, done) == ('blocks', 1):  # somewhere within the second block, and not behind it\n"
        "        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "    elif what == 'blocks' and done > 1:\n"
        "        time.sleep(600)\n"
        f"attar.compress({str(tiny)!r}, {str(tmp_path / 'out')!r}, recipe='gptq-w4g32',"
        f" calibration={calibration!r}, progress=progress)"
    )
    assert subprocess.run([sys.executable, "-c", script], env=_environment()).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    compress(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def _environment() -> dict[str, str]:
    """A child computes with as many threads as we do: they are part of what decides about the last bits."""
    return os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_run_with_other_settings_does_not_resume(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration, progress=stop_after(1))
    with user_error("resume_mismatch"):
        compress(tiny, tmp_path / "out", recipe="gptq-w4g64", calibration=calibration)
    compress_request(
        CompressionRequest(tiny, tmp_path / "out", recipe="gptq-w4g64", calibration=calibration, resume=False)
    )
    assert (tmp_path / "out" / "receipt.json").is_file()


def test_damaged_state_is_an_error(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration, progress=stop_after(1))
    path = tmp_path / ".out.attar-partial" / "state" / STATE
    path.write_text(path.read_text()[:-10])
    with user_error("state_damaged"):
        compress(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration)


def test_an_existing_output_is_kept(tiny: Path, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "out", recipe="rtn-w4g32")
    before = digest(tmp_path / "out")
    with user_error("output_exists"):
        compress(tiny, tmp_path / "out", recipe="rtn-w8")
    assert digest(tmp_path / "out") == before
    compress_request(CompressionRequest(tiny, tmp_path / "out", recipe="rtn-w8", overwrite=True))
    assert digest(tmp_path / "out") != before


def test_same_inputs_give_the_same_bytes(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    for name in ("a", "b"):
        compress(tiny, tmp_path / name, recipe="gptq-w4g32", calibration=calibration)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_small_calibration_memory_gives_the_same_bytes(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "held", recipe="gptq-w4g32", calibration=calibration)
    compress_request(
        CompressionRequest(tiny, tmp_path / "spilled", recipe="gptq-w4g32", calibration=calibration, calib_memory=0)
    )
    assert digest(tmp_path / "held") == digest(tmp_path / "spilled")


def test_sharded_output_loads(tiny: Path, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "one", recipe="rtn-w4g32")
    compress_request(CompressionRequest(tiny, tmp_path / "many", recipe="rtn-w4g32", max_shard_bytes=100_000))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "one", [1, 2, 3]), logits(tmp_path / "many", [1, 2, 3]))


def test_receipt_says_nothing_of_the_machine_and_is_stable(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    compress_request(CompressionRequest(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration, seed=7))
    text = (tmp_path / "out" / "receipt.json").read_text()
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text
    receipt = json.loads(text)
    assert receipt["seed"] == 7
    assert receipt["evaluation"]["kl_mean"] is None
    assert len(receipt["layers"]) == 21


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"recipe": "gtpq-w4g128"}, "method_unknown"),
        ({"recipe": "gptq-w4g96"}, "group_size_indivisible"),
        ({"recipe": "gptq-w4g128"}, "calibration_missing"),
        ({"recipe": "gptq-w4g128", "calibration": [[1, 2], [3]]}, "option_malformed"),
        ({"recipe": "gptq-w4g128", "calibration": [[1, 999]]}, "token_out_of_vocabulary"),
        ({"recipe": "gptq-w4g128", "calibration": "no-such-file.txt"}, "file_not_found"),
        ({"recipe": "gptq-w4g128", "calibration": __file__}, "tokenizer_missing"),
    ],
)
def test_bad_settings_are_refused_before_any_work(
    settings: dict[str, object], sentence: str, tiny: Path, tmp_path: Path
) -> None:
    with user_error(sentence):
        compress_request(CompressionRequest(tiny, tmp_path / "out", **settings))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"recipe": "gtpq-w4g128"}, "method_unknown"),
        ({"recipe": "nowhere.yaml"}, "file_not_found"),
        ({"calibration": "nowhere.txt"}, "file_not_found"),
        ({"calibration": "."}, "file_wrong_kind"),
        ({"calibration": "self", "evaluation": "nowhere.txt"}, "file_not_found"),
    ],
)
def test_misspelled_words_cost_no_download(settings: dict[str, str], code: str, tmp_path: Path) -> None:
    with user_error(code):
        compress_request(CompressionRequest(tmp_path / "no-model", tmp_path / "out", **settings))  # type: ignore[arg-type]


def test_compressing_twice_is_refused(tiny: Path, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "out", recipe="rtn-w4g32")
    with user_error("source_compressed"):
        compress(tmp_path / "out", tmp_path / "again", recipe="rtn-w4g32")


@pytest.mark.parametrize("recipe", ["rtn-w4g32", "gptq-w4g32", "awq-w4g32"])
def test_nan_weight_names_its_layer(recipe: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    bad = copy_with(tiny, tmp_path / "bad", "model.layers.1.mlp.up_proj.weight", float("nan"))
    with user_error("not_finite", "model.layers.1.mlp.up_proj"):
        compress(bad, tmp_path / "out", recipe=recipe, calibration=calibration)
    assert not (tmp_path / "out").exists()


def test_overflow_names_its_block(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    bad = copy_with(tiny, tmp_path / "bad", "model.layers.1.post_attention_layernorm.weight", 3e38)
    with user_error("not_finite", "layers.1"):
        compress(bad, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration)


def copy_with(source: Path, target: Path, name: str, value: float) -> Path:
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[3:40] = value
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def test_full_disk_is_refused_up_front_and_resumable_after(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        with user_error("disk_full"):
            compress(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration)
    compress(tiny, tmp_path / "out", recipe="gptq-w4g32", calibration=calibration)


def test_facade_is_the_function() -> None:
    assert attar.compress is compress
