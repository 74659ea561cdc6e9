"""Clients that `bench/clients.py` runs: packages, program, time limit, and failures that are expected."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = HERE / "locks"


@dataclass(frozen=True)
class Client:
    """One environment and the program that runs in it.

    `packages`: what a user installs, the client itself first; a lock has all that these need.
    `program`: a file of `python/` or `node/`.
    `seconds`: a limit for a program that hangs; on a busy machine imports alone take minutes.
    `expected`: checks that fail for a known reason, and the reason; such a check must fail.
    """

    packages: tuple[str, ...]
    program: str
    seconds: float = 900.0
    expected: dict[str, str] = field(default_factory=dict)

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = {
    "openai": Client(("openai==3.57.0",), "openai_sdk.py"),
    "anthropic": Client(("anthropic==2.14.0",), "anthropic_sdk.py"),
    "litellm": Client(("litellm==1.110.2",), "litellm_sdk.py"),
    "langchain": Client(("langchain-openai==1.7.4", "langchain-anthropic==1.7.10"), "langchain_both.py"),
    "llama-index": Client(("llama-index-llms-openai-like==0.8.1",), "llamaindex.py"),
    "instructor": Client(("instructor==1.17.0",), "instructor_modes.py"),
    "pydantic-ai": Client(("pydantic-ai-slim[openai,anthropic]==2.68.0",), "pydantic_agents.py"),
    "openai-agents": Client(("openai-agents==0.24.0",), "openai_agents.py"),
    "semantic-kernel": Client(("semantic-kernel==1.45.0",), "semantic_kernels.py"),
    "ollama": Client(("ollama==0.6.3",), "ollama_sdk.py"),
    "dspy": Client(("dspy[numpy]==3.4.1",), "dspy_modules.py"),
    "llm": Client(("llm==0.36",), "llm_cli.py"),
    "aider": Client(("aider-chat==0.86.2",), "aider_cli.py"),
    "guidellm": Client(("guidellm==0.8.1", "torch==2.13.0"), "guidellm_cli.py"),
    "aiperf": Client(("aiperf==0.13.0",), "aiperf_cli.py"),
    "lm-eval": Client(("lm-eval[api]==0.4.13",), "lm_eval_tasks.py"),
    "openai-js": Client(("openai@7.57.0",), "openai_js.mjs"),
    "anthropic-js": Client(("@anthropic-ai/sdk@1.14.0",), "anthropic_js.mjs"),
    "ollama-js": Client(("ollama@0.6.4",), "ollama_js.mjs"),
    "promptfoo": Client(("promptfoo@0.121.20",), "promptfoo_cli.mjs"),
    "vercel-ai": Client(
        ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/anthropic@4.0.105"),
        "vercel_ai.mjs",
    ),
}
