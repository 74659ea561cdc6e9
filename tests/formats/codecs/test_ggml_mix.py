"""Which type each matrix gets, against what llama.cpp's quantize makes of a model with as many layers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.writer import atomic_gguf
from attar.formats.codecs import ggml_mix
from attar.formats.codecs.ggml import TYPES
from attar.formats.codecs.ggml_mix import MIXES, About
from tests.conftest import ROOT

LAYERS = 17  # so that an eighth and a sixteenth of them are not none
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

QUANTIZE = """
import ctypes, json, sys
import numpy as np
import llama_cpp as l
source, out, jobs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
for name, file_type, names, columns in jobs:
    params = l.llama_model_quantize_default_params()
    params.nthread, params.ftype = 1, file_type
    rows = [np.ones(each, np.float32) for each in columns]
    entries = (l.llama_model_imatrix_data * (len(names) + 1))()
    for entry, key, row in zip(entries, names, rows):
        entry.name, entry.size = key.encode(), row.size
        entry.data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if names:
        params.imatrix = entries
    assert l.llama_model_quantize(source.encode(), f"{out}/{name}".encode(), ctypes.byref(params)) == 0
"""


def model(path: Path, heads: int, kv_heads: int, wide: int, tied: bool) -> dict[str, tuple[int, int]]:
    """A file of zeros, and the shapes of its matrices."""
    hidden, vocab = 256, 32
    columns = {"ffn_down": wide}
    shared = hidden * kv_heads // heads
    rows = {"attn_k": shared, "attn_v": shared, "ffn_gate": wide, "ffn_up": wide}
    shapes = {"token_embd.weight": (vocab, hidden)} | ({} if tied else {"output.weight": (vocab, hidden)})
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{part}.weight": (rows.get(part, hidden), columns.get(part, hidden)) for part in PARTS}
    norms = ["output_norm", *(f"blk.{i}.{norm}" for i in range(LAYERS) for norm in ("attn_norm", "ffn_norm"))]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": hidden,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": wide,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": vocab,
        "tokenizer.ggml.model": "no_vocab",
    }
    layout: dict[str, Any] = {name: (TYPES["F16"], shape) for name, shape in shapes.items()}
    layout |= {f"{norm}.weight": (TYPES["F32"], (hidden,)) for norm in norms}
    with atomic_gguf(path, metadata, layout) as writer:
        for name, (kind, shape) in layout.items():
            writer.write(name, torch.zeros((*shape[:-1], kind.row_bytes(shape[-1])), dtype=torch.uint8))
    return shapes


@pytest.mark.parametrize(
    ("heads", "kv_heads", "wide", "tied", "calibrated"), [(8, 2, 512, False, False), (8, 4, 320, True, True)]
)
def test_every_matrix_has_the_type_that_llama_cpp_gives_it(
    heads: int, kv_heads: int, wide: int, tied: bool, calibrated: bool, tmp_path: Path
) -> None:
    """The second has rows of 320 columns, which blocks of 256 do not divide."""
    python = ROOT / ".venv-llamacpp" / "bin" / "python"
    if not python.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    shapes = model(tmp_path / "source.gguf", heads, kv_heads, wide, tied)
    names = list(shapes) if calibrated else []
    mixes = [mix for mix in MIXES.values() if calibrated or mix.name != "q2_k_s"]  # refused there
    jobs = [(mix.name, mix.file_type, names, [shapes[name][1] for name in names]) for mix in mixes]
    done = subprocess.run(
        [python, "-c", QUANTIZE, str(tmp_path / "source.gguf"), str(tmp_path), json.dumps(jobs)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    about = About(LAYERS, heads, kv_heads, tied, calibrated)
    for mix in mixes:
        file = GgufFile(tmp_path / mix.name)
        assert file.metadata["general.file_type"] == mix.file_type
        theirs = {name: file.info(name).kind.name for name in shapes}
        ours = {}
        for name, (_, columns) in shapes.items():
            *_, layer, matrix, _ = f"0.{name}".split(".")
            kind, wanted = ggml_mix.choose(mix, matrix, int(layer), columns, about)
            ours[name] = kind.name
            assert (wanted is not None) <= (columns == 320)
        assert ours == theirs, mix.name


def test_a_type_that_does_not_fit_is_told() -> None:
    about = About(2, 4, 4, False, False)
    kind, wanted = ggml_mix.choose(MIXES["q4_k_m"], "ffn_up", 0, 96, about)
    assert (kind.name, wanted) == ("Q5_0", "Q4_K")
    assert ggml_mix.choose(MIXES["q4_0"], "ffn_up", 0, 80, about) == (TYPES["F16"], "Q4_0")
    assert ggml_mix.choose(MIXES["bf16"], "ffn_up", 0, 80, about) == (TYPES["BF16"], None)


def test_names_are_those_of_llama_cpp_in_either_case() -> None:
    assert ggml_mix.find("Q4_K_M") is ggml_mix.find("q4_k") is MIXES["q4_k_m"]
    assert ggml_mix.find("w4g128") is None


@pytest.mark.parametrize(
    ("mix", "experts", "matrix", "layer", "kind"),
    [
        ("q4_k_m", 8, "attn_v", 5, "Q8_0"),
        ("q4_k_m", 8, "attn_k", 5, "Q8_0"),
        ("q4_0", 8, "attn_k", 5, "Q8_0"),
        ("q4_k_m", 8, "attn_output", 5, "Q5_K"),
        ("q3_k_l", 8, "attn_output", 5, "Q3_K"),
        ("q5_k_m", 8, "attn_output", 5, "Q5_K"),
        ("q6_k", 8, "attn_output", 5, "Q6_K"),
        ("q4_k_m", 60, "attn_k", 5, "Q4_K"),
        ("q4_k_m", 60, "ffn_down_exps", 0, "Q6_K"),
        ("q4_k_m", 60, "ffn_down_shexp", 0, "Q6_K"),
        ("q4_k_m", 60, "ffn_down_exps", 3, "Q4_K"),
        ("q4_k_m", 60, "ffn_gate_exps", 0, "Q4_K"),
        ("q4_k_m", 0, "attn_qkv", 0, "Q6_K"),
        ("q4_k_m", 0, "attn_qkv", 3, "Q4_K"),
        ("q3_k_m", 0, "attn_qkv", 0, "Q5_K"),
    ],
)
def test_experts_and_fused_projections_have_the_types_of_llama_cpp(
    mix: str, experts: int, matrix: str, layer: int, kind: str
) -> None:
    """By the rules of llama_tensor_get_type_impl, where q, k and v in one are a value projection."""
    about = About(16, 8, 8, False, False, experts)
    assert ggml_mix.choose(MIXES[mix], matrix, layer, 256, about)[0].name == kind
