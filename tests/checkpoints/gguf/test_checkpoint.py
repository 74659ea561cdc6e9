"""Models in GGUF files: the same model from a folder, and llama.cpp, as oracles."""

from __future__ import annotations

import difflib
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoints import vocabulary
from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.gguf import config as gguf_config
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.names import file_name, place
from attar.checkpoints.gguf.values import Array, Typed
from attar.checkpoints.gguf.writer import atomic_gguf
from attar.checkpoints.inspect import inspect
from attar.checkpoints.receipts import receipt, verify
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.sources.opening import stored
from attar.checkpoints.strict_io import CheckpointError
from attar.formats.codecs import ggml_blocks, ggml_round, ggml_search
from attar.formats.codecs.ggml import TYPES
from attar.formats.packed import PackedTensor
from attar.kernels import dispatch
from attar.kernels.native.rows import Table
from attar.model.config import Names, Rope
from attar.model.decoder import Decoder
from attar.model.rope import frequencies
from attar.plan import costs
from attar.text import gguf as text_gguf
from attar.text import merges
from tests.checkpoints.conftest import make_probes
from tests.errors import user_error

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDE, VOCAB = 3, 128, 4, 2, 256, 288
HEAD = HIDDEN // HEADS
# Nats. Beside quantized weights it rounds activations to int8, which costs a random model about 1e-3; we do not here.
KL_TO_LLAMA_CPP = {
    "F32": 1e-6,
    **dict.fromkeys(("Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), 4e-3),
}
ROOT = Path(__file__).resolve().parents[3]

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": WIDE,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD,
    "llama.vocab_size": VOCAB,
    "tokenizer.ggml.model": "no_vocab",
}


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as `llama` files have them: row 2j + i of a head is row j of half i."""
    order = [
        head * HEAD + half * HEAD // 2 + pair for head in range(heads) for pair in range(HEAD // 2) for half in (0, 1)
    ]
    return weight[order]


PARTS = {
    "attn_q": ("self_attn.q_proj", HIDDEN, HIDDEN),
    "attn_k": ("self_attn.k_proj", KV_HEADS * HEAD, HIDDEN),
    "attn_v": ("self_attn.v_proj", KV_HEADS * HEAD, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HIDDEN),
    "ffn_gate": ("mlp.gate_proj", WIDE, HIDDEN),
    "ffn_up": ("mlp.up_proj", WIDE, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, WIDE),
}


def make_source(folder: Path, layers: int = LAYERS) -> Path:
    """A random Llama as a Hugging Face folder, float32 of 8 significant bits, which BF16 holds exactly."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5 + (1.0 if len(shape) == 1 else 0.0)
        return values.bfloat16().float()

    tensors = {"model.embed_tokens.weight": random(VOCAB, HIDDEN) * 8, "lm_head.weight": random(VOCAB, HIDDEN) * 4}
    tensors["model.norm.weight"] = random(HIDDEN)
    for i in range(layers):
        at = f"model.layers.{i}"
        tensors[f"{at}.input_layernorm.weight"] = random(HIDDEN)
        tensors[f"{at}.post_attention_layernorm.weight"] = random(HIDDEN)
        tensors |= {f"{at}.{name}.weight": random(rows, columns) for name, rows, columns in PARTS.values()}
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": WIDE,
        "rms_norm_eps": np.float32(1e-5).item(), "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_in_files(source: Path) -> dict[str, torch.Tensor]:
    """The tensors of `source` under the names and in the order of a `llama` file."""
    stored = load_file(source / "model.safetensors")
    found = {"token_embd.weight": stored["model.embed_tokens.weight"], "output.weight": stored["lm_head.weight"]}
    found["output_norm.weight"] = stored["model.norm.weight"]
    for i in range(sum(name.endswith("input_layernorm.weight") for name in stored)):
        at, to = f"model.layers.{i}", f"blk.{i}"
        found[f"{to}.attn_norm.weight"] = stored[f"{at}.input_layernorm.weight"]
        found[f"{to}.ffn_norm.weight"] = stored[f"{at}.post_attention_layernorm.weight"]
        found |= {f"{to}.{part}.weight": stored[f"{at}.{name}.weight"] for part, (name, *_) in PARTS.items()}
        for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            found[f"{to}.{part}.weight"] = neighbours(found[f"{to}.{part}.weight"], heads)
    return found


def write_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    less: tuple[str, ...] = (),
) -> Path:
    """A GGUF file of these tensors whose matrices are of that type. A value of None removes a key; `more` are tensors
    (float32, or bytes with their type and shape); `less` are left out."""
    values = {name: value for name, value in {**METADATA, **(metadata or {})}.items() if value is not None}
    chosen = {name: tensor for name, tensor in {**tensors, **(more or {})}.items() if name not in less}
    raw, layout = {}, {}
    for name, tensor in chosen.items():
        if isinstance(tensor, tuple):
            raw[name], each, shape = tensor
        else:
            each, shape = TYPES[kind if tensor.ndim == 2 else "F32"], tuple(tensor.shape)
            raw[name] = ggml_round.encode(each, tensor)
        layout[name] = (each, shape)
    with atomic_gguf(path, values, layout, overwrite=True) as writer:
        for name in raw:
            writer.write(name, raw[name])
    return path


