"""The command `deploy`: a model as an application of Ray Serve."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attar import logs
from attar.cli import options, serving
from attar.cli.commands import configured, flag, option
from attar.cli.fleet.transfer_options import KV_TRANSFER
from attar.cli.terminal import emit, errors, require_apart, tell
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.integrations.ray.config import Size
    from attar.integrations.ray.settings import Arguments

NOT_HERE = ("models", "replicas", "replica_cores", "triton_config", "router_key_file", *KV_TRANSFER)
"""Options of `serve` that Ray's replicas do not have."""


@dataclass(frozen=True, kw_only=True)
class DeployConfig(serving.ServeConfig):
    """Options of `deploy`: those of `serve`, and Ray's."""

    ray: Annotated[Path, option("Ray", "FILE", "The Serve application to write, a YAML file.", "--ray")]
    ray_replicas: Annotated[int, option("Ray", "N", "Engines, each in a replica.", min=1, max=128)] = 1
    ray_max_replicas: Annotated[int | None, option(
        "Ray", "N", "Add replicas up to N while prompts wait for longer than a second, or running requests fill the "
        "caches.", min=1, max=128, default="as many as --ray-replicas",
    )] = None  # fmt: skip
    ray_cpus: Annotated[int | None, option(
        "Ray", "N", "Cores that Ray reserves for a replica.", min=1, default="--threads, or this machine's, shared",
    )] = None  # fmt: skip
    ray_address: Annotated[str, option(
        "Ray", "ADDRESS", "Address of the cluster's first node; others than loopback need --ray-insecure.",
    )] = "127.0.0.1"  # fmt: skip
    ray_insecure: Annotated[bool, flag(
        "Ray", "Run although Ray's ports can be reached from other machines, or ask for no token.", "--ray-insecure",
    )] = False  # fmt: skip
    start: Annotated[bool, flag(
        "Ray", "Start Ray on this machine with the application, and serve until Ctrl-C.", "--start"
    )] = False  # fmt: skip
    overwrite: options.Overwrite = False

    def check(self) -> None:
        """Raise ValueError for options of `serve` that do not go with Ray, and for an address that needs consent."""
        from attar.integrations.ray.config import check_address

        for field in NOT_HERE:
            if getattr(self, field):
                name = "--model" if field == "models" else "--" + field.replace("_", "-")
                raise UserError("option_conflict", f"{name} is for attar serve, and not for Ray's replicas")
        if self.role.value != "both":
            raise UserError("option_conflict", "--role is for attar serve: each of Ray's replicas does both")
        if self.device not in (None, "cpu", "cuda"):
            message = f"--device {self.device}: Ray chooses a replica's GPUs, so give cpu or cuda"
            raise UserError("device_unsupported", message)
        check_address(self.ray_address, self.ray_insecure)


@configured(DeployConfig)
def deploy(config: DeployConfig) -> None:
    """Write a model as an application of Ray Serve.

    Replicas run the engines of `serve`, and one of them the HTTP server. The options are those of `serve`; --memory
    and --threads are of each replica. Every node needs attar, and the model at the same path.

    Examples:
      attar deploy ./out --ray app.yaml --ray-replicas 2
      attar deploy ./out --ray app.yaml --ray-max-replicas 8 --start
      attar deploy ./out --ray app.yaml --device cuda --tp 2
    """
    with errors(config.as_json):
        from attar.integrations.ray import config as ray_config

        logs.begin()
        config.check()
        size = ray_config.Size(config.ray_replicas, config.ray_max_replicas, config.ray_cpus)
        require_apart(config.device or "cpu")
        arguments, reserved = _arguments(config, size)
        found = ray_config.document(arguments, size, reserved)
        ray_config.write(config.ray, found, config.ray_address, config.overwrite)
        tell(f"wrote {config.ray}; its first lines say how it is started")
        if not config.start:
            emit(config.as_json, {"file": str(config.ray), "import_path": ray_config.IMPORT_PATH})
            return
        from attar.integrations.ray import start

        started = serving.teller(False, config.as_json, "")
        start.run(found, config.ray_address, config.ray_insecure, started)


def _arguments(config: DeployConfig, size: Size) -> tuple[Arguments, dict[str, Any]]:
    """Make the application's arguments, and what Ray reserves for a replica. Raises ValueError for invalid ones."""
    from msgspec.structs import replace

    from attar.checkpoints import vocabulary
    from attar.checkpoints.fingerprints import fingerprints
    from attar.checkpoints.sources import hub
    from attar.integrations.ray.config import placed
    from attar.integrations.ray.settings import Arguments, HttpSettings
    from attar.server.options import check_name, name_of
    from attar.text.template import read_template

    name = name_of(config.model) if config.name is None else check_name(config.name)
    keys, origins = config.security()
    # Links of the Hub's cache are kept: the names of what they lead to do not end in .gguf.
    path = Path(os.path.abspath(hub.resolve(config.model)))
    settings, reserved = placed(config.engine(path, name, {"device": config.device or "cpu"}), size)
    adapters = tuple((each, os.path.abspath(folder)) for each, folder in settings.adapters)
    settings = replace(settings, adapters=adapters, draft=_absolute(settings.draft, settings.draft_model))
    settings = replace(settings, files=fingerprints(settings.folders))
    http = config.http(keys, origins, settings.limits(), path, name, size.most or size.replicas)
    vocabulary.tokenizer(path)  # first: a model without one is refused here
    template = None if config.chat_template is None else read_template(config.chat_template)
    file = None if config.api_key_file is None else config.api_key_file.resolve()
    if keys.hashes and file is None:
        message = "the HTTP server of a cluster reads its keys from a file: give --api-key-file FILE"
        raise UserError("option_missing", message)
    return Arguments(settings, HttpSettings.of(http, path, size.places, file, template), config.ray_insecure), reserved


def _absolute(draft: str | None, model: str | None) -> str | None:
    """Return `draft` with the absolute path of the draft model that it names, if it does: nodes have other folders."""
    return draft if draft is None or model is None else draft.removesuffix(model) + os.path.abspath(model)
