"""`serve` and `plan` side by side: what one prints before it loads is what the other says, for the same options."""

from __future__ import annotations

import datetime
import os
import shlex
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from attar import env, machine
from attar.checkpoints.fingerprints import content_hashes, require_unchanged
from attar.checkpoints.sources.hub import resolve
from attar.cli import options as options_of
from attar.cli import several
from attar.cli.generation import ChatConfig, GenerateConfig, _params
from attar.cli.main import app
from attar.cli.serving import BESIDES
from attar.cli.terminal import BAD_INPUT
from attar.engine import startup
from attar.kernels.native import limits
from attar.plan.fit import ROOM
from attar.plan.rates import store
from attar.plan.rates.profile import NO_OVERHEADS
from attar.protocol.settings import Settings
from attar.server import supervisor
from attar.server.http.sockets import listen
from attar.server.models import server as models_server
from attar.server.models.served import ModelSpec
from attar.server.options import ServerOptions
from attar.server.replicas import cores, processes
from attar.text.template import MAX_TEMPLATE, read_template
from tests import pretend_rates
from tests.cli.test_commands import last_json, refused
from tests.errors import user_error

KEYS = {"largest step": "step", "KV cache": "cache"}
"""What JSON calls lines of the table, where it does not say the same."""


def served(monkeypatch: pytest.MonkeyPatch, options: str, model: str = "demo") -> Settings:
    """The settings that `attar serve MODEL` would hand to its engine."""
    found: list[Settings] = []
    monkeypatch.setattr(supervisor, "run", lambda settings, *_: found.append(settings) or 0)
    done = CliRunner().invoke(app, ["serve", model, *shlex.split(options)])
    assert done.exit_code == 0, done.output
    return found[0]


@pytest.mark.parametrize(
    "options, most",
    [
        ("", 32 + 256 + BESIDES),
        ("--preset throughput", 128 + 1024 + BESIDES),
        ("--preset latency --scheduler max-waiting=7 --scheduler policy=none", 1 + 7 + BESIDES),
        ("--preset throughput --max-requests 9", 9),
    ],
)
def test_the_door_lets_in_what_the_engine_may_have(monkeypatch: pytest.MonkeyPatch, options: str, most: int) -> None:
    found: list[ServerOptions] = []
    monkeypatch.setattr(supervisor, "run", lambda settings, tokenizer, options, *_: found.append(options) or 0)
    done = CliRunner().invoke(app, ["serve", "demo", *shlex.split(options)])
    assert done.exit_code == 0, done.output
    assert found[0].max_requests == most


