"""The file of a Serve application: what `attar deploy` writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from attar.cli.main import app
from attar.integrations.ray.settings import Arguments


def deploy(*options: str) -> Any:
    return CliRunner().invoke(app, ["deploy", "demo", "--json", *options])


def code_of_json(said: str) -> str:
    return str(json.loads(said.splitlines()[-1])["code"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "app.yaml"


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def test_the_file_has_every_argument(file: Path) -> None:
    result = deploy(
        "--ray", str(file), "--ray-replicas", "3", "--threads", "2", "--memory", "2GB", "--kv", "int8",
        "--port", "9000",
        "--alias", "gpt-*", "--sampling", "temperature=0.5", "--drain-seconds", "7",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = read(file)
    assert found["proxy_location"] == "Disabled"
    (application,) = found["applications"]
    assert application["import_path"] == "attar.integrations.ray.app:build"
    given = msgspec.convert(application["args"], Arguments)
    assert (given.engine.kv, given.engine.threads, given.engine.memory) == ("int8", 2, 2 * 10**9)
    assert given.engine.files
    assert Path(given.engine.model).is_absolute()
    options = given.http.options()
    assert (options.port, options.aliases, options.sampling, options.drain_seconds) == (
        9000, ("gpt-*",), {"temperature": 0.5}, 7.0,
    )  # fmt: skip
    (engine,) = application["deployments"]
    assert engine["num_replicas"] == 3
    assert engine["ray_actor_options"] == {"num_cpus": 2, "memory": 2 * 10**9}
    assert engine["graceful_shutdown_timeout_s"] > 7
    assert "--node-ip-address 127.0.0.1" in file.read_text()


def test_processes_of_a_replica_are_reserved_together(file: Path) -> None:
    assert deploy("--ray", str(file), "--tp", "2", "--threads", "3").exit_code == 0
    assert read(file)["applications"][0]["deployments"][0]["ray_actor_options"] == {"num_cpus": 6}


def test_replicas_by_load(file: Path) -> None:
    assert deploy("--ray", str(file), "--ray-max-replicas", "5").exit_code == 0
    scaling = read(file)["applications"][0]["deployments"][0]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 5)
    assert scaling["policy"] == {"policy_function": "attar.integrations.ray.autoscaling.desired"}


@pytest.mark.parametrize("options, code", [
    (("--replicas", "2"), "option_conflict"),
    (("--ray-address", "0.0.0.0"), "ray_exposed"),
    (("--ray-address", "10.0.0.7"), "ray_exposed"),
    (("--ray-replicas", "3", "--ray-max-replicas", "2"), "option_conflict"),
    (("--threads", "4", "--ray-cpus", "2"), "option_conflict"),
    (("--host", "0.0.0.0"), "exposed_without_key"),
    (("--device", "cuda:1"), "device_unsupported"),
    (("--triton-config", "config.pbtxt"), "option_conflict"),
])  # fmt: skip
def test_what_does_not_go_with_ray_is_refused(file: Path, options: tuple[str, ...], code: str) -> None:
    result = deploy("--ray", str(file), *options)
    assert code_of_json(result.stdout) == code
    assert not file.exists()


def test_an_exposed_start_needs_consent(file: Path) -> None:
    assert deploy("--ray", str(file), "--ray-address", "10.0.0.7", "--ray-insecure").exit_code == 0
    assert read(file)["applications"][0]["args"]["insecure"] is True
    text = file.read_text()
    assert "--node-ip-address 10.0.0.7" in text
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in text
    assert "RAY_AUTH_MODE=token" in text


def test_a_file_is_kept_unless_told(file: Path) -> None:
    assert deploy("--ray", str(file)).exit_code == 0
    assert code_of_json(deploy("--ray", str(file)).stdout) == "output_exists"
    assert deploy("--ray", str(file), "--overwrite").exit_code == 0


def test_keys_stay_in_their_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k" * 40 + "\n")
    keys.chmod(0o600)
    assert deploy("--ray", str(file), "--host", "0.0.0.0", "--api-key-file", str(keys)).exit_code == 0
    assert "kkkk" not in file.read_text()
    given = msgspec.convert(read(file)["applications"][0]["args"], Arguments)
    assert len(given.http.options().keys.hashes) == 1
    monkeypatch.setenv("ATTAR_API_KEY", "k" * 40)
    assert code_of_json(deploy("--ray", str(file), "--overwrite").stdout) == "option_missing"
