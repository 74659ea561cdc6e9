"""The import path of attar's Serve application: `attar.integrations.ray.app:build`.

`attar deploy MODEL --ray FILE` writes the file that names it. Numbers of replicas, their resources and their
autoscaling stand in that file, where Serve expects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import RequestRouterConfig

from attar.integrations.ray.engine import Engine
from attar.integrations.ray.http import Http
from attar.integrations.ray.settings import Arguments

HEAD = "node:__internal_head__"  # Ray's resource of the head node, of which there is one
MOST_ONGOING = 4096  # calls of a replica: the engine's queue has its own limit, and refuses


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application from plain values of `Arguments`. Raises msgspec.ValidationError for others."""
    given = msgspec.convert(args, Arguments)
    router = RequestRouterConfig(request_router_class="attar.integrations.ray.router.CostRouter")
    engine = serve.deployment(Engine, name="Engine").options(
        max_ongoing_requests=MOST_ONGOING, request_router_config=router
    )
    http = serve.deployment(Http, name="Http").options(
        num_replicas=1, max_ongoing_requests=16, ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        graceful_shutdown_timeout_s=given.http.drain_seconds + 5,
    )  # fmt: skip
    settings, plain = msgspec.to_builtins(given.engine), msgspec.to_builtins(given.http)
    return http.bind(engine.bind(settings, given.insecure, given.http.port), plain, given.insecure)
