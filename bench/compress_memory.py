"""Peak memory of `attar compress` on random weights in the Llama-3.2-1B shape, beside the bound it promises.

    python bench/compress_memory.py [RECIPE ...] [--layers 2] [--samples 8] [--length 512] [--calib-memory 64MiB]

The bound, above what `import torch` takes: twice the largest decoder block in bf16; for GPTQ 2.5 x 4 I^2 bytes for the
widest linear of I inputs (its Hessian and factor); and the calibration activations, which are the hidden states that go
from block to block and those inside a block, at most `--calib-memory`. Embeddings are streamed. attar's own modules and
the pages of torch's code that are touched count as everything else does: only `import torch` is taken off.

The peak is the kernel's own figure (VmHWM) for a child process that does nothing else. Two layers show the peak of
sixteen: one block is in memory at a time. 4096 calibration tokens show the peak of more, as AWQ searches on no more
than these, and hidden states beyond the limit lie on disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from attar.checkpoints.writer import ShardWriter, plan_files
from attar.cli.terminal import parse_bytes
from attar.compression.calibration.hidden_states import IN_A_BLOCK
from attar.compression.recipe.methods import Gptq, Rtn
from attar.compression.recipe.recipe_file import load_recipe
from attar.formats.scheme import Part

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCAB = 2048, 32, 8, 64, 8192, 128256
BLOCK = 2 * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * FEED_FORWARD)
RECIPES = ("rtn-w4g128", "awq-w4g128", "gptq-w4g128")

CHILD = f"""
import sys, torch, attar
model, out, recipe, samples, length, memory = sys.argv[1:]
g = torch.Generator().manual_seed(0)
ids = torch.randint(0, {VOCAB}, (int(samples), int(length)), generator=g).tolist()
asked = attar.CompressionRequest(model, out, recipe=recipe, calibration=ids, calib_memory=int(memory))
print(attar.compress_request(asked).seconds)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--calib-memory", type=parse_bytes, default="64MiB")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, args.layers)
        floor, _ = peak("import torch")
        print(f"{'import torch':<18}{floor / 1e6:>8.1f} MB\n")
        print(
            f"{'':<18}{'2 blocks':>10}{'Hessian':>10}{'activations':>13}{'bound':>10}{'peak':>10}{'peak / bound':>14}"
        )
        for name in args.recipes:
            amounts = (args.samples, args.length, args.calib_memory)
            total, seconds = peak(CHILD, model, Path(folder) / name, name, *amounts)
            passes = load_recipe(name).passes
            hessian = int(2.5 * 4 * FEED_FORWARD**2) if any(isinstance(each, Gptq) for each in passes) else 0
            states = 2 * 4 * args.samples * args.length * HIDDEN
            activations = 0 if isinstance(passes[0], Rtn) else min(args.calib_memory, states + IN_A_BLOCK)
            bound = 2 * BLOCK + hessian + activations
            row = [2 * BLOCK, hessian, activations, bound, total - floor]
            print(
                f"{name:<18}"
                + "".join(f"{value / 1e6:>{width}.1f}" for value, width in zip(row, (10, 10, 13, 10, 10), strict=True))
                + f"{(total - floor) / bound:>14.2f}"
            )
            results.append(
                {
                    "recipe": name,
                    "bound": bound,
                    "peak_above_torch": total - floor,
                    "ratio": round((total - floor) / bound, 3),
                    "seconds": round(float(seconds), 1),
                }
            )
    print(json.dumps({"floor": floor, "layers": args.layers, "calib_memory": args.calib_memory, "runs": results}))
    if any(each["ratio"] > 1 for each in results):
        raise SystemExit("the bound does not hold")


def peak(script: str, *arguments: object) -> tuple[int, str]:
    """Peak resident bytes of a child that runs `script`, and the last word that this printed.

    The child reads its own high-water mark: what `wait4` reports would include the memory of us, who forked it.
    """
    script += "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *printed, mark = done.stdout.split()
    return int(mark) * 1024, printed[-1] if printed else ""


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
