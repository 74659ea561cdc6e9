"""Compress language models, measure the quality loss, plan capacity, and serve the result.

    import attar
    attar.compress("./model", "./out", recipe="gptq-w4g128", calibration="text.txt")
    attar.evaluate("./out", against="./model", text="heldout.txt")
    attar.LLM("./out").generate("Once upon a time")

Importing attar is cheap: torch and the native kernels load with the first name that needs them. The import sets how
long OpenMP threads spin, unless the environment already does (`threads.py`).

The modules in this folder import no package of attar (`__main__`, and `demo` and `doctor`, which two commands run,
apart). Start reading in `docs/architecture.md`.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from attar.threads import spin_briefly
from attar.version import __version__

if TYPE_CHECKING:
    from attar.compression.request.request import CompressionRequest
    from attar.compression.runs.pipeline import compress, compress_request
    from attar.engine.llm.llm import LLM
    from attar.evaluation.report import evaluate
    from attar.protocol.grammar import Grammar
    from attar.protocol.request import Completion, SamplingParams

spin_briefly(os.environ)

__all__ = [
    "LLM", "Completion", "CompressionRequest", "Grammar", "SamplingParams", "__version__", "compress",
    "compress_request", "evaluate",
]  # fmt: skip

_HOMES = {
    "LLM": "attar.engine.llm.llm",
    "Completion": "attar.protocol.request",
    "Grammar": "attar.protocol.grammar",
    "SamplingParams": "attar.protocol.request",
    "CompressionRequest": "attar.compression.request.request",
    "compress": "attar.compression.runs.pipeline",
    "compress_request": "attar.compression.runs.pipeline",
    "evaluate": "attar.evaluation.report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attar' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
