r"""`attar tritonserver`, and `serve --triton-config`: for those who come from Triton Inference Server, or go there.

What each field means is `tests/integrations/triton_server/test_config.py`'s.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT
from attar.engine import startup
from attar.plan.costs import BLOCK
from tests.cli.test_commands import last_json, refused
from tests.cli.test_serving import served
from tests.integrations.triton_server.test_template import TEMPLATE

V1 = """
backend: "tensorrtllm"
max_batch_size: 6
dynamic_batching { max_queue_delay_microseconds: 2000 default_queue_policy { max_queue_size: 9 } }
parameters { key: "gpt_model_type" value { string_value: "V1" } }
parameters { key: "max_tokens_in_paged_kv_cache" value { string_value: "1000" } }
parameters { key: "kv_cache_free_gpu_mem_fraction" value { string_value: "0.5" } }
parameters { key: "enable_trt_overlap" value { string_value: "false" } }
"""


def triton(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tritonserver", *arguments])


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    file = tmp_path / "config.pbtxt"
    file.write_text(V1)
    return file


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "template.pbtxt"
    file.write_text(TEMPLATE)
    return file


def test_import_shows_the_command_that_serves_alike(v1: Path) -> None:
    done = triton("import", str(v1), "--json")
    found = last_json(done)
    command = "attar serve MODEL --max-running 6 --scheduler max-waiting=9 --scheduler policy=dynamic"
    assert found["command"].startswith(f"{command} --scheduler max-delay=0.002")
    assert done.stdout.splitlines()[0] == found["command"]
    assert found["options"]["kv-fraction"] == found["kv"]["kv_cache_free_gpu_mem_fraction"] == 0.5
    assert len(found["warnings"]) == 1
    assert "attar: warning: enable_trt_overlap: was removed" in done.stderr


def test_serve_does_what_import_shows(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = last_json(triton("import", str(v1), "--json"))["command"]
    by_hand = served(monkeypatch, command.removeprefix("attar serve MODEL"))
    by_file = served(monkeypatch, f"--triton-config {v1}")
    assert by_file == by_hand
    assert by_file.limits().policy == "dynamic"
    assert (by_file.max_cached_tokens, by_file.kv_fraction) == (1000, 0.5)


def test_serve_says_what_import_says(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.server.supervisor.run", lambda *_: 0)
    told = CliRunner().invoke(app, ["serve", "demo", "--triton-config", str(v1)]).stderr
    shown = last_json(triton("import", str(v1), "--json"))
    assert shown["notes"]
    for kind in ("note", "warning"):
        for each in shown[f"{kind}s"]:
            assert f"{v1}: {kind}: {each}" in told


def test_what_is_said_on_the_command_line_goes_before_the_file(v1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = served(
        monkeypatch, f"--triton-config {v1} --max-running 3 --scheduler policy=continuous --preset throughput"
    )
    limits = said.limits()
    assert (limits.max_running, limits.policy, limits.max_waiting) == (3, "continuous", 9)
    assert limits.max_step_tokens == 2048  # the preset's, of which the file says nothing
    assert said.max_delay is None
    same = served(monkeypatch, f"--triton-config {v1} --scheduler policy=dynamic")
    assert (same.limits().policy, same.max_delay) == ("dynamic", 0.002)
    v1.write_text(V1 + 'parameters { key: "gpu_device_ids" value { string_value: "1" } }')
    assert served(monkeypatch, f"--triton-config {v1} --device cpu").device == "cpu"
    done = CliRunner().invoke(app, ["serve", "demo", "--triton-config", str(v1), "--json"])
    assert done.exit_code == BAD_INPUT
    assert "cuda:1" in json.loads(done.stdout.splitlines()[-1])["error"]


@pytest.mark.parametrize(
    "tokens, fraction, least", [("1000", "0.5", "tokens"), ("", "0.001", "memory"), ("100000", "0.001", "memory")]
)
def test_the_cache_of_a_server_is_the_smaller_of_both(
    tokens: str, fraction: str, least: str, v1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row K13, of the embedded model as it is loaded."""
    v1.write_text(
        V1.replace('"1000"', f'"{tokens}"').replace('"0.5"', f'"{fraction}"').replace("_size: 6", "_size: 512")
    )
    settings = served(monkeypatch, f"--triton-config {v1} --memory 2GB --context 256 --kv int8 --threads 1")
    monkeypatch.setattr("attar.kernels.native.limits.READ", 1 << 20)
    engine, ready = startup.start_engine(settings)
    table = dict(ready.table)
    left = 2 * 10**9 - table["weights"] - table["largest step"] - table["processes"]
    of_memory = int(left * float(fraction)) // (table["KV cache"] // ready.blocks)
    of_tokens = -(-int(tokens or 10**9) // BLOCK)
    assert ready.blocks == engine.pool.total == min(of_memory, of_tokens)
    assert (of_memory < of_tokens) == (least == "memory")


def test_export_is_what_import_reads(template: Path, tmp_path: Path) -> None:
    options = "--max-running 6 --kv-fraction 0.5 --max-tokens-in-cache 1000"
    for key in ("max-waiting=9", "policy=dynamic", "max-delay=0.002", "max-preemptions=0", "max-step-tokens=64"):
        options += f" --scheduler {key}"
    file = tmp_path / "exported.pbtxt"
    file.write_text(triton("export", *options.split()).stdout)
    back = last_json(triton("import", str(file), "--json"))["command"].split()[3:]
    asked = options.split()
    assert {*zip(back[::2], back[1::2], strict=True)} >= {*zip(asked[::2], asked[1::2], strict=True)}
    filled = triton("export", str(template), "--max-running", "7", "--tp", "2", "--json")
    found = last_json(filled)
    assert found["left"] == ["engine_dir"]
    assert "max_batch_size: 7 " in found["text"]
    assert 'string_value: "0,1"' in found["text"]
    assert filled.stdout.startswith(found["text"])
    assert "still to be filled in: engine_dir" in filled.stderr


def test_fill_takes_what_their_tool_takes(template: Path) -> None:
    r"""Row R2: the escaped comma on the command line."""
    done = triton("fill", str(template), r"triton_max_batch_size:8,gpu_device_ids:0\,1,engine_dir:/engines/x")
    assert done.exit_code == 0
    assert 'string_value: "0,1"' in done.stdout
    assert "${" not in done.stdout
    assert done.stderr == ""
    assert template.read_text() == TEMPLATE


@pytest.mark.parametrize("command", ["import", "export", "fill"])
def test_help(command: str) -> None:
    assert "--json" in triton(command, "--help").stdout


def test_a_server_is_not_started_with_a_fraction_of_nothing() -> None:
    for command in ("serve demo", "plan demo --bandwidth 1GB"):
        done = CliRunner().invoke(app, [*command.split(), "--kv-fraction", "0", "--json"])
        refused(done, BAD_INPUT, "option_out_of_range", as_json=True)


def test_mistakes_get_one_sentence(v1: Path, template: Path, tmp_path: Path) -> None:
    none = str(tmp_path / "none.pbtxt")
    for arguments, says in (
        (["import", none], "file_not_found"), (["import", str(template)], "file_wrong_kind"),
        (["export", none], "file_not_found"), (["export", str(v1)], "the template has no ${...} to fill in"),
        (["export", "--max-running", "600"], "raise max-step-tokens"), (["export", "--device", "tpu"], "not on tpu"),
        (["fill", str(template), "x"], "'x' is not NAME:VALUE"), (["fill", str(template), "x:1"], "has no ${x}"),
        (["fill", none, "x:1"], "file_not_found"), (["serve"], "No such command"),
    ):  # fmt: skip
        refused(triton(*arguments, "--json"), BAD_INPUT, says, as_json=True)
    done = CliRunner().invoke(app, ["serve", "demo", "--triton-config", str(template), "--json"])
    refused(done, BAD_INPUT, "file_wrong_kind", as_json=True)


@pytest.mark.parametrize(
    ("options", "draft", "count"),
    [("", "lookahead", 3), ("--draft suffix", "suffix", 3), ("--draft-tokens 1", "lookahead", 1)],
)
def test_drafts_of_a_configuration_give_way_to_options(
    options: str, draft: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (("decoding_mode", "lookahead"), ("num_draft_tokens", "3"))
    given = "".join(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in lines)
    (file := tmp_path / "config.pbtxt").write_text(f'backend: "tensorrtllm"\nmax_batch_size: 2\n{given}')
    settings = served(monkeypatch, f"--triton-config {file} {options}")
    assert (settings.draft, settings.draft_tokens) == (draft, count)
