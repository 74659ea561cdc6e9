"""`--device` on the command line: what cannot be computed on is refused first, by one sentence."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from typer.testing import CliRunner

from attar.checkpoints.sources import hub
from attar.cli import generation, terminal
from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT
from attar.server import supervisor
from attar.server.http.security import KEY_VARIABLE
from tests.cli.test_commands import refused

without = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")

COMMANDS = (
    "generate org/name",
    "chat org/name",
    "eval org/name --text no.txt",
    "eval org/name --text no.txt --adapter none",
    "eval org/name --task lambada=no.jsonl",
    "verify org/name",
    "compress org/name out",
    "bench org/name",
    "bench org/name --tp 2",
    "bench --shape tiny",
    "serve org/name",
)


def never(*_: object, **__: object) -> NoReturn:
    raise AssertionError("something was fetched, read or started before the device was asked for")


@without
@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_that_is_not_there_is_refused_first(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_download", never)
    monkeypatch.setattr(generation, "read_stdin", never)
    monkeypatch.setattr(supervisor, "run", never)
    done = CliRunner().invoke(app, [*shlex.split(command), "--device", "cuda", "--json"])
    refused(done, BAD_INPUT, "device_unavailable", as_json=True)


@pytest.mark.parametrize("ends", ["import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_a_device_at_which_the_process_that_asks_dies_is_refused(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "ASK", ends)
    monkeypatch.setattr(supervisor, "run", never)
    done = CliRunner().invoke(app, ["serve", "demo", "--device", "cuda", "--json"])
    refused(done, BAD_INPUT, "device_unavailable", as_json=True)


def test_no_process_that_serve_starts_has_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * 32)
    said = f"'has the key' if {KEY_VARIABLE!r} in os.environ else 'has it not'"
    monkeypatch.setattr(terminal, "ASK", f"import os; print('device_unavailable', {said})")
    monkeypatch.setattr(supervisor, "run", never)
    done = CliRunner().invoke(app, ["serve", "demo", "--device", "cuda", "--json"])
    refused(done, BAD_INPUT, "device_unavailable", "has it not", as_json=True)


@without
def test_a_triton_configuration_that_names_a_gpu_can_be_overruled(tmp_path: Path) -> None:
    config = tmp_path / "config.pbtxt"
    config.write_text('max_batch_size: 8 parameters: { key: "gpu_device_ids" value: { string_value: "0" } }')
    done = CliRunner().invoke(app, ["serve", "org/name", "--triton-config", str(config)])
    assert done.exit_code == BAD_INPUT
    assert "cannot compute on cuda:0: " in done.stderr
    assert done.stderr.rstrip().endswith("--device cpu needs none, whatever --triton-config says")


def test_so_is_one_that_attar_does_not_know() -> None:
    done = CliRunner().invoke(app, ["generate", "demo", "--device", "mps"])
    refused(done, BAD_INPUT, "device_unsupported")