Write = Callable[..., Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def tensors(source: Path) -> dict[str, torch.Tensor]:
    return as_in_files(source)


@pytest.fixture
def write(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Write:
    """`write(kind, metadata={}, more={}, less=())`: `source` as a GGUF file."""
    return partial(write_file, tmp_path / "model.gguf", tensors)


def logits(decoder: Decoder) -> torch.Tensor:
    from attar.model.cache import ForwardBatch

    ids = torch.arange(5, 25) * 11 % VOCAB
    return decoder.forward(ids, ForwardBatch((len(ids),), len(ids), decoder.cache(len(ids))))


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_file_computes_what_its_folder_does(kind: str, source: Path, write: Write) -> None:
    ours = GgufCheckpoint.open(write(kind), torch.float32)
    theirs = hf.Checkpoint.open(source, torch.float32)
    assert ours.config.ropes == theirs.config.ropes
    assert torch.equal(
        logits(gguf_checkpoint.load(ours.file.path, torch.float32)), logits(hf.load(source, torch.float32))
    )
    assert ours.scheme_of("lm_head") is None
    assert ours.linear_shape("model.layers.0.mlp.down_proj") == (HIDDEN, WIDE)


@pytest.mark.parametrize(("kind", "scheme"), [("Q4_0", "w4g32"), ("Q5_0", "w5g32"), ("Q8_0", "w8g32")])
def test_types_that_a_scheme_represents_are_packed_with_the_same_values(kind: str, scheme: str, write: Write) -> None:
    checkpoint = GgufCheckpoint.open(write(kind), torch.float32)
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"):
        linear = checkpoint.linear(name)
        assert isinstance(linear.weight, PackedTensor)
        assert linear.weight.scheme.name == scheme
        assert checkpoint.scheme_of(name) == linear.weight.scheme
        assert torch.equal(linear.weight.dequantize(), checkpoint.tensor(f"{name}.weight"))
    assert checkpoint.kind_of("lm_head") is TYPES[kind]
    assert not checkpoint.has("lm_head.weight")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1", "Q5_1"])
def test_the_native_kernels_run_packed_files(kind: str, write: Write) -> None:
    from attar.kernels import dispatch

    store = dispatch.store("exact")
    if store is None:
        pytest.skip("no native kernels here")
    path = write(kind)
    native, reference = (gguf_checkpoint.load(path, torch.float32, store=each) for each in (store, None))
    assert not store.refused
    torch.testing.assert_close(logits(native), logits(reference), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "F16"])
def test_other_types_are_decoded(kind: str, write: Write) -> None:
    checkpoint = GgufCheckpoint.open(write(kind), torch.bfloat16)
    weight = checkpoint.linear("model.layers.0.mlp.up_proj").weight
    assert isinstance(weight, torch.Tensor)
    raw = checkpoint.file.read("blk.0.ffn_up.weight")
    assert torch.equal(weight, ggml_blocks.decode(TYPES[kind], raw).bfloat16())
    assert checkpoint.scheme_of("model.layers.0.mlp.up_proj") is None
    assert checkpoint.decoded_as("model.layers.0.mlp.up_proj") == "bfloat16"


def test_a_k_quant_is_decoded(write: Write) -> None:
    kind, generator = TYPES["Q4_K"], torch.Generator().manual_seed(0)
    raw = torch.randint(0, 60, (HIDDEN, kind.block_bytes), generator=generator, dtype=torch.uint8)
    path = write("Q4_0", more={"blk.0.ffn_down.weight": (raw, kind, (HIDDEN, WIDE))})
    checkpoint = GgufCheckpoint.open(path, torch.float32)
    weight = checkpoint.linear("model.layers.0.mlp.down_proj").weight
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, ggml_blocks.decode(kind, raw))
    assert checkpoint.kind_of("model.layers.0.mlp.down_proj") is kind
    assert checkpoint.scheme_of("model.layers.0.mlp.down_proj") is None
    assert checkpoint.decoded_as("model.layers.0.mlp.down_proj") == "float32"
    assert logits(gguf_checkpoint.load(path, torch.float32)).isfinite().all()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_a_model_is_tied_where_the_output_matrix_is_missing(kind: str, write: Write) -> None:
    path = write(kind, less=("output.weight",))
    checkpoint = GgufCheckpoint.open(path, torch.float32)
    assert checkpoint.config.tied
    decoder = gguf_checkpoint.load(path, torch.float32)
    assert decoder.head.weight is decoder.embedding.table
    assert checkpoint.kind_of("lm_head") is TYPES[kind]
    assert logits(decoder).isfinite().all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_an_embedding_of_its_own_stays_as_it_is_stored_for_kernels_that_read_it(kind: str, write: Write) -> None:
    store = dispatch.store()
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    path = write(kind)
    wanted = GgufCheckpoint.open(path, torch.float32).matrix("model.embed_tokens.weight")
    table = gguf_checkpoint.load(path, torch.float32, store=store).embedding
    ids = torch.arange(len(wanted))
    assert torch.equal(table.forward(ids, ids), wanted)
    assert isinstance(table.table, Table)
    config, storage = stored(path)
    source = table.table.source
    held = source.nbytes if isinstance(source, torch.Tensor) else source.read_bytes  # type: ignore[union-attr]
    assert isinstance(source, torch.Tensor) == (kind == "F16")
    assert costs.weight_bytes(config, storage).embedding == held


