"""Seconds to encode one image: our towers beside OpenVINO's, of the same shapes and random weights, in one run.

    PYTHONPATH=src python bench/towers.py --openvino .venv-openvino/bin/python [--towers siglip-512 clip-336]
        [--precisions f32 bf16 int8] [--threads 1] [--rounds 9]

siglip-512 is SigLIP base of patches of 16 pixels, clip-336 the 23 layers of CLIP large that LLaVA-1.5 runs. Both sides
compute alike: float32 products, or 8-bit weights and activations (`w8a8` here, NNCF's there). Images take turns, one
here and one there, and `ratio` is the median of their seconds over ours, pair by pair, with its quartiles. Ours
includes the pixels' normalization and a projector of 768 columns, which theirs has not. `bf16` is bfloat16 throughout:
it is measured where a processor has tiles for it (AMX), for elsewhere attar's towers compute in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from images import RandomWeights, image

from attar.compression.solvers.rounding import rtn
from attar.formats.scheme import Scheme
from attar.kernels import dispatch, tiles
from attar.kernels.operands import Linear
from attar.model.vision import assembly, tensors
from attar.model.vision.config import VisionConfig, VisionNames
from attar.model.vision.model import VisionModel

CHILD = Path(__file__).resolve().parent / "engines" / "run_openvino_tower.py"
TOWERS: dict[str, dict[str, Any]] = {
    "siglip-512": {
        "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12,
        "patch_size": 16, "image_size": 512, "hidden_act": "gelu_pytorch_tanh",
    },
    "clip-336": {
        "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 23,
        "patch_size": 14, "image_size": 336, "hidden_act": "quick_gelu",
    },
}  # fmt: skip
OUT = 768  # columns of rows: the embedded model's and more


class Quantized(RandomWeights):
    """Random weights whose linears that may be quantized are w8a8."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.config = config

    def packed(self, module: str) -> bool:
        return module.removeprefix("t.") in {name for _, name, _ in tensors.linears(self.config)}

    def linear(self, module: str) -> Linear:
        return Linear(module, rtn.solve(self.read(f"{module}.weight"), Scheme.parse("w8a8")))

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        kind, shape = super().shape(name)
        return (assembly.PACKED if self.packed(name.removesuffix(".weight")) else kind), shape


def tower(name: str, precision: str) -> VisionModel:
    own, clip = TOWERS[name], name.startswith("clip")
    config = VisionConfig(
        hidden=own["hidden_size"], heads=own["num_attention_heads"], intermediate=own["intermediate_size"],
        layers=own["num_hidden_layers"], patch=own["patch_size"], image_size=own["image_size"], out=OUT,
        connector="mlp", factor=1, image_token=5, class_token=clip, patch_bias=not clip, post_norm=not clip,
        activation="quick_gelu" if clip else "gelu_tanh", names=VisionNames(("t.",), ("t.",)),
    )  # fmt: skip
    if precision == "bf16":
        return assembly.build(config, RandomWeights(config), torch.bfloat16, rows_dtype=torch.float32)
    weights = Quantized(config) if precision == "int8" else RandomWeights(config)
    return assembly.build(config, weights, torch.float32, dispatch.store("exact"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openvino", type=Path, required=True, metavar="PYTHON", help="of its environment")
    parser.add_argument("--towers", nargs="+", choices=TOWERS, default=tuple(TOWERS))
    known = ("f32", *(("bf16",) if tiles.faster() else ()), "int8")
    parser.add_argument("--precisions", nargs="+", choices=known, default=known)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.towers:
        for precision in args.precisions:
            print(json.dumps({"tower": name, "precision": precision, **beside(name, precision, args)}), flush=True)


def beside(name: str, precision: str, args: argparse.Namespace) -> dict[str, object]:
    model = tower(name, precision)
    side = model.config.image_size
    own = image(1, side, model.config.side**2)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(TOWERS[name]))
        said = Path(folder) / "stderr"
        with said.open("w") as stderr:
            child = subprocess.Popen(
                [args.openvino, CHILD, name.partition("-")[0], config, "--precision", precision, "--threads",
                 str(args.threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            head = next((line for line in child.stdout if line.startswith('{"version"')), None)
            if head is None:
                raise SystemExit(said.read_text()[-2000:])
            model.encode(own)
            ours, theirs = list[float](), list[float]()
            for _ in range(args.rounds):
                began = time.perf_counter()
                model.encode(own)
                ours.append(time.perf_counter() - began)
                child.stdin.write("\n")
                child.stdin.flush()
                theirs.append(float(child.stdout.readline()))
        finally:
            child.kill()
            child.wait()
    low, middle, high = statistics.quantiles([b / a for a, b in zip(ours, theirs, strict=True)], n=4)
    return {
        "ours_s": round(statistics.median(ours), 3), "theirs_s": round(statistics.median(theirs), 3),
        "ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)], "rounds": args.rounds,
        "threads": args.threads, "openvino": json.loads(head),
    }  # fmt: skip


if __name__ == "__main__":
    main()
