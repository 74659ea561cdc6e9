"""`attar deploy --start`: a Ray cluster of this process on this machine, with one application, until told to stop.

The cluster's token is made for it, in a folder that only this user can read, and so are Ray's own sockets. All
processes of the cluster end with this one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attar.errors import UserError
from attar.integrations.ray import exposure
from attar.integrations.ray.config import NAME

LOOK_SECONDS = 0.2
OBJECT_STORE = 128 << 20  # bytes: what replicas tell each other is small
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


def run(found: dict[str, Any], address: str, insecure: bool, started: Callable[[str], None]) -> None:
    """Start Ray at `address`, deploy the application `found`, call `started` with the address of its HTTP server, and
    wait for SIGTERM or Ctrl-C.

    Raises UserError where Ray is not installed, where the application cannot start, and where Ray listens beyond
    loopback in a start that is not `insecure`.
    """
    folder = Path(tempfile.mkdtemp(prefix="attar-"))  # its mode is 0700
    try:
        token = folder / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(exposure.TOKEN_BITS // 8))
        # Before Ray is imported, which reads it once:
        os.environ.update(exposure.environment(address), RAY_AUTH_TOKEN_PATH=str(token))
        os.environ.pop("RAY_AUTH_TOKEN", None)
        _run(found, address, insecure, folder, started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(found: dict[str, Any], address: str, insecure: bool, folder: Path, started: Callable[[str], None]) -> None:
    try:
        import ray
        from ray import serve
        from ray.serve.schema import ServeDeploySchema
    except ImportError as error:
        message = "Ray is not installed in this environment: pip install 'attar[ray]'"
        raise UserError("package_missing", message) from error
    stop = threading.Event()
    try:
        ray.init(
            include_dashboard=False, _node_ip_address=address, _temp_dir=str(folder / "ray"), namespace="attar",
            object_store_memory=OBJECT_STORE, log_to_driver=True, logging_level="warning",
        )  # fmt: skip
        for each in (signal.SIGTERM, signal.SIGINT):  # Ray has put handlers of its own there
            signal.signal(each, lambda *_: stop.set())
        exposure.require(insecure)
        serve.start(proxy_location="Disabled")
        client = serve.context._get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate(found), _blocking=False)
        while not stop.wait(LOOK_SECONDS):
            application = serve.status().applications.get(NAME)
            if application is not None and application.status in FAILED:
                raise UserError("worker_failed", f"the application failed: {application.message}")
            if application is not None and application.status == "RUNNING":
                started(serve.get_deployment_handle("Http", NAME).address.remote().result())
                break
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
