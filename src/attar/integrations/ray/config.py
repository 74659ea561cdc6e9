"""The file of a Serve application, as `serve run` and Serve's REST API read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from attar import machine
from attar.errors import UserError
from attar.integrations.ray import exposure
from attar.integrations.ray.settings import Arguments
from attar.protocol.settings import Settings
from attar.server.http.security import is_loopback
from attar.version import __version__

IMPORT_PATH = "attar.integrations.ray.app:build"
POLICY = "attar.integrations.ray.autoscaling.desired"
NAME = "attar"  # of the application
SHUTDOWN_SECONDS = 10.0  # beyond the drain of a replica: leases of watches end within
GPU_CPUS = 1  # cores of a replica whose model computes on GPUs


@dataclass(frozen=True)
class Size:
    """How many replicas there are: `replicas`, or from there up to `most`, by load; and the cores of each."""

    replicas: int = 1
    most: int | None = None
    cpus: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < self.replicas:
            message = f"--ray-max-replicas {self.most} is less than --ray-replicas {self.replicas}"
            raise UserError("option_conflict", message)

    @property
    def places(self) -> int:
        """Replicas at a time, at most, with those that are being replaced."""
        return 2 * (self.most or self.replicas)


def placed(settings: Settings, size: Size) -> tuple[Settings, dict[str, Any]]:
    """Return an engine's settings with its number of threads, and what Ray reserves for a replica. All of a replica's
    processes are children of one actor, so what it reserves is of one node.

    Raises UserError where there are more threads than cores.
    """
    processes = settings.tp * settings.pp
    if settings.device != "cpu":
        return settings, {"num_cpus": size.cpus or GPU_CPUS, "num_gpus": processes}
    cpus = size.cpus or processes * (settings.threads or max(1, machine.cores() // (size.replicas * processes)))
    threads = settings.threads or cpus // processes
    if threads < 1 or threads * processes > cpus:
        message = f"--ray-cpus {cpus}: a replica has {processes} processes of {max(1, threads)} threads each"
        raise UserError("option_conflict", message)
    reserved: dict[str, Any] = {"num_cpus": cpus}
    if settings.memory is not None:
        reserved["memory"] = settings.memory
    return msgspec.structs.replace(settings, threads=threads), reserved


def document(arguments: Arguments, size: Size, reserved: dict[str, Any]) -> dict[str, Any]:
    """Return the application as plain values."""
    engine: dict[str, Any] = {
        "name": "Engine", "ray_actor_options": reserved,
        "graceful_shutdown_timeout_s": arguments.http.drain_seconds + SHUTDOWN_SECONDS,
    }  # fmt: skip
    if size.most is None:
        engine["num_replicas"] = size.replicas
    else:
        engine["autoscaling_config"] = {
            "min_replicas": size.replicas, "max_replicas": size.most, "metrics_interval_s": 1.0,
            "look_back_period_s": 5.0, "upscale_delay_s": 5.0, "downscale_delay_s": 120.0,
            "policy": {"policy_function": POLICY},
        }  # fmt: skip
    application = {
        "name": NAME, "route_prefix": None, "import_path": IMPORT_PATH, "args": msgspec.to_builtins(arguments),
        "logging_config": {"enable_access_log": False}, "deployments": [engine],
    }  # fmt: skip
    return {"proxy_location": "Disabled", "applications": [application]}


def check_address(address: str, insecure: bool) -> None:
    """Raise UserError for a node's address beyond loopback in a start that is not `insecure`."""
    if not is_loopback(address) and not insecure:
        message = f"--ray-address {address}: there Ray listens on every address of its hosts, and whoever reaches its "
        message += "ports with the token runs code; on a network of the cluster's own, give --ray-insecure"
        raise UserError("ray_exposed", message)


def write(file: Path, found: dict[str, Any], address: str, overwrite: bool) -> None:
    """Write an application, with the commands that start it. Raises UserError where the file exists, unless it is to be
    replaced."""
    if file.exists() and not overwrite:
        raise UserError("output_exists", f"{file} exists: give another name, or --overwrite")
    environment = " ".join(f"{name}={value}" for name, value in exposure.environment(address).items())
    head = f"# Written by attar {__version__}. `attar deploy --start` runs it on this machine; or:\n"
    head += f"#   export {environment}\n"
    head += f"#   ray start --head --node-ip-address {address} --include-dashboard false --disable-usage-stats\n"
    head += f"#   serve run --non-blocking {file.name}\n"
    file.write_text(head + yaml.safe_dump(found, sort_keys=False, allow_unicode=True), encoding="utf-8")
