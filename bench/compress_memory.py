"""Peak memory of `attar compress` on random weights in the Llama-3.2-1B shape, beside the bound it promises.

    python bench/compress_memory.py [--recipe gptq-w4g128] [--layers 2] [--json]

The bound: what `import torch` takes, plus twice the largest decoder block in bf16, plus 2.5 x 4 I^2 bytes for the
widest linear of I inputs (its Hessian and factor), plus the calibration activations that are held in memory. Embeddings
are streamed. Peak resident memory is the kernel's own figure for a child process that does nothing else; a second child
that only imports torch gives the floor. Two layers show the same peak as sixteen: one block is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from attar.checkpoints.writer import ShardWriter, plan_files
from attar.formats.scheme import Part

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCAB = 2048, 32, 8, 64, 8192, 128256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="gptq-w4g128")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calib-memory", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, args.layers)
        floor, _ = peak("import torch")
        script = (
            "import torch, attar\n"
            f"g = torch.Generator().manual_seed(0)\n"
            f"ids = torch.randint(0, {VOCAB}, ({args.samples}, {args.length}), generator=g).tolist()\n"
            f"done = attar.compress({str(model)!r}, {str(Path(folder) / 'out')!r}, recipe={args.recipe!r},"
            f" calibration=ids, calib_memory={args.calib_memory})\n"
            "print(done.seconds)\n"
        )
        total, seconds = peak(script)
    block = 2 * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * FEED_FORWARD)
    widest = 2.5 * 4 * FEED_FORWARD**2 if "gptq" in args.recipe else 0
    states = min(args.calib_memory, 2 * 4 * args.samples * args.length * HIDDEN)
    bound = 2 * block + widest + states
    rows = [
        ("import torch", floor),
        ("2 x largest block in bf16", 2 * block),
        ("Hessian and factor, 2.5 x 4 I^2", widest),
        ("calibration activations held", states),
        ("bound above import torch", bound),
        ("peak above import torch", total - floor),
    ]
    for name, value in rows:
        print(f"{name:<34}{value / 1e6:>10.1f} MB")
    print(f"{'peak / bound':<34}{(total - floor) / bound:>10.2f}")
    result = {"recipe": args.recipe, "floor": floor, "bound": bound, "peak_above_torch": total - floor}
    print(json.dumps(result | {"ratio": (total - floor) / bound, "seconds": float(seconds)}))


def peak(script: str) -> tuple[int, str]:
    """Peak resident bytes and the last line printed of a child that runs `script`."""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = child.stdout.read().strip().splitlines()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"the measured process failed with status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024, printed[-1] if printed else ""


def write_model(folder: Path, layers: int) -> None:
    """Random bf16 weights in the Llama-3.2-1B shape, one tensor in memory at a time."""
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(layers):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (HIDDEN,)
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", FEED_FORWARD, HIDDEN),
            ("mlp.up_proj", FEED_FORWARD, HIDDEN),
            ("mlp.down_proj", HIDDEN, FEED_FORWARD),
        ):
            shapes[f"{at}.{name}.weight"] = (rows, columns)
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder, plan_files({n: Part("bfloat16", s) for n, s in shapes.items()})) as writer:
        for name, shape in shapes.items():
            if len(shape) == 1:
                writer.write(name, torch.ones(shape, dtype=torch.bfloat16))
            else:
                writer.write(name, (torch.randn(shape, generator=generator) / shape[1] ** 0.5).bfloat16())
        writer.finish()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "intermediate_size": FEED_FORWARD, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