def test_sixteen_bit_matrices_stay_as_they_are_for_kernels_that_read_them(write: Write) -> None:
    checkpoint = GgufCheckpoint.open(write("BF16"), torch.float32, as_stored=True)
    assert checkpoint.matrix("lm_head.weight").dtype == torch.bfloat16
    assert checkpoint.tensor("lm_head.weight").dtype == torch.float32
    assert checkpoint.decoded_as("lm_head") == "bfloat16"
    assert GgufCheckpoint.open(write("BF16")).dtype == torch.bfloat16
    assert GgufCheckpoint.open(write("Q4_0")).dtype == torch.float32


# Other families, biases


def renamed(family: str) -> dict[str, Any]:
    mine: dict[str, Any] = {
        f"{family}{k.removeprefix('llama')}": v for k, v in METADATA.items() if k.startswith("llama")
    }
    return {**dict.fromkeys(k for k in METADATA if k.startswith("llama")), **mine, "general.architecture": family}


def test_qwen2_has_biases_and_rows_in_our_order(write: Write, tensors: dict[str, torch.Tensor]) -> None:
    sizes = {"q": HIDDEN, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
    biases = {f"blk.{i}.attn_{n}.bias": torch.randn(size) for i in range(LAYERS) for n, size in sizes.items()}
    checkpoint = GgufCheckpoint.open(write(metadata=renamed("qwen2"), more=biases), torch.float32)
    assert checkpoint.config.architecture == "Qwen2ForCausalLM"
    linear = checkpoint.linear("model.layers.1.self_attn.q_proj")
    assert isinstance(linear.weight, torch.Tensor)
    assert torch.equal(linear.weight, tensors["blk.1.attn_q.weight"])
    assert linear.bias is not None
    assert torch.equal(linear.bias, biases["blk.1.attn_q.bias"])
    with user_error("checkpoint_incomplete", "model.layers.0.self_attn.q_proj.bias"):
        GgufCheckpoint.open(write(metadata=renamed("qwen2")))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_biases_of_llama_files_are_in_the_order_of_their_rows(kind: str, write: Write) -> None:
    bias = torch.randn(HIDDEN)
    raw = ggml_round.encode(TYPES[kind], neighbours(bias, HEADS))
    path = write(more={"blk.0.attn_q.bias": (raw, TYPES[kind], (HIDDEN,))})
    found = GgufCheckpoint.open(path, torch.float32).linear("model.layers.0.self_attn.q_proj").bias
    assert found is not None
    assert torch.equal(neighbours(found, HEADS), ggml_blocks.decode(TYPES[kind], raw))


def test_qwen3_normalises_heads(write: Write) -> None:
    size = 64  # of heads: stated, not the hidden size over the heads
    more: dict[str, torch.Tensor] = {}
    for i in range(LAYERS):
        more[f"blk.{i}.attn_q.weight"] = torch.randn(HEADS * size, HIDDEN)
        more[f"blk.{i}.attn_k.weight"] = more[f"blk.{i}.attn_v.weight"] = torch.randn(KV_HEADS * size, HIDDEN)
        more[f"blk.{i}.attn_output.weight"] = torch.randn(HIDDEN, HEADS * size)
        more[f"blk.{i}.attn_q_norm.weight"] = more[f"blk.{i}.attn_k_norm.weight"] = torch.ones(size)
    lengths = {"qwen3.attention.key_length": size, "qwen3.attention.value_length": size}
    metadata = {**renamed("qwen3"), **lengths, "qwen3.rope.dimension_count": None}
    path = write(metadata=metadata, more=more)
    config = GgufCheckpoint.open(path).config
    assert config.qk_norm
    assert config.head_dim == size
    assert logits(gguf_checkpoint.load(path, torch.float32)).isfinite().all()


# The rope


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, Rope(10000.0, HEAD)),
        ({"llama.rope.freq_base": 500000.0}, Rope(500000.0, HEAD)),
        ({"llama.rope.freq_base": None}, Rope(10000.0, HEAD)),
        ({"llama.rope.scaling.type": "none"}, Rope(10000.0, HEAD)),
        ({"llama.rope.scale_linear": 4.0}, Rope(10000.0, HEAD, "linear", 4.0)),
        ({"llama.rope.scaling.factor": 4.0}, Rope(10000.0, HEAD, "linear", 4.0)),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}, Rope(10000.0, HEAD, "linear", 4.0)),
        ({"llama.rope.scaling.factor": 1.0}, Rope(10000.0, HEAD)),
        # llama.cpp takes 0 for "not set", and then for 1.
        ({"llama.rope.scaling.type": "linear"}, Rope(10000.0, HEAD)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, Rope(10000.0, HEAD)),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}, Rope(10000.0, HEAD)),
        ({"llama.rope.scaling.factor": 0.0, "llama.rope.scale_linear": 2.0}, Rope(10000.0, HEAD, "linear", 2.0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scale_linear": 2.0}, Rope(10000.0, HEAD, "linear", 2.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, Rope(10000.0, HEAD)),
        ({"llama.rope.scaling.attn_factor": 1.0}, Rope(10000.0, HEAD)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            Rope(10000.0, HEAD, "linear", 2.0),
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            Rope(10000.0, HEAD, "yarn", 4.0, 32, attention_factor=0.1 * math.log(4) + 1),
        ),
        (
            {  # betas that llama.cpp does not read of these architectures
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 4.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
            },
            Rope(10000.0, HEAD, "yarn", 4.0, 32, attention_factor=0.1 * math.log(4) + 1),
        ),
    ],
)
def test_ropes(metadata: dict[str, Any], expected: Rope, write: Write) -> None:
    assert GgufCheckpoint.open(write(metadata=metadata)).config.ropes == (expected,) * LAYERS


