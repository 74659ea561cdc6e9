"""What the programs in this folder agree on: shapes, options, and the one JSON object that each prints last.

Each engine lives in an environment of its own, so nothing is imported here beyond the standard library. A program makes
one measurement in one process: the caller can then put the engines in turn, and no engine inherits the memory, the
threads or the caches of another. The keys are those of `attar bench --json`:

    prefill_tok_s    prompt tokens of all sequences over the time until each has its first new token
    decode_tok_s     the tokens generated after that, of all sequences, over their time
    load_s           from after the imports to a model that takes tokens
    first_token_s    from after the imports to the first token of a short prompt (the warm-up, compilation included)
    peak_rss_mb      highest resident size minus that after the imports, in MB of 10^6 bytes; mapped files count
    bytes_per_token  bytes of weights that one decode step reads, as the file stores them

and beside them `version` and `isa`, the instruction sets that the engine says it uses, or null.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 16  # tokens of the prompt that goes first, untimed but for `first_token_s`
SEED = 20


@dataclass(frozen=True)
class Shape:
    """The sizes of a published model: all that speed depends on. Embedding and head are tied in both families."""

    family: str  # the name both transformers and GGUF have for the architecture
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    qkv_bias: bool

    def linears(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of the linears of one block, under GGUF's names."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }


SHAPES = {
    "llama-3.2-1b": Shape("llama", 2048, 16, 32, 8, 64, 8192, 128256, 500000.0, False),
    "qwen2.5-0.5b": Shape("qwen2", 896, 24, 14, 2, 64, 4864, 151936, 1000000.0, True),
    "tiny": Shape("llama", 256, 2, 4, 2, 64, 512, 2048, 10000.0, False),  # to try a set-up out in seconds
}


def arguments(doc: str | None, formats: tuple[str, ...], files: bool = False) -> argparse.ArgumentParser:
    """The options that every program has. With `files`, a model file may be named instead of a shape in the cache."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape", choices=SHAPES)
    if files:
        source.add_argument("--file", type=Path)
    parser.add_argument("--format", choices=formats, default=formats[0])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--gen", type=int, default=128, help="tokens generated in each sequence after the first")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, required=not files, help="folder of the model files")
    return parser


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_mb(after_imports: int) -> float:
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - after_imports) / 1e6


def report(figures: dict[str, Any]) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)