def test_defaults_of_the_model_are_taken_where_asked_for(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(demo, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    found: list[ServerOptions] = []
    monkeypatch.setattr(supervisor, "run", lambda settings, tokenizer, options, *_: found.append(options) or 0)
    for options in ("", "--generation-config model --template-date 2026-01-31"):
        done = CliRunner().invoke(app, ["serve", str(model), *shlex.split(options)])
        assert done.exit_code == 0, done.output
    assert [each.sampling for each in found] == [{}, {"temperature": 0.6, "top_k": 20}]
    assert [each.template_date for each in found] == [None, datetime.date(2026, 1, 31)]
    refused(CliRunner().invoke(app, ["serve", "demo", "--template-date", "today"]), BAD_INPUT, "2026-01-31")
    theirs = options_of.Defaults.model
    made = GenerateConfig(model=str(model), generation_config=theirs, top_k=3).sampling()
    assert (made.temperature, made.top_k, made.max_tokens) == (0.6, 3, 128)
    assert _params(ChatConfig(model=str(model), generation_config=theirs), {"temperature": 0.7}, ()).temperature == 0.6
    assert _params(ChatConfig(model=str(model)), {"temperature": 0.7}, ()).temperature == 0.7
    with user_error("option_out_of_range", "top_p"):
        GenerateConfig(model="nowhere", generation_config=theirs, top_p=2.0).sampling()  # before it is looked for


def test_a_model_is_asked_for_by_the_name_it_was_served_by(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the Hub's cache it lies in a folder that is called by a hash."""
    commit = "0123456789abcdef" * 2 + "01234567"
    cached = tmp_path / "cache" / "models--acme--tiny"
    snapshot = Path(shutil.copytree(demo, cached / "snapshots" / commit))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(Path(shutil.copytree(demo, tmp_path / "small")))
    options = "--memory 700MB --context 64"
    made = served(monkeypatch, options, "acme/tiny")
    assert (made.model, made.served_as) == (str(snapshot), "acme/tiny")
    assert startup.start_engine(made)[1].model == "acme/tiny"
    assert served(monkeypatch, options, ".").served_as == "small"
    assert served(monkeypatch, options, str(snapshot)).served_as == commit
    for model in ("acme/tiny", ".", "demo"):
        assert served(monkeypatch, f"{options} --name my/own:1", model).served_as == "my/own:1"


def test_no_adapter_has_the_models_name(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(shutil.copytree(demo, tmp_path / "small")))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for options, name in (("serve .", "small"), ("serve demo", "demo"), ("serve . --name tone", "tone")):
        command = [*options.split(), "--adapter", f"{name}={tmp_path / 'adapter'}", "--json"]
        refused(CliRunner().invoke(app, command), 2, "option_conflict", as_json=True)
    assert served(monkeypatch, f"--name other --adapter small={tmp_path / 'adapter'}", ".").adapters[0][0] == "small"


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 257])
def test_a_name_that_no_request_could_ask_for_is_refused(name: str) -> None:
    done = CliRunner().invoke(app, ["serve", "demo", f"--name={name}", "--json"])
    refused(done, 2, "model_name_invalid", as_json=True)


def test_an_engine_is_told_what_it_may_serve(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replaced from the moment on that the tokenizer was read."""
    folder = Path(shutil.copytree(demo, tmp_path / "small"))
    made = served(monkeypatch, "", str(folder))
    assert {Path(path).name for path in made.files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    require_unchanged(made.files, made.folders)
    shutil.copy(demo / "model.safetensors", folder)
    with user_error("checkpoint_changed", "model.safetensors"):
        startup.start_engine(made)


def test_chat_templates_have_their_process_before_the_first_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = threading.Event()
    monkeypatch.setattr("attar.text.template.warm", warm.set)
    monkeypatch.setattr(supervisor, "run", lambda *given: given[-1]("http://x") or 0)
    assert CliRunner().invoke(app, ["serve", "demo"]).exit_code == 0
    assert warm.wait(10)


@pytest.mark.parametrize("size", ["0", "0GB", "0.4B"])
@pytest.mark.parametrize("command", ["serve demo --memory", "plan demo --memory", "plan demo --bandwidth"])
def test_nothing_is_no_size(command: str, size: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), size, "--json"])
    refused(done, 2, f"'{size}' is nothing: leave the option out for its default", as_json=True)


def test_no_device_is_not_the_usual_one() -> None:
    refused(CliRunner().invoke(app, ["serve", "demo", "--device", "", "--json"]), 2, "device_unsupported", as_json=True)


@pytest.mark.parametrize(
    "given, origin",
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://localhost:3000/", "http://localhost:3000"),
        ("HTTPS://Chat.Example", "https://chat.example"),
        ("https://chat.example:443/", "https://chat.example"),
        ("http://chat.example:80", "http://chat.example"),
        ("http://chat.example:443", "http://chat.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("file://", "file://"),
        ("null", "null"),
    ],
)
def test_an_origin_is_taken_as_browsers_say_it(monkeypatch: pytest.MonkeyPatch, given: str, origin: str) -> None:
    found: list[ServerOptions] = []
    monkeypatch.setattr(supervisor, "run", lambda settings, tokenizer, options, *_: found.append(options) or 0)
    assert CliRunner().invoke(app, ["serve", "demo", "--origin", given]).exit_code == 0
    assert found[0].origins == {origin}


@pytest.mark.parametrize(
    "given",
    ["", "chat.example", "http://", "http://x/page", "http://x?q", "http://me@x", "http://x y", "http://ü.example"],
)
def test_an_origin_that_no_page_has_is_refused(given: str) -> None:
    done = CliRunner().invoke(app, ["serve", "demo", f"--origin={given}", "--json"])
    refused(done, 2, "address_invalid", as_json=True)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--context 300 --kv int8",
        "--preset throughput --threads 1",
        "--preset latency --max-running 3 --scheduler max-step-tokens=64 --context 128 --threads 2",
        "--scheduler policy=none --context 256",
        "--max-tokens-in-cache 1000 --context 200 --kv int4",
    ],
)
def test_a_plan_prints_what_a_start_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    monkeypatch.setattr(limits, "READ", 1 << 20)
    options += " --memory 700MB"
    settings = served(monkeypatch, options)
    capsys.readouterr()
    engine, ready = startup.start_engine(settings)
    started = capsys.readouterr().err.splitlines()
    done = CliRunner().invoke(app, ["plan", "demo", "--bandwidth", "1GB", *shlex.split(options), "--json"])
    planned = done.stdout.splitlines()
    assert len(started) >= 7, started
    for line in started:
        assert line in planned
    row = last_json(done)["rows"][0]
    assert dict(ready.table) == {what: row[KEYS.get(what, what)] for what, _ in ready.table}
    assert (row["blocks"], row["context"]) == (ready.blocks, ready.context) == (engine.pool.total, engine.context)


def test_a_plan_for_more_users_than_run_together_raises_that(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ["plan", "demo", "--bandwidth", "1GB", "--memory", "2GB", "--context", "256", "--json", "--users"]
    found = last_json(CliRunner().invoke(app, [*plan, "40"]))
    assert found["step_sequences"] == 40
    assert found["rows"][0]["requests"] == ROOM * 40
    settings = served(monkeypatch, "--memory 2GB --context 256 --max-running 40")
    assert settings.limits().together == 40
    assert last_json(CliRunner().invoke(app, [*plan, "4"]))["step_sequences"] == 32
    many = CliRunner().invoke(app, [*plan, "600"])
    assert (last_json(many)["step_sequences"], last_json(many)["step_tokens"]) == (600, 600)
    assert "as with --max-running 600 --scheduler max-step-tokens=600" in many.stderr
    for given, says in (
        ("--scheduler max-step-tokens=512", "raise max-step-tokens"),
        ("--max-running 16", "only 16 requests run together"),
    ):
        refused(CliRunner().invoke(app, [*plan, "600", *given.split()]), 2, says, as_json=True)
    refused(
        CliRunner().invoke(app, [*plan, "2", "--scheduler", "policy=none"]),
        2,
        "option_conflict",
        as_json=True,
    )


def test_options_of_the_scheduler_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made = served(
        monkeypatch, "--scheduler policy=dynamic --scheduler max-delay=0.25 --threads 3 --scheduler max-waiting=7"
    )
    found = made.limits()
    assert (found.policy, found.max_delay, found.max_waiting, made.threads) == ("dynamic", 0.25, 7, 3)
    assert served(monkeypatch, "--scheduler policy=dynamic").limits().max_delay == 0.1


def test_sparse_attention_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch, "--sparse-attention topk:1/16 --kv int8").sparse_attention == "topk:1/16"
    assert served(monkeypatch, "").sparse_attention is None


def test_sparse_prefill_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch, "--sparse-prefill skip:0.01 --kv int4").sparse_prefill == "skip:0.01"
    assert served(monkeypatch, "").sparse_prefill is None


@pytest.mark.parametrize(
    "options, code",
    [
        ("--tp 2", "option_conflict"),
        ("--draft demo --draft-tree 4", "option_conflict"),
        ("--sparse-prefill minference", "option_malformed"),
        ("--sparse-prefill skip:0.7", "option_out_of_range"),
    ],
)
def test_what_sparse_prefill_does_not_go_with_is_refused(options: str, code: str) -> None:
    made = CliRunner().invoke(app, ["serve", "demo", "--sparse-prefill", "tri-shape", *options.split(), "--json"])
    refused(made, BAD_INPUT, code, as_json=True)


@pytest.mark.parametrize(
    "options, code",
    [
        ("--kv int4", "option_conflict"),
        ("--tp 2", "option_conflict"),
        ("--draft demo --draft-tree 4", "option_conflict"),
        ("--sparse-attention quest:16", "option_malformed"),
    ],
)
def test_what_sparse_attention_does_not_go_with_is_refused(options: str, code: str) -> None:
    made = CliRunner().invoke(app, ["serve", "demo", "--sparse-attention", "topk:512", *options.split(), "--json"])
    refused(made, BAD_INPUT, code, as_json=True)


def test_kv_eviction_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made = served(monkeypatch, "--kv-eviction sink:4+2044 --kv-eviction sink:0+1024 --kv bfloat16")
    assert made.kv_eviction == ("sink:4+2044", "sink:0+1024")
    assert served(monkeypatch, "").kv_eviction == ()


@pytest.mark.parametrize(
    "options, code",
    [
        ("--kv klt2", "option_conflict"),
        ("--tp 2", "option_conflict"),
        ("--draft demo --draft-tree 4", "option_conflict"),
        ("--sparse-attention topk:512", "option_conflict"),
        ("--kv-eviction sink:4+2044", "option_conflict"),
        ("--kv-eviction sink:4", "option_malformed"),
        ("--kv-eviction lru:512", "option_malformed"),
        ("--kv-eviction sink:60+2044", "option_out_of_range"),
        ("--kv-eviction sink:4+20", "option_out_of_range"),
    ],
)
def test_what_kv_eviction_does_not_go_with_is_refused(options: str, code: str) -> None:
    made = CliRunner().invoke(app, ["serve", "demo", "--kv-eviction", "sink:4+2044", *options.split(), "--json"])
    refused(made, BAD_INPUT, code, as_json=True)


def test_a_disk_cache_reaches_the_engine_with_salts_that_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{'a' * 32}\n{'b' * 32}\n")
    (tmp_path / "keys").chmod(0o600)
    options = f"--cache-dir {tmp_path / 'cache'} --cache-bytes 2GB --api-key-file {tmp_path / 'keys'}"
    first, second = served(monkeypatch, options), served(monkeypatch, options)
    assert (first.cache_dir, first.cache_bytes) == (str(tmp_path / "cache"), 2 * 10**9)
    assert first.cache_owners == second.cache_owners
    assert len(set(first.cache_owners)) == 2
    assert first.contents == content_hashes(first.folders)  # a copy of the model elsewhere finds the blocks
    assert served(monkeypatch, "").cache_dir is None
    assert served(monkeypatch, "").contents == ()


@pytest.mark.parametrize(
    "options, code",
    [
        ("--cache-dir cache", "option_missing"),
        ("--cache-bytes 2GB", "option_missing"),
        ("--cache-dir cache --cache-bytes many", "option_malformed"),
        ("--cache-dir cache --cache-bytes 2GB --tp 2", "feature_unsupported"),
        ("--cache-dir cache --cache-bytes 2GB --pp 2", "feature_unsupported"),
        ("--cache-dir cache --cache-bytes 2GB --device cuda", "feature_unsupported"),
        ("--cache-dir cache --cache-bytes 2GB --replicas 2", "feature_unsupported"),
        ("--cache-dir shared --cache-bytes 2GB", "file_unsafe"),
    ],
)
def test_what_a_disk_cache_does_not_go_with_is_refused(
    options: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    made = CliRunner().invoke(app, ["serve", "demo", *options.split(), "--json"])
    refused(made, BAD_INPUT, code, as_json=True)
    assert not (tmp_path / "cache").exists()


PEERS = "--peer-key-file run/key --peer-ca run/ca --peer-cert run/cert"


@pytest.mark.parametrize(
    "options, code",
    [
        ("--role decode", "option_missing"),
        ("--prefill-peer unix:run/socket", "option_missing"),
        ("--role other --prefill-peer unix:run/socket", "name_unknown"),
        ("--role decode --prefill-peer unix:run/socket --tp 2", "feature_unsupported"),
        ("--role decode --prefill-peer unix:run/socket --replicas 2", "feature_unsupported"),
        ("--role decode --prefill-peer unix:run/socket --device cuda", "feature_unsupported"),
        ("--role decode --prefill-peer unix:run/socket --peer-name other", "option_unused"),
        (f"--role decode --prefill-peer http://127.0.0.1:7000 {PEERS}", "address_invalid"),
        ("--role decode --prefill-peer tls://127.0.0.1:7000", "option_missing"),
        ("--role decode --prefill-peer tls://127.0.0.1:7000 --peer-key-file run/key", "option_missing"),
        (f"--role prefill --prefill-peer tls://127.0.0.1:7000 {PEERS}", "option_missing"),
        (f"--role decode --prefill-peer tls://127.0.0.1:7000 {PEERS}", "file_not_found"),
        ("--role prefill --prefill-peer unix:shared/socket", "file_unsafe"),
        ("--role prefill --prefill-peer unix:nowhere/socket", "file_not_found"),
    ],
)
def test_what_a_role_does_not_go_with_is_refused(
    options: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir(0o700)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    made = CliRunner().invoke(app, ["serve", "demo", *options.split(), "--json"])
    refused(made, BAD_INPUT, code, as_json=True)


@pytest.mark.parametrize(
    "options, says",
    [
        ("--scheduler max-delay=0.25", "option_unused"),
        ("--scheduler max-delay=0.25 --scheduler policy=static", "option_unused"),
        ("--scheduler max-delay=inf --scheduler policy=dynamic", "option_malformed"),
    ],
)
def test_a_delay_that_nothing_would_heed_is_refused(options: str, says: str) -> None:
    done = CliRunner().invoke(app, ["serve", "demo", *shlex.split(options), "--json"])
    refused(done, 2, says, as_json=True)


def test_an_address_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "run", lambda settings, tokenizer, options, *_: listen(options.host, options.port))

    def start(*options: str) -> Result:
        monkeypatch.setenv("ATTAR_API_KEY", "k" * 40)
        return CliRunner().invoke(app, ["serve", "demo", *options, "--json"])

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        used = f"cannot listen at 127.0.0.1, port {port}: address already in use; --port takes another"
        refused(start("--port", str(port)), 2, used, as_json=True)
    nowhere = "cannot listen at 192.0.2.1, port 8000: cannot assign requested address; --host is an address"
    refused(start("--host", "192.0.2.1"), 2, nowhere, as_json=True)
    for host in ("", "é..b", "\udcff", "x" * 300):
        refused(start("--host", host), 2, "is neither an address nor a name", as_json=True)

    def unknown(*_: object) -> int:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(supervisor, "run", unknown)
    name = "cannot listen at [::1], port 8000: name or service not known; --host is an address or a name"
    refused(start("--host", "[::1]"), 2, name, as_json=True)


@pytest.mark.parametrize("options", ["--host 0.0.0.0", "--tokens-per-minute 9"])
def test_a_key_that_is_missing_can_be_set(monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    monkeypatch.delenv("ATTAR_API_KEY", raising=False)
    done = CliRunner().invoke(app, ["serve", "demo", *shlex.split(options), "--json"])
    refused(done, 2, "--api-key-file FILE, or ATTAR_API_KEY in the environment", as_json=True)


def test_an_error_about_something_else_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr(supervisor, "run", run)
    refused(CliRunner().invoke(app, ["serve", "demo", "--json"]), 2, "file_not_permitted", as_json=True)


def test_several_models_have_parts_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[list[ModelSpec], int, ServerOptions]] = []
    monkeypatch.setattr(models_server, "run", lambda *given: found.append(given[:3]) or 0)
    done = CliRunner().invoke(app, shlex.split("serve --model a=demo --model b=demo --memory 2GB --context 256 --json"))
    assert done.exit_code == 0, done.output
    [(specs, memory, options)] = found
    assert [spec.settings.name for spec in specs] == ["a", "b"]
    assert sum(spec.size for spec in specs) <= memory < 2 * 10**9
    for spec in specs:
        assert spec.settings.context == 256
        assert spec.settings.memory > spec.size
        require_unchanged(spec.settings.files, spec.settings.folders)
    assert options.max_requests == 2 * (32 + 256) + BESIDES


@pytest.mark.parametrize(
    "options, code, word",
    [
        ("--model a", "option_malformed", "NAME=PATH"),
        ("--model a=demo --model a=demo", "option_conflict", "a"),
        ("--model a=./nothing-there", "file_not_found", "nothing-there"),
        ("--model a/../*=demo", "model_name_invalid", "name"),
        ("./out --model a=demo", "option_conflict", "MODEL"),
        ("--model a=demo --alias b", "option_unused", "--alias"),
        ("--model a=demo --kv-fraction 0.5", "option_unused", "--kv-fraction"),
        ("--model a=demo --replicas 2", "option_unused", "--replicas"),
        ("--model a=demo --tp 2", "option_conflict", "CPU"),
        ("--model a=demo --draft demo", "option_unused", "--draft"),
    ],
)
def test_what_several_models_cannot_have_is_refused(options: str, code: str, word: str) -> None:
    refused(CliRunner().invoke(app, ["serve", *shlex.split(options), "--json"]), BAD_INPUT, code, word, as_json=True)


def test_defaults_of_sampling_and_a_template_of_ones_own(tmp_path: Path) -> None:
    assert options_of.parse_sampling(["temperature=0.5", "top_k=3"]) == {"temperature": 0.5, "top_k": 3}
    for wrong, code in (("heat=1", "option_malformed"), ("top_k", "option_malformed"), ("top_k=a", "option_malformed"),
                        ("top_p=2", "option_out_of_range")):  # fmt: skip
        with user_error(code):
            options_of.parse_sampling([wrong])
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    assert read_template(file) == "{{ messages[0].content }}"
    file.write_bytes(b"\xff")
    for path in (file, tmp_path / "none"):
        with user_error("template_failed", path.name):
            read_template(path)
    with file.open("wb") as large:
        large.truncate(MAX_TEMPLATE + 1)
    with user_error("template_failed", "MiB"):
        read_template(file)


@pytest.mark.parametrize(
    "options, code, word",
    [
        ("--replicas 1", "option_out_of_range", "replicas"),
        ("--replicas 64", "option_out_of_range", "cores"),
        ("--replicas 2 --tp 2", "option_conflict", "--tp"),
        ("--replicas 2 --pp 2", "option_conflict", "--pp"),
        ("--replicas 2 --device cuda", "feature_unsupported", "--device"),
        ("--replica-cores 0", "option_missing", "--replicas"),
        ("--replicas 2 --replica-cores 0", "option_conflict", "lists"),
        ("--replicas 2 --replica-cores 0 --replica-cores x", "option_malformed", "x"),
        ("--replicas 2 --replica-cores 0 --replica-cores 0", "option_conflict", "two replicas"),
        ("--replicas 2 --replica-cores 0 --replica-cores 9999", "option_out_of_range", "9999"),
        ("--replicas 2 --replica-cores 0 --replica-cores 3-1", "option_out_of_range", "3-1"),
    ],
)
def test_what_replicas_cannot_have_is_refused(
    options: str, code: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda root=None: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    refused(CliRunner().invoke(app, ["serve", *shlex.split(options), "--json"]), BAD_INPUT, code, word, as_json=True)


@pytest.mark.parametrize(
    ("nodes", "placed"), [([0, 0], [(4 * 10**9, 2), (4 * 10**9, 2)]), ([0, 1], [(2 * 10**9, 1), (2 * 10**9, 1)])]
)
def test_replicas_divide_memory_and_cores(
    nodes: list[int], placed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one memory node have the memory together, as they share weights."""
    found: list[Any] = []
    monkeypatch.setattr(processes, "run", lambda parts, *rest: found.append((parts, rest)) or 0)
    monkeypatch.setattr(machine, "cores", lambda root=None: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cores, "node", lambda cpu, root=None: nodes[cpu])
    done = CliRunner().invoke(app, ["serve", "--replicas", "2", "--memory", "4GB", "--port", "0"])
    assert done.exit_code == 0, done.output
    [(parts, (_, options, *_))] = found
    assert [(settings.memory, settings.sharers) for settings, _ in parts] == placed
    assert [(settings.threads, cores) for settings, cores in parts] == [(1, (0,)), (1, (1,))]
    assert options.max_requests == 2 * (32 + 256) + BESIDES


@pytest.mark.parametrize("kept", [True, False])
def test_replicas_say_where_one_engine_is_faster(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "get", lambda: env.Env(cache=tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cores, "node", lambda cpu, root=None: 0)
    demo = resolve("demo")
    now = datetime.datetime.now(datetime.UTC).isoformat()
    rates = pretend_rates.profile(key=store.key(), measured=now, overheads=NO_OVERHEADS)
    if kept:
        assert store.RatesStore(store.folder()).keep(rates)
    several.divide_cores(Settings(str(demo), "", memory=4 * 10**9), 2, ["0", "1"])
    for thread in threading.enumerate():
        if thread.name == several.ONE_ENGINE:
            thread.join()
    said = capsys.readouterr().err
    assert ("one engine on all cores is faster by this machine's rates" in said) is kept
    assert ("`attar bench --rates`" in said) is not kept


@pytest.mark.parametrize("processes", ["--tp 2", "--pp 2"])
def test_hosts_of_a_router_are_one_process_each(processes: str, tmp_path: Path) -> None:
    (key := tmp_path / "router.key").write_text("r" * 40)
    key.chmod(0o600)
    done = CliRunner().invoke(app, ["serve", *shlex.split(processes), "--router-key-file", str(key), "--json"])
    refused(done, BAD_INPUT, "feature_unsupported", f"--router-key-file with {processes}", as_json=True)
