"""What llama.cpp's quantize makes of a GGUF file. Runs in llama.cpp's environment.

    .venv-llamacpp/bin/python bench/peers/llama_quantize.py SOURCE.gguf OUT.gguf --type 15 [--imatrix FILE.gguf]

The library's own function, which is all that the program of that name calls; `--type` is its number of a mix.
"""

from __future__ import annotations

import argparse
import ctypes

import gguf
import llama_cpp
import numpy as np


def importances(path: str) -> dict[str, np.ndarray]:
    """Means of squares by tensor, as llama-quantize computes them of the newer form."""
    tensors = {each.name: np.asarray(each.data, np.float32) for each in gguf.GGUFReader(path).tensors}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    return {
        name: np.ascontiguousarray((tensors[f"{name}.in_sum2"] / tensors[f"{name}.counts"]).ravel()) for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--type", type=int, required=True)
    parser.add_argument("--imatrix")
    args = parser.parse_args()
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 1, args.type
    params.allow_requantize = args.type == 0  # to float32 nothing is rounded again
    known = importances(args.imatrix) if args.imatrix else {}
    entries = (llama_cpp.llama_model_imatrix_data * (len(known) + 1))()  # the last, without a name, ends them
    for entry, (name, values) in zip(entries, known.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if known:
        params.imatrix = entries
    status = llama_cpp.llama_model_quantize(args.source.encode(), args.out.encode(), ctypes.byref(params))
    if status:
        raise SystemExit(f"llama_model_quantize gave {status}")


if __name__ == "__main__":
    main()
