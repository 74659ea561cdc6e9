"""llama.cpp's logits of a GGUF file. Runs in llama.cpp's environment.

    .venv-llamacpp/bin/python bench/peers/llama_logits.py FILE.gguf WINDOWS.json OUT.npy [options]

WINDOWS.json holds lists of token ids, each computed by itself in one call; OUT.npy the logits of all their positions,
one list's after another's, float32 [N, vocab]. As it comes, llama.cpp keeps keys and values in fp16 and computes
attention in one pass that reads no others; `--exact-attention` keeps float32 and computes scores, softmax and sum one
by one. As it comes, it also lays weights out anew for the machine's best instructions; `--plain-kernels` has it read
them as stored.

`--products OUT.npz` writes what met in each product with a matrix of the file, in the first window: under the matrix's
name the rows that went in, [T, I], and under `name=` the products, [T, O]; both float32, as the graph holds them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

F32, OFF = 0, 0  # ggml's number of the type, llama.cpp's of "no flash attention"


class Tensor(ctypes.Structure):
    """ggml_tensor, for which the bindings have no name."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


class Products:
    """Sees the nodes of a graph as they are computed, and copies the rows and the results of products with weights."""

    def __init__(self) -> None:
        folder = Path(lib.__file__).parent / "lib"
        self._op_name = ctypes.CDLL(str(folder / "libggml-base.so")).ggml_op_name
        self._op_name.restype = ctypes.c_char_p
        self.seen: dict[str, Any] = {}
        self.open = True
        self.callback = lib.ggml_backend_sched_eval_callback(self._see)  # kept: the library calls it

    def _see(self, node: int, asks: bool, _: ctypes.c_void_p) -> bool:
        tensor = ctypes.cast(node, ctypes.POINTER(Tensor)).contents
        if not self.open or self._op_name(tensor.op) != b"MUL_MAT":
            return not asks  # do not show; go on
        name = tensor.src[0].contents.name.decode()
        if name.endswith(".weight"):
            if not asks:
                self.seen[name] = values(tensor.src[1].contents)
                self.seen[f"{name}="] = values(tensor)
            return True
        return not asks


def values(tensor: Tensor) -> np.ndarray:
    """A copy of a float32 matrix in the machine's memory."""
    columns, rows = tensor.ne[0], tensor.ne[1]
    assert (tensor.type, *tensor.nb[:2], *tensor.ne[2:]) == (F32, 4, 4 * columns, 1, 1)
    return np.ctypeslib.as_array(ctypes.cast(tensor.data, ctypes.POINTER(ctypes.c_float)), (rows, columns)).copy()


@lib.llama_log_callback
def quiet(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    pass


def load(file: str, plain_kernels: bool) -> Any:
    """Load a model, its weights as they are stored where `plain_kernels` says so."""
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    how = lib.llama_model_default_params()
    how.use_extra_bufts = not plain_kernels
    model = lib.llama_model_load_from_file(file.encode(), how)
    if not model:
        raise SystemExit(f"llama.cpp could not load {file}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("windows", type=Path)
    parser.add_argument("out")
    parser.add_argument("--exact-attention", action="store_true")
    parser.add_argument("--plain-kernels", action="store_true")
    parser.add_argument("--products")
    args = parser.parse_args()
    windows: list[list[int]] = json.loads(args.windows.read_text())
    longest = max(map(len, windows))
    model = load(args.model, args.plain_kernels)
    params = lib.llama_context_default_params()
    params.n_ctx = -(-longest // 256) * 256
    params.n_batch = params.n_ubatch = longest
    params.n_threads = params.n_threads_batch = 1
    if args.exact_attention:
        params.type_k = params.type_v = F32
        params.flash_attn_type = OFF
    products = Products()
    if args.products:
        params.cb_eval = products.callback
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp could not make a context")
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    out = np.lib.format.open_memmap(args.out, "w+", np.float32, (sum(map(len, windows)), vocab))
    batch, at = lib.llama_batch_init(longest, 0, 1), 0
    for ids in windows:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        status = lib.llama_decode(context, batch)
        if status:
            raise SystemExit(f"llama_decode returned {status}")
        out[at : at + len(ids)] = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(ids), vocab))
        at += len(ids)
        products.open = False
    out.flush()
    if args.products:
        np.savez(args.products, **products.seen)


if __name__ == "__main__":
    main()