@pytest.mark.parametrize("wrong", [-1, 2**32 - 1, VOCAB])
def test_a_bos_id_outside_the_vocabulary_is_not_used(wrong: int, write: Write) -> None:
    assert GgufCheckpoint.open(write(metadata={"tokenizer.ggml.bos_token_id": wrong})).config.bos_ids == ()


def test_settings_may_be_listed_layer_by_layer(write: Write) -> None:
    arrays = {
        f"llama.{key}": [METADATA[f"llama.{key}"]] * LAYERS
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    }
    assert GgufCheckpoint.open(write(metadata=arrays)).config == GgufCheckpoint.open(write()).config


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3_are_recognised(factor: float, write: Write) -> None:
    rope = Rope(500000.0, HEAD, "llama3", factor, 8192)
    factors = frequencies(Rope(500000.0, HEAD), 0) / frequencies(rope, 0)
    path = write(metadata={"llama.rope.freq_base": 500000.0}, more={"rope_freqs.weight": factors})
    assert GgufCheckpoint.open(path).config.ropes == (rope,) * LAYERS


def test_other_factors_are_used_as_they_are(write: Write) -> None:
    factors = torch.linspace(1, 3, HEAD // 2)
    (rope, *_) = GgufCheckpoint.open(write(more={"rope_freqs.weight": factors})).config.ropes
    assert rope is not None
    for horizon in (1, 100):
        torch.testing.assert_close(frequencies(rope, horizon), frequencies(Rope(10000.0, HEAD), 0) / factors)
    assert rope.attention_factor == 1.0


def test_factors_are_understood_once_for_all_layers(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, understand = [], gguf_config.rope_with_factors

    def counted(rope: Rope, factors: Sequence[float]) -> Rope:
        calls.append(len(factors))
        return understand(rope, factors)

    monkeypatch.setattr(gguf_config, "rope_with_factors", counted)
    path = write(metadata={"llama.block_count": 16384}, more={"rope_freqs.weight": torch.linspace(1, 3, HEAD // 2)})
    with user_error("checkpoint_incomplete"):
        GgufCheckpoint.open(path)
    assert calls == [HEAD // 2]


def test_factors_are_not_read_before_their_number_is_right(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(more={"rope_freqs.weight": torch.ones(HEAD // 2 + 1)})
    monkeypatch.setattr(GgufFile, "read", lambda file, name: pytest.fail(f"{name} was read"))
    with user_error("checkpoint_mismatch"):
        GgufCheckpoint.open(path)


# Files that are no model that is read


MANY = "a whole number from 1 to 16384"
METADATA_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture missing": ({"general.architecture": None}, "general.architecture is None: attar reads"),
    "architecture unknown": ({"general.architecture": "lama"}, "'lama': attar reads GGUF files of llama, qwen2,"),
    "architecture a number": ({"general.architecture": 3}, "general.architecture is 3"),
    "block_count 513": ({"llama.block_count": 513}, "has no tensor 'blk.3.attn_norm.weight'"),
    "block_count 2": ({"llama.block_count": 2}, "tensor 'blk.2."),
    "block_count 0": ({"llama.block_count": 0}, f"llama.block_count must be {MANY}, not 0"),
    "block_count -1": ({"llama.block_count": -1}, f"llama.block_count must be {MANY}, not -1"),
    "block_count a float": ({"llama.block_count": 3.0}, f"llama.block_count must be {MANY}, not 3.0"),
    "block_count 2^32 - 1": ({"llama.block_count": 2**32 - 1}, f"llama.block_count must be {MANY}, not 4294967295"),
    "block_count missing": ({"llama.block_count": None}, "llama.block_count is missing"),
    "head_count 0": ({"llama.attention.head_count": 0}, f"llama.attention.head_count must be {MANY}, not 0"),
    "head_count not dividing": ({"llama.attention.head_count": 5}, "is 5, which does not divide the 128 columns"),
    "head_count for two layers": ({"llama.attention.head_count": [4, 4]}, f"must be {MANY}, not an array of 2 i32"),
    "head_count_kv not dividing": ({"llama.attention.head_count_kv": 3}, "which does not divide num_attention_heads 4"),
    "embedding_length lies": ({"llama.embedding_length": 256}, "rope.dimension_count is 32, and heads have 64 columns"),
    "feed_forward_length lies": ({"llama.feed_forward_length": 255}, "the metadata make it [128, 255]"),
    "rope wider than a head": ({"llama.rope.dimension_count": 64}, "rope.dimension_count is 64, and heads have 32"),
    "rope of a part": ({"llama.rope.dimension_count": 16}, "a part of a head is not supported"),
    "value_length other": ({"llama.attention.value_length": 16}, "attention.value_length is 16"),
    "eps NaN": ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "epsilon must be a number above 0, at most 1"),
    "eps 0": ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon must be a number above 0"),
    "eps missing": ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "freq_base infinite": ({"llama.rope.freq_base": math.inf}, "llama.rope.freq_base must be a number above 1"),
    "scaling unknown": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope': supported"),
    "attn_factor beside nothing": ({"llama.rope.scaling.attn_factor": 2.0}, "another factor of attention is not supp"),
    "attn_factor beside linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.attn_factor": 2.0},
        "llama.rope.scaling.attn_factor is 2.0: another factor of attention",
    ),
    "attn_factor beside yarn": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.attn_factor": 2.0},
        "llama.rope.scaling.attn_factor is 2.0: another factor of attention",
    ),
    "experts without their number for a token": ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
    "more experts for a token than there are": (
        {"llama.expert_count": 8, "llama.expert_used_count": 9}, "num_experts_per_tok must be a whole num"
    ),
    "layers of different shapes": (
        {"llama.attention.head_count_kv": Typed("[u32]", [2, 2, 1])}, "head_count_kv differs from layer to layer"
    ),
    "context a string": ({"llama.context_length": "128"}, "llama.context_length must be a whole number"),
    "context a bool": ({"llama.context_length": True}, "llama.context_length must be a whole number"),
    "context 2^63": ({"llama.context_length": Typed("u64", 2**63)}, "llama.context_length must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", METADATA_REFUSED)
def test_metadata_that_describe_no_model_are_refused(kind: str, write: Write) -> None:
    metadata, words = METADATA_REFUSED[kind]
    path = write(metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint.open(path)
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


LONG = 10**6
UNCOMMON = "z" * LONG


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": UNCOMMON}, "general.architecture is 'z"),
        ({"llama.rope.scaling.type": UNCOMMON}, "llama.rope.scaling.type is 'z"),
        ({"llama.block_count": UNCOMMON}, "llama.block_count must be a whole number"),
        ({"llama.rope.freq_base": UNCOMMON}, "llama.rope.freq_base must be a number"),
        ({"llama.rope.scaling.attn_factor": UNCOMMON}, "llama.rope.scaling.attn_factor is 'z"),
    ],
)
def test_a_long_string_is_neither_compared_nor_shown(
    metadata: dict[str, Any], words: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(metadata=metadata)
    monkeypatch.setattr(difflib, "get_close_matches", lambda *_, **__: pytest.fail("it was compared"))
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint.open(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in METADATA if name not in ("llama.vocab_size", "tokenizer.ggml.model")),
        "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear",
        "llama.rope.scaling.attn_factor", "llama.expert_count", "llama.attention.key_length",
        "llama.attention.value_length", "tokenizer.ggml.bos_token_id",
    ],
)  # fmt: skip
def test_an_array_where_one_value_is_expected_is_not_decoded(
    name: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(metadata={name: Typed("[u8]", [7] * 1000)})
    monkeypatch.setattr(Array, "__iter__", lambda array: pytest.fail(f"{array!r} was decoded"))
    with pytest.raises(CheckpointError, match=rf"{name} .*an array of 1000 u8"):
        GgufCheckpoint.open(path)


TENSORS_REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "no embedding": ({}, ("token_embd.weight",), "has no tensor 'token_embd.weight': not a language model"),
    "no final norm": ({}, ("output_norm.weight",), "has no tensor 'output_norm.weight'"),
    "no linear": ({}, ("blk.1.ffn_up.weight",), "has no tensor 'blk.1.ffn_up.weight'; did you mean"),
    "one too many": ({"blk.0.lora_a": torch.zeros(3)}, (), "tensor 'blk.0.lora_a' has no place in a LlamaForCausalLM"),
    "a layer too many": ({"blk.3.ffn_up.weight": torch.zeros(1, 1)}, (), "tensor 'blk.3.ffn_up.weight' has no place"),
    "a vector": ({"blk.0.ffn_up.weight": torch.zeros(128)}, (), "blk.0.ffn_up.weight is not a matrix"),
    "a cube": ({"blk.0.ffn_up.weight": torch.zeros(2, 128, 128)}, (), "blk.0.ffn_up.weight is not a matrix"),
    "turned": ({"blk.0.ffn_up.weight": torch.zeros(128, 256)}, (), "the metadata make it [256, 128]"),
    "a wide norm": ({"blk.0.attn_norm.weight": torch.zeros(129)}, (), "the metadata make it [128]"),
    "a type that is not decoded": (
        {"blk.0.ffn_down.weight": (torch.zeros(128, 66, dtype=torch.uint8), TYPES["IQ2_XXS"], (128, 256))}, (),
        "tensor 'blk.0.ffn_down.weight' is IQ2_XXS: attar computes with F32, F16",
    ),
    "whole numbers": (
        {"output_norm.weight": (torch.zeros(512, dtype=torch.uint8), TYPES["I32"], (128,))}, (),
        "tensor 'output_norm.weight' is I32",
    ),
    "too few factors of the rope": ({"rope_freqs.weight": torch.ones(15)}, (), "a row of 16 numbers, one for each"),
    "factors of the rope with a NaN": ({"rope_freqs.weight": torch.full((16,), math.nan)}, (), "hold positive numbers"),
    "factors of the rope with a zero": ({"rope_freqs.weight": torch.zeros(16)}, (), "must hold positive numbers"),
    "factors of the rope in a matrix": ({"rope_freqs.weight": torch.ones(4, 4)}, (), "must be a row of 16 numbers"),
    "factors of the rope in a type that is not decoded": (
        {"rope_freqs.weight": (torch.zeros(64, dtype=torch.uint8), TYPES["I32"], (16,))}, (), "not I32 [16]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS_REFUSED)
def test_tensors_that_are_not_the_model_are_refused(kind: str, write: Write) -> None:
    more, less, words = TENSORS_REFUSED[kind]
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint.open(write(more=more, less=less))
    assert words in str(caught.value)


def test_factors_beside_a_scaled_rope_are_refused(write: Write) -> None:
    path = write(metadata={"llama.rope.scale_linear": 2.0}, more={"rope_freqs.weight": torch.ones(16)})
    with user_error("config_invalid"):
        GgufCheckpoint.open(path)


def test_names_of_files() -> None:
    names = Names()
    assert file_name(names, "model.layers.12.mlp.gate_proj.weight") == "blk.12.ffn_gate.weight"
    assert file_name(names, "model.layers.0.self_attn.k_norm") == "blk.0.attn_k_norm"
    assert file_name(names, "lm_head.weight") == "output.weight"
    assert file_name(names, "model.norm") == "output_norm"
    assert place(names, "model.layers.0.mlp.experts.11.up_proj.weight") == ("blk.0.ffn_up_exps.weight", 11)
    for unknown in ("model.layers.0.mlp.experts.x.up_proj", "model.layers.0.mlp.other", "model.layers.x.mlp.up_proj"):
        assert place(names, unknown) == (unknown, None)


# Through the front doors


TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefghijklmnopqrstuvwxyz.?"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [0.0] * len(TOKENS),
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(TOKENS) - 259)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_file_answers_a_prompt(kind: str, write: Write) -> None:
    from attar import LLM, SamplingParams

    model = LLM(write(kind, TOKENIZER))
    assert model.model.eos_ids == {2}
    (answer,) = model.generate("abc", SamplingParams(max_tokens=4, temperature=0.0))
    assert answer.prompt_token_ids[0] == 1
    assert len(answer.token_ids) == 4 or answer.finish_reason == "stop"


def test_a_malformed_vocabulary_names_the_file_and_the_key(write: Write) -> None:
    path = write("Q4_0", {**TOKENIZER, "tokenizer.ggml.scores": [0.0]})
    with user_error("tokenizer_malformed", "model.gguf"):
        vocabulary.tokenizer(path)
    assert not vocabulary.has_tokenizer(write("Q4_0"))


def many_whole(characters: int, kind: int) -> dict[str, Any]:
    """TOKENIZER with tokens of `kind` until so many characters are found whole."""
    left, more = characters - sum(len(token) for token in TOKENS[:3]), []
    while left:
        more.append(f"{len(more):06d}".rjust(min(left, 250), "x"))
        left -= len(more[-1])
    return {
        **TOKENIZER,
        "tokenizer.ggml.tokens": [*TOKENS, *more],
        "tokenizer.ggml.scores": [0.0] * (len(TOKENS) + len(more)),
        "tokenizer.ggml.token_type": [*TOKENIZER["tokenizer.ggml.token_type"], *[kind] * len(more)],
    }


@pytest.mark.parametrize("kind", [3, 4])
def test_what_is_found_whole_is_bounded(kind: int, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_gguf.MAX_WHOLE == 1 << 18
    monkeypatch.setattr(text_gguf, "MAX_WHOLE", 5000)
    assert vocabulary.tokenizer(write("Q4_0", many_whole(5000, kind))).vocab_size > len(TOKENS)
    with user_error("tokenizer_unsupported"):
        vocabulary.tokenizer(write("Q4_0", many_whole(5001, kind)))


def runs(longest: int) -> dict[str, Any]:
    """TOKENIZER with runs of one letter, of which every cut is a merge: longest * (longest - 1) / 2 of them."""
    more = ["a" * length for length in range(2, longest + 1)]
    return {
        **TOKENIZER,
        "tokenizer.ggml.tokens": [*TOKENS, *more],
        "tokenizer.ggml.scores": [0.0] * (len(TOKENS) + len(more)),
        "tokenizer.ggml.token_type": [*TOKENIZER["tokenizer.ggml.token_type"], *[1] * len(more)],
    }


def test_merges_that_follow_from_pieces_are_bounded(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert merges.MAX_MERGES == 1 << 21
    monkeypatch.setattr(merges, "MAX_MERGES", 50 * 49 // 2)
    assert vocabulary.tokenizer(write("Q4_0", runs(50))).vocab_size == len(TOKENS) + 49
    with user_error("tokenizer_unsupported", "model.gguf"):
        vocabulary.tokenizer(write("Q4_0", runs(51)))
    with user_error("tokenizer_unsupported"):
        vocabulary.tokenizer(write("Q4_0", runs(257)))


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("tokenizer.ggml.model", Typed("[string]", ["llama"] * 1000), "tokenizer_malformed"),
        ("tokenizer.ggml.bos_token_id", Typed("[u32]", [1] * 1000), "tokenizer_malformed"),
        ("tokenizer.ggml.add_bos_token", Typed("[bool]", [True] * 1000), "tokenizer_malformed"),
        ("tokenizer.ggml.scores", Typed("[f32]", [0.0] * 1000), "tokenizer_malformed"),
        ("tokenizer.ggml.token_type", Typed("[i32]", [1] * 1000), "tokenizer_malformed"),
    ],
)
def test_an_array_that_cannot_be_of_the_tokenizer_is_not_decoded(
    name: str, array: Typed, words: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, decode = write("Q4_0", {**TOKENIZER, name: array}), Array.__iter__
    lengths: list[int] = []

    def counted(array: Array) -> Iterator[Any]:
        lengths.append(len(array))
        return decode(array)

    monkeypatch.setattr(Array, "__iter__", counted)
    with user_error(words):
        vocabulary.tokenizer(path)
    assert set(lengths) <= {len(TOKENS)}


def test_a_folder_may_be_called_like_a_file(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model.gguf"
    shutil.copytree(source, folder)
    assert not vocabulary.is_gguf(folder)
    assert torch.equal(logits(opening.load(folder, torch.float32)), logits(hf.load(source, torch.float32)))


def test_a_file_is_verified_against_its_receipt(write: Write) -> None:
    path = write("Q8_0")
    probes = make_probes(gguf_checkpoint.load(path, torch.float32), 0)
    receipt.write(
        path, receipt.environment() | {"recipe": {}, "calibration": None, "seed": 0}, {}, [], 8.5, None, probes
    )
    verdict = verify.verify(path)
    assert verdict.ok, verdict.sentence


@pytest.mark.parametrize(
    ("kind", "head", "dtype"),
    [("Q4_0", "q4_0", "float32"), ("Q4_1", "q4_1", "float32"), ("BF16", None, "bfloat16")],
)
def test_memory_is_planned_as_the_file_will_run(kind: str, head: str | None, dtype: str, write: Write) -> None:
    config, storage = stored(write(kind))
    assert config.layers == LAYERS
    assert (storage.label, storage.dtype) == (kind, dtype)
    assert (storage.head and storage.head.name) == head


def test_inspection_says_what_types_there_are(write: Write) -> None:
    path = write(
        "Q4_0", more={"blk.0.ffn_up.weight": (torch.zeros(256, 80, dtype=torch.uint8), TYPES["Q4_1"], (256, 128))}
    )
    found = inspect(path)
    assert found.schemes == {"Q4_0": 21, "Q4_1": 1}
    assert found.bytes == path.stat().st_size
    assert 4.5 < found.bits_per_weight < 4.6
    assert "blk.0.ffn_up.weight" in found.table()
    *blocks, _, _, last = found.tensors  # a file begins with the embedding
    assert last == "token_embd.weight"
    assert [name.split(".")[1] for name in blocks] == sorted(name.split(".")[1] for name in blocks)
    json.dumps(found.to_dict())


# llama.cpp

LLAMA_CPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
ids = json.loads(sys.argv[2])
model = Llama(sys.argv[1], n_ctx=64, n_threads=1, logits_all=True, verbose=False)
model.eval(ids)
np.save(sys.argv[3], np.array(model.scores[: len(ids)], np.float32))
"""


@pytest.mark.parametrize("kind", KL_TO_LLAMA_CPP)
def test_llama_cpp_computes_the_same(kind: str, write: Write, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Of the types with blocks of 256, in the one matrix of each layer whose rows are as long."""
    python = ROOT / ".venv-llamacpp" / "bin" / "python"
    if not python.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    if TYPES[kind].elements == 256:
        long = {name: tensor for name, tensor in tensors.items() if "ffn_down" in name}
        searched = {name: ggml_search.encode(TYPES[kind], tensor) for name, tensor in long.items()}
        path = write("F32", more={name: (searched[name], TYPES[kind], tuple(long[name].shape)) for name in long})
    else:
        path = write(kind)
    ids = (torch.arange(5, 25) * 11 % VOCAB).tolist()
    done = subprocess.run(
        [python, "-c", LLAMA_CPP, str(path), json.dumps(ids), str(tmp_path / "logits.npy")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = torch.from_numpy(np.load(tmp_path / "logits.npy")).log_softmax(1)
    ours = logits(gguf_checkpoint.load(path, torch.float32)).log_softmax(1)
    divergence = (ours.exp() * (ours - theirs)).sum(1).mean().item()
    assert divergence < KL_TO_LLAMA_CPP[kind]
