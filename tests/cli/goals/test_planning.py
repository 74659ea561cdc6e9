"""`attar plan --goal` and `attar bench --rates` on the command line: answers, statuses, and bad input within limits."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attar.cli.main import app
from attar.plan.rates import profile as profiles
from tests.engine.images import models
from tests.pretend_rates import PROFILE

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SECONDS, MEMORY = 5.0, 10**9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    path = tmp_path / "rates.json"
    path.write_bytes(profiles.encode(PROFILE))
    return path


def run(command: str, *more: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --json; returns its status and object."""
    done = CliRunner().invoke(app, [*shlex.split(command), *more, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def test_a_bare_config_has_a_plan(model: Path, rates: Path) -> None:
    goal = "kl<=0.2, tpot<=150ms, memory<=3GB"
    status, said = run(f"plan {model} --users 4 --context 2048 --rates {rates}", "--goal", goal)
    assert status == 0
    assert said["met"]
    assert said["commands"][-1].startswith("attar serve ")
    assert {each["evidence"] for each in said["chosen"].values() if isinstance(each, dict)} <= {
        "exact", "measured", "fitted",
    }  # fmt: skip
    folder_status, folder = run(f"plan {model.parent} --users 4 --context 2048 --rates {rates}", "--goal", goal)
    assert (folder_status, folder["chosen"]) == (0, said["chosen"])


def test_a_missed_goal_ends_with_one(model: Path, rates: Path) -> None:
    status, said = run(f"plan {model} --rates {rates} --memory 8GB --goal tpot<=1us")
    assert status == 1
    assert not said["met"]
    assert said["nearest"]["weights"]


def test_a_scenario_is_its_goal(model: Path, rates: Path) -> None:
    _, said = run(f"plan {model} --rates {rates} --scenario edge --context 512")
    _, same = run(f"plan {model} --rates {rates} --context 512", "--goal", "memory<=2GB, kl<=0.2, tpot<=200ms")
    assert said == same


def test_a_published_shape_on_a_card(model: Path) -> None:
    status, said = run("plan --shape llama-3.1-8b --gpu h100 --users 8 --context 4096 --goal kl<=0.1")
    assert status == 0
    assert said["chosen"]["tpot_p95"]["evidence"] == "data sheet"


def test_a_trace_is_its_requests(model: Path, rates: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2024-05-10 00:00:{n % 60:02d}.000000,{100 + n % 50},{20 + n % 7}" for n in range(300)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    status, said = run(f"plan {model} --rates {rates} --trace {trace} --goal kl<=1,ttft_p99<=1000s")
    assert status == 0
    assert said["traced"] == 256


def test_the_same_question_has_the_same_answer(model: Path, rates: Path) -> None:
    command = f"plan {model} --rates {rates} --users 3 --goal kl<=0.1"
    assert run(command) == run(command)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--goal kl<=0", "option_out_of_range"), ("--goal ttft<=1s,ttft<=2s", "option_conflict"),
        ("--goal tpto<=1s", "name_unknown"), ("--goal kl<=nan", "option_out_of_range"),
        ("--goal kl<=1 --scenario edge", "option_conflict"), ("--scenario egde", "name_unknown"),
        ("--goal kl<=1 --tp 2", "option_conflict"), ("--goal kl<=1 --context 1", "option_out_of_range"),
        ("--goal kl<=1 --context 512 --prompt 512", "option_conflict"),
        ("--goal kl<=1 --context 99999999", "context_exceeded"),
        ("--goal kl<=1 --users 1000000000", "option_out_of_range"), ("--goal kl<=1 --kv int7", "kv_unknown"),
        ("--goal kl<=1 --gpu h1000", "option_conflict"), ("--prompt 5", "option_unused"),
        ("--goal kl<=1 --trace /nowhere/at/all", "file_not_found"),
    ],
)  # fmt: skip
def test_bad_options_have_codes(model: Path, rates: Path, options: str, code: str) -> None:
    given = f"plan {model} {options}" + ("" if options.startswith("--prompt") else f" --rates {rates}")
    status, said = run(given)
    assert (status, said["code"]) == (2, code)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": 9}', b"\x00" * 100])
def test_a_bad_file_of_rates_is_named(model: Path, tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    assert run(f"plan {model} --goal kl<=1 --rates {path}")[1]["code"] == "file_malformed"


HOSTILE = {
    "layers": ({"num_hidden_layers": 10**9}, "config_invalid"),
    "negative": ({"hidden_size": -5}, "config_invalid"),
    "huge number": ({"vocab_size": 10**400}, "config_invalid"),
    "words": ({"hidden_size": "many"}, "config_invalid"),
    "experts": (
        {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 16000, "num_local_experts": 16000,
         "num_experts_per_tok": 2}, "config_invalid"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "feature_unsupported"),
    "unknown": ({"architectures": ["NoSuchModel"]}, "architecture_unsupported"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_config_is_a_named_error(tmp_path: Path, rates: Path, name: str) -> None:
    changes, code = HOSTILE[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    since = time.perf_counter()
    status, said = run(f"plan {path} --goal kl<=1 --rates {rates}")
    assert (status, said["code"]) == (2, code)
    assert time.perf_counter() - since < SECONDS


@pytest.mark.parametrize("text", ['{"hidden_size": NaN}', '{"hidden_size": 1e400}', "[" * 100_000, '"config"', "\x00"])
def test_text_that_is_no_config_is_a_named_error(tmp_path: Path, rates: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert run(f"plan {path} --goal kl<=1 --rates {rates}")[1]["code"] == "config_invalid"


PROGRAM = """
import resource, sys
from attar.cli.main import app
status = 0
try: app(sys.argv[1:])
except SystemExit as end: status = end.code
assert "torch" not in sys.modules, "torch was imported"
peak = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]  # wait4 counts the parent's
print("used", status, resource.getrusage(resource.RUSAGE_SELF).ru_utime, peak)
"""


def within_limits(*command: str) -> int:
    """Run a command in a process of its own, without torch, within 5 s of processor time and 1 GB. Returns its
    status."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status, seconds, kibibytes = map(float, done.stdout.splitlines()[-1].removeprefix("used ").split())
    assert seconds < SECONDS
    assert kibibytes * 1024 < MEMORY
    return int(status)


def test_the_largest_model_that_is_accepted_takes_little(tmp_path: Path, rates: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "num_hidden_layers": 1400}))
    assert within_limits("plan", str(path), "--goal", "kl<=0.3", "--rates", str(rates), "--users", "4") == 0


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", ["-1", "0", "NaN", "1e400", "1" + "0" * 400, "1000000000000", "null", '"x"', "[]"])
def test_no_number_of_a_config_is_trusted(tmp_path: Path, rates: Path, field: str, value: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, field: "HERE"}).replace('"HERE"', value))
    since = time.process_time()
    status, said = run(f"plan {path} --goal kl<=1 --context 512 --rates {rates}")
    assert time.process_time() - since < SECONDS
    if status == 2:
        assert said["code"] in ("config_invalid", "memory_insufficient", "context_exceeded"), said
    else:
        json.dumps(said, allow_nan=False)


def test_a_billion_layers_take_little(tmp_path: Path, rates: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "num_hidden_layers": 10**9}))
    assert within_limits("plan", str(path), "--goal", "kl<=0.3", "--rates", str(rates)) == 2


def test_a_million_requests_are_cut(model: Path, rates: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    line = "2024-05-10 00:00:01.000000,100,20\n"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + line * 1_000_000)
    command = ("plan", str(model), "--rates", str(rates), "--trace", str(trace), "--goal", "kl<=0.5")
    assert within_limits(*command) == 0
    assert run(shlex.join(command))[1]["traced"] == 256


@pytest.mark.parametrize(
    ("goal", "near"),
    [("tpto<=1s", "tpot"), ("memroy<=4GB", "memory"), ("tokens_per_secnd>=4", "tokens_per_second"),
     ("memory<=4Gb", "GB"), ("tpot<=4mss", "ms"), ("ttft_p96<=1s", "ttft")],
)  # fmt: skip
def test_unknown_words_and_units_offer_near_ones(model: Path, rates: Path, goal: str, near: str) -> None:
    status, said = run(f"plan {model} --rates {rates}", "--goal", goal)
    assert (status, said["code"]) == (2, "name_unknown")
    assert near in said["error"].rpartition("known are")[2] or near in said["error"]


def test_an_impossible_goal_names_the_nearest_miss(model: Path, rates: Path) -> None:
    status, said = run(f"plan {model} --rates {rates} --memory 8GB", "--goal", "tpot<=1us, kl<=0.5, memory<=3GB")
    assert (status, said["binding"]) == (1, "tpot")
    assert said["nearest"]["weights"] in said["answer"]


def test_rates_are_of_the_machine_alone(tmp_path: Path) -> None:
    assert run("bench demo --rates")[1]["code"] == "option_conflict"
    assert run(f"bench demo -o {tmp_path / 'x'}")[1]["code"] == "option_unused"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    models.save("smolvlm", folder)
    return folder


def test_images_are_rows_and_time(vision: Path, rates: Path) -> None:
    command = f"plan {vision} --rates {rates} --context 64 --goal ttft<=10s"
    _, plain = run(command)
    status, seen = run(f"{command} --images 2 --image-size 640x480")
    assert status == 0
    assert plain["images"] is None
    given = seen["images"]
    assert (given["count"], given["width"], given["height"]) == (2, 640, 480)
    assert given["tokens"] == 2 * given["rows"]
    assert (seen["context"], seen["prompt"]) == (64 + given["tokens"], 48 + given["tokens"])
    assert f"--context {seen['context']} " in seen["commands"][-1]
    took = given["encoding"]
    assert took["evidence"] == "fitted"
    assert took["low"] < took["value"] < took["high"]
    assert seen["chosen"]["ttft_p95"]["value"] > plain["chosen"]["ttft_p95"]["value"] + took["value"]
    assert any("2 images a request" in note for note in seen["notes"])


def test_a_plan_of_memory_has_the_rows_of_images(vision: Path) -> None:
    _, plain = run(f"plan {vision} --bandwidth 10GB --context 64")
    status, seen = run(f"plan {vision} --bandwidth 10GB --context 64 --images 1")
    assert (status, plain["image_load"]) == (0, None)
    assert seen["context"] == 64 + seen["image_load"]["tokens"]
    assert set(seen["tower"]) == {"stored", "w8", "w8a8"}
    assert seen["images"] == plain["images"] > seen["tower"]["stored"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--image-size 640x480", "option_unused"),
        ("--images 1 --image-size 640", "option_malformed"),
        ("--images 1 --image-size 0x480", "option_out_of_range"),
        ("--images 1 --image-size 99999x99999", "option_out_of_range"),
        ("--images 1 --image-size 9000x9", "image_too_large"),
        ("--images 9", "option_out_of_range"),
        ("--images 8 --image-size 3000x2000", "image_too_large"),
        ("--images 8", "context_exceeded"),
        ("--images 8 --goal kl<=1", "context_exceeded"),
        ("--images 1 --gpu h100", "option_conflict"),
        ("--images 1 --tp 2", "option_conflict"),
        ("--images 1 --goal kl<=1 --trace none.jsonl", "option_conflict"),
        ("--images 1 --goal kl<=1 --measure 1m", "option_conflict"),
        ("--images 1 --goal kl<=1 --gpu h100", "option_conflict"),
    ],
)
def test_options_that_images_do_not_go_with(options: str, code: str, vision: Path) -> None:
    bandwidth = "" if "--goal" in options else "--bandwidth 10GB"
    status, said = run(f"plan {vision} {bandwidth} {options}")
    assert (status, said["code"]) == (2, code)


def test_a_model_without_a_tower_has_no_images(model: Path, rates: Path) -> None:
    for more in (["--bandwidth", "10GB"], ["--rates", str(rates), "--goal", "kl<=1"]):
        status, said = run(f"plan {model} --images 1", *more)
        assert (status, said["code"]) == (2, "feature_unsupported")


def test_several_gpus_are_planned_for_and_several_cpu_processes_are_not() -> None:
    command = "plan --shape llama-3.1-8b --users 8 --context 4096 --goal kl<=0.1"
    status, one = run(f"{command} --gpu h100")
    parted, two = run(f"{command} --gpu h100 --tp 2")
    assert (status, parted) == (0, 0)
    assert (one["tp"], two["tp"], two["pp"]) == (1, 2, 1)
    assert two["chosen"]["memory"]["value"] < one["chosen"]["memory"]["value"]
    assert "--tp 2" in two["commands"][-1]
    assert any("send each other" in note for note in two["notes"])
    _, stages = run(f"{command} --gpu h100 --pp 2")
    assert any("TTFT is an upper bound" in note for note in stages["notes"])
    assert not any("TTFT is an upper bound" in note for note in two["notes"])
    for more in ("--tp 2", "--pp 2"):
        status, said = run(f"{command} {more}")
        assert (status, said["code"]) == (2, "option_conflict")
