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
    `expected`: checks that fail for a known reason, and the reason; such a check must fail.
    """

    packages: tuple[str, ...]
    program: str
    seconds: float = 120.0
    expected: dict[str, str] = field(default_factory=dict)

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = {
    "openai": Client(("openai==3.57.0",), "openai_sdk.py"),
    "anthropic": Client(("anthropic==2.14.0",), "anthropic_sdk.py"),
    "ollama": Client(("ollama==0.6.3",), "ollama_sdk.py"),
}
