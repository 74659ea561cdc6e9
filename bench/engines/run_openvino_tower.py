"""A vision tower of random weights in OpenVINO. Runs in OpenVINO's environment, and is driven by `bench/towers.py`.

    .venv-openvino/bin/python bench/engines/run_openvino_tower.py TOWER CONFIG.json --precision f32 [--threads 1]

TOWER is siglip or clip; CONFIG.json holds its settings for transformers. For each line on stdin one image is encoded,
and the seconds are printed. `int8` quantizes weights and activations by NNCF, calibrated on noise; what is not
quantized computes in float32, as everything does with `f32`. `bf16` is for machines that have it. First the program
prints a line about its version and the kernels of the products.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import openvino
import torch
import transformers


def model(tower: str, config: dict[str, object], precision: str) -> openvino.Model:
    """The tower up to its last hidden state."""
    names = {"siglip": "SiglipVision", "clip": "CLIPVision"}
    own = getattr(transformers, f"{names[tower]}Config")(**config, attn_implementation="sdpa")
    torch.manual_seed(0)
    whole = getattr(transformers, f"{names[tower]}Model")(own).eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = whole

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.whole(pixel_values=pixels).last_hidden_state

    shape = (1, 3, own.image_size, own.image_size)
    found = openvino.convert_model(Hidden(), example_input=torch.zeros(shape), input=[shape])
    if precision != "int8":
        return found
    import nncf

    noise = [np.random.default_rng(each).standard_normal(shape, np.float32) for each in range(8)]
    return nncf.quantize(found, nncf.Dataset(noise), model_type=nncf.ModelType.TRANSFORMER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tower", choices=("siglip", "clip"))
    parser.add_argument("config", type=Path)
    parser.add_argument("--precision", choices=("f32", "bf16", "int8"), required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    hint = "bf16" if args.precision == "bf16" else "f32"
    properties = {"INFERENCE_NUM_THREADS": args.threads, "INFERENCE_PRECISION_HINT": hint}
    compiled = openvino.Core().compile_model(model(args.tower, config, args.precision), "CPU", properties)
    request = compiled.create_infer_request()
    pixels = np.random.default_rng(0).standard_normal((1, 3, config["image_size"], config["image_size"]), np.float32)
    request.infer([pixels])
    facts = (op.get_rt_info() for op in compiled.get_runtime_model().get_ops())
    kinds = (fact for fact in facts if fact["layerType"].astype(str) in ("FullyConnected", "MatMul", "Convolution"))
    kernels = Counter(fact["primitiveType"].astype(str) for fact in kinds)
    print(json.dumps({"version": openvino.__version__, "kernels": kernels}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        request.infer([pixels])
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
