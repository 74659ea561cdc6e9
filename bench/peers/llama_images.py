"""llama.cpp's rows of images, by its vision library. Runs in llama.cpp's environment.

    .venv-llamacpp/bin/python bench/peers/llama_images.py FILE.gguf MMPROJ.gguf IMAGES.npz OUT.npz

IMAGES.npz holds images, uint8 [height, width, 3]; OUT.npz under the same names the rows that the language model would
read for each, float32 [rows, hidden], of all its tiles in the order of the prompt. Attention is computed in one pass of
scores, softmax and sum.
"""

from __future__ import annotations

import argparse
import ctypes
from typing import Any

import llama_cpp as lib
import numpy as np
from llama_cpp import mtmd_cpp as vision
from llama_logits import OFF, load


def rows_of(model: Any, context: Any, image: np.ndarray) -> np.ndarray:
    """Cut an image as llama.cpp does, and encode its parts one by one."""
    pixels = np.ascontiguousarray(image)
    high, wide, _ = pixels.shape
    bitmap = vision.mtmd_bitmap_init(wide, high, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
    marker = vision.mtmd_default_marker()
    text = vision.mtmd_input_text()
    text.text, text.text_len, text.parse_special = marker, len(marker), True
    chunks = vision.mtmd_input_chunks_init()
    status = vision.mtmd_tokenize(context, chunks, ctypes.byref(text), (vision.mtmd_bitmap_p_ctypes * 1)(bitmap), 1)
    if status:
        raise SystemExit(f"mtmd_tokenize returned {status}")
    hidden, found = lib.llama_model_n_embd_inp(model), []
    for i in range(vision.mtmd_input_chunks_size(chunks)):
        chunk = vision.mtmd_input_chunks_get(chunks, i)
        if vision.mtmd_input_chunk_get_type(chunk) != vision.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            continue
        status = vision.mtmd_encode_chunk(context, chunk)
        if status:
            raise SystemExit(f"mtmd_encode_chunk returned {status}")
        shape = (vision.mtmd_input_chunk_get_n_tokens(chunk), hidden)
        found.append(np.ctypeslib.as_array(vision.mtmd_get_output_embd(context), shape).copy())
    vision.mtmd_input_chunks_free(chunks)
    vision.mtmd_bitmap_free(bitmap)
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "mmproj", "images", "out"):
        parser.add_argument(name)
    args = parser.parse_args()
    model = load(args.model, plain_kernels=True)
    params = vision.mtmd_context_params_default()
    params.use_gpu, params.n_threads, params.warmup, params.flash_attn_type = False, 1, False, OFF
    context = vision.mtmd_init_from_file(args.mmproj.encode(), model, params)
    if not context:
        raise SystemExit(f"llama.cpp could not load {args.mmproj}")
    with np.load(args.images) as images:
        np.savez(args.out, **{name: rows_of(model, context, images[name]) for name in images.files})


if __name__ == "__main__":
    main()
