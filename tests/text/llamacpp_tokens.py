"""Token ids by llama.cpp, for test_gguf.py. Runs in llama.cpp's environment; needs gguf and llama-cpp-python only.

Standard input is a JSON list of cases {metadata, texts}. Each metadata is written as a GGUF file without tensors. The
answer is a JSON list of {ids: for each text, with BOS and special tokens; text: of those ids; ends: tokens that end a
text}, or {error} where llama.cpp refuses the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from typing import Any

import gguf
import llama_cpp as lib

TYPES = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32"}


@lib.llama_log_callback
def silent(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """llama.cpp is talkative."""


def write(path: str, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType[TYPES[type(value)]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def answer(path: str, texts: list[str]) -> dict[str, Any]:
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        return {"error": "llama.cpp refuses the file"}
    vocab = lib.llama_model_get_vocab(model)
    ids = [tokenize(vocab, text.encode()) for text in texts]
    shown = [detokenize(vocab, each) for each in ids]
    ends = [i for i in range(lib.llama_vocab_n_tokens(vocab)) if lib.llama_vocab_is_eog(vocab, i)]
    lib.llama_model_free(model)
    return {"ids": ids, "text": shown, "ends": ends}


def tokenize(vocab: Any, text: bytes) -> list[int]:
    room = (lib.llama_token * (4 * len(text) + 8))()
    count = lib.llama_tokenize(vocab, text, len(text), room, len(room), True, True)
    return list(room[:count])


def detokenize(vocab: Any, ids: list[int]) -> str:
    room = ctypes.create_string_buffer(64 * len(ids) + 64)
    count = lib.llama_detokenize(vocab, (lib.llama_token * len(ids))(*ids), len(ids), room, len(room), True, False)
    return room.raw[:count].decode(errors="replace")


def main() -> None:
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "vocab.gguf")
        for case in json.load(sys.stdin):
            write(path, case["metadata"])
            answers.append(answer(path, case["texts"]))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
