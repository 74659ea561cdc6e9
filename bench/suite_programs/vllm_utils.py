"""Stands in place of vLLM's `tests/utils.py`: servers of its tests are attar, with the embedded model under any name.

Options of `vllm serve` become those of `attar serve` where attar has them. Servers with equal options are one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin

import anthropic
import openai

sys.path.insert(0, os.environ["SUITE_HARNESS"])

import llama_server

ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
FLAGS = {"--enable-per-request-metrics": "--request-metrics"}
SAMPLING = () if llama_server.MODEL == "demo" else ("temperature=0.7", "seed=0")
"""The temperature that Qwen2.5's authors name, which vLLM reads from a model's folder; a GGUF file has none. The seed
is that of vLLM's engine."""
VALUES = {"--root-path": "--root-path", "--served-model-name": "--name", "--max-model-len": "--context"}


class RemoteOpenAIServer:
    """A server of a test. Its options are a list of words, as `vllm serve` takes them."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], env_dict: Mapping[str, str] | None = None, **_: Any
    ) -> None:
        words = [each for word in vllm_serve_args for each in word.split("=", 1)]
        given = dict(zip(words, [*words[1:], ""], strict=True))
        made = ["--alias", "*"]
        for name, own in (
            {"--max-model-len": str(llama_server.MOST_CONTEXT), "--served-model-name": model} | given
        ).items():
            if name in VALUES:
                value = str(min(int(own), llama_server.MOST_CONTEXT)) if name == "--max-model-len" else own
                made += [VALUES[name], value]
        made += [own for name, own in FLAGS.items() if name in words]
        made += [word for each in SAMPLING for word in ("--sampling", each)]
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            made += llama_server.keyed(key)
        self.host, self.port = "127.0.0.1", llama_server.backend(made)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(parts)

    def get_client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options("v1", more))

    def get_async_client(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options("v1", more))

    def get_client_anthropic(self, **more: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options("", more))

    def get_async_client_anthropic(self, **more: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options("", more))

    def _options(self, path: str, more: dict[str, Any]) -> dict[str, Any]:
        base = urljoin(self.url_root + "/", path)
        return {"base_url": base, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60} | more


def __getattr__(name: str) -> Any:
    """Return a decorator or a function that does nothing, for what tests import besides servers."""
    from unittest.mock import MagicMock

    return MagicMock(name=name)
