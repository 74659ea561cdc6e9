"""One model of a server that has several: its engine's client, its tokenizer, and an application of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from attar.images.settings import ImageSettings
from attar.protocol.settings import Settings
from attar.server.api.app import make_app
from attar.server.api.responses.store import ResponseStore
from attar.server.dispatcher import Dispatcher
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.heartbeat import STUCK
from attar.server.fair_thread_pool import TextThreads
from attar.server.grammars import Grammars
from attar.server.images import ImageReader
from attar.server.metrics import HttpMetrics
from attar.server.options import ServerOptions
from attar.server.prompts import Prompts
from attar.server.request_handler import RequestContext
from attar.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelSpec:
    """A model to serve: settings of its engine with a `context` and a `memory`, of which `size` bytes count against the
    memory of all engines; its tokenizer; `sampling`, parameters of requests that do not name them; and how it wants
    images, where it takes any."""

    settings: Settings
    size: int
    tokenizer: Tokenizer
    sampling: Mapping[str, Any] = field(default_factory=dict)
    images: ImageSettings | None = None


class ServedModel:
    """The model of `spec`, whose engine listens at `socket` while it is loaded. Its application answers as if it were
    served alone; `http` are the metrics of the server, and `store` keeps answers of all models."""

    def __init__(
        self, spec: ModelSpec, socket: Path, options: ServerOptions, threads: TextThreads, http: HttpMetrics,
        store: ResponseStore | None = None,
    ) -> None:  # fmt: skip
        keys = len(set(options.keys.hashes))
        self.spec, self.socket, self.name = spec, socket, spec.settings.served_as
        self.engine = EngineClient(socket, max(STUCK, options.deadline), keys)
        self.context = RequestContext(self.engine, http, options.request_metrics)
        self.dispatcher = Dispatcher(self.context, options.deadline)
        self.images = ImageReader(spec.images, spec.tokenizer, keys) if spec.images else None
        self.prompts = Prompts(spec.tokenizer, threads, options.template_date, options.reasoning, self.images)
        self.grammars = Grammars(spec.tokenizer)
        self.app: FastAPI = make_app(
            self.dispatcher, self.prompts, self.grammars, threads, spec.sampling, bool(options.keys.hashes),
            options.root_path, store,
        )  # fmt: skip
