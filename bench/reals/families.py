"""llama.cpp beside exact rows on tiny random models of each family that attar writes to GGUF files.

    PYTHONPATH=bench python -m reals.families --llamacpp PYTHON [--families NAME ...] [--types f32 q8_0 ...]

attar writes each file and reads it with `--activations exact`. `kl_mean`, `kl_max` and `top1` are of llama.cpp as it
comes, which rounds rows beside all types but F32. `as_f32` is the largest divergence of llama.cpp on the same values,
which its own quantizer wrote as an F32 file, with attention in float32: there neither rounds anything, so a name, a key
or a block that one side takes for something else shows. Texts are random tokens, longer than Gemma's windows and than
the trained context of Phi-3's longrope. Phi-3 has no window here, because llama.cpp has none for it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from llamacpp_logits import as_f32, llama_cpp

from attar.checkpoints.sources import opening
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.kernels import dispatch
from attar.metrics.divergence import compare
from attar.metrics.streaming import decoder_logits
from reals.configs import CONFIGS, TYPES
from tests.model import random_model

WIDER = {
    "hidden_size": 256, "n_embd": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256, "num_attention_heads": 16, "n_head": 16, "num_key_value_heads": 8,
}  # fmt: skip
"""Sizes that k-quants divide, with heads as narrow as the configs have them."""
TEXTS, LENGTH = 4, 48


def wider(kind: str) -> dict[str, Any]:
    """The family's config with these sizes, and without the window that llama.cpp does not have."""
    config = CONFIGS[kind]
    without = {"sliding_window": None} if kind.startswith("phi3") else {}
    return config | {name: size for name, size in WIDER.items() if name in config} | without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--families", nargs="+", choices=CONFIGS, default=tuple(CONFIGS), metavar="NAME")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.families:
            source = random_model.write(Path(folder) / kind.replace(" ", "-"), wider(kind))
            for name in args.types:
                file = source.with_name(f"{source.name}-{name}.gguf")
                compress_request(CompressionRequest(source, file, recipe=name))
                found[f"{kind} {name}"] = beside(file, args.llamacpp)
    print(json.dumps(found))


def beside(file: Path, python: Path) -> dict[str, float]:
    """Figures of llama.cpp beside exact rows on a file whose vocabulary has no words."""
    model = opening.load(file, torch.float32, None, dispatch.store("exact"))
    numbers = torch.Generator().manual_seed(0)
    texts = torch.randint(model.config.vocab_size, (TEXTS, LENGTH), generator=numbers)
    ours = torch.cat([rows for text in texts for rows in decoder_logits(model)(text, 0)])
    next_ids = texts.roll(-1, 1).flatten()
    as_it_comes = compare(ours, llama_cpp(file, texts.tolist(), python=python), next_ids)
    plain = llama_cpp(as_f32(file, python=python), texts.tolist(), "--exact-attention", python=python)
    kl = as_it_comes.kl
    return {
        "kl_mean": kl.mean().item(),
        "kl_max": kl.max().item(),
        "top1": as_it_comes.agree.double().mean().item(),
        "as_f32": compare(ours, plain, next_ids).kl.max().item(),
    }


if __name__ == "__main__":
    main()
