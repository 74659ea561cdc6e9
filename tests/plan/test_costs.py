"""The planner's bytes against the real thing: built decoders, prepared weights, allocated pages; and known figures."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.kernels.native import linear as native
from attar.kernels.operands import Linear
from attar.kv.bit_planes import Basis
from attar.kv.kvquant import Channels
from attar.kv.pages import Bases, PagedKV
from attar.kv.schemes import scheme
from attar.model import assembly, cache
from attar.model.config import ModelConfig, Rope
from attar.model.families import read_config
from attar.model.shapes import shape
from attar.plan import costs
from attar.plan.costs import Storage
from tests.errors import user_error

SMALL: Mapping[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Gemma2ForCausalLM": {"head_dim": 8, "sliding_window": 16},
    "Phi3ForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {"num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
}
SCHEMES = [
    "w4g32",
    "w4g64-asym",
    "w3g96",
    "w8",
    "w5-asym",
    "w8a8",
    "w8a8-static",
    "w2g32",
    "w8-tensor",
    "w4",
    "w6-asym",
]


needs_kernels = pytest.mark.skipif(dispatch.store() is None, reason="the native kernels are off or do not load")


def llama(layers: int, kv_heads: int, head_dim: int = 128, heads: int = 64) -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", vocab_size=32000, hidden=heads * head_dim, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, intermediate=1024, context=131072, windows=(None,) * layers, ropes=(None,) * layers,
    )  # fmt: skip


class Outline:
    """Weights without data, of the shapes that the planner names: the decoder refuses any other."""

    dtype = torch.float32

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.left = {each.name: each for each in costs.matrices(config)}

    def has(self, name: str) -> bool:
        return name != f"{self.config.names.head}.weight" or not self.config.tied

    def linear(self, name: str) -> Linear:
        each = self.left.pop(name)
        bias = torch.empty(each.rows, device="meta") if each.bias else None
        return Linear(name, torch.empty(each.rows, each.columns, device="meta"), bias)

    def tensor(self, name: str) -> Tensor:
        c = self.config
        if c.names.positions and c.names.positions in name:
            return torch.empty(c.learned_positions + c.position_offset, c.hidden, device="meta")
        return torch.empty(c.head_dim if "q_norm" in name or "k_norm" in name else c.hidden, device="meta")

    def matrix(self, name: str) -> Tensor:
        return torch.empty(self.config.vocab_size, self.config.hidden, device="meta")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_linears_and_norms_are_those_that_a_decoder_is_built_of(architecture: str) -> None:
    config = read_config({"architectures": [architecture], **SMALL, **FAMILIES[architecture]})
    outline = Outline(config)
    built = assembly.build(config, outline)
    left = {config.names.head} if config.tied else set()
    assert set(outline.left) == left
    norms = [built.final_norm, *(norm for block in built.blocks for norm in block.norms())]
    numbers = sum(t.numel() for norm in norms for t in (norm.weight, norm.bias) if t is not None)
    assert costs.norm_weights(config) == numbers
    planned = {each.name: each for each in costs.matrices(config)}
    linears = [linear for block in built.blocks for linear in block.linears()]
    assert all((linear.bias is not None) == planned[linear.name].bias for linear in linears)
    positions = 0 if built.embedding.positions is None else built.embedding.positions.numel()
    biases = sum(linear.bias.numel() for linear in linears if linear.bias is not None)
    assert costs.weight_bytes(config, Storage()).norms == 4 * (numbers + positions + biases)


def test_the_same_linears_may_be_compressed() -> None:
    for architecture in FAMILIES:
        config = read_config({"architectures": [architecture], **SMALL, **FAMILIES[architecture]})
        may = [name for layer in range(config.layers) for name in assembly.compressible(config, layer)]
        assert [each.name for each in costs.matrices(config) if each.compressible] == may


@needs_kernels
@pytest.mark.parametrize("name", [*SCHEMES, "dense"])
@pytest.mark.parametrize("size", [(16, 192), (40, 192), (17, 384), (1, 576)])
def test_a_weight_holds_what_the_kernels_read(name: str, size: tuple[int, int]) -> None:
    scheme = None if name == "dense" else Scheme.parse(name).with_scale_dtype("float16")
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0))
    packed = weight.bfloat16() if scheme is None else codec("int").quantize(weight, scheme)
    linear = Linear("a", packed, activation_scale=torch.ones(1))
    store = dispatch.store()
    assert store is not None
    store.take(linear)
    assert isinstance(linear.weight, native.PackedWeight)
    dtype = "bfloat16"
    assert costs.read_bytes(*size, scheme, dtype) == linear.weight.read_bytes
    assert costs.memory_bytes(*size, scheme, dtype) == linear.weight.read_bytes


def test_what_has_no_kernel_is_held_twice() -> None:
    scheme = Scheme.parse("fp8-atensor")
    assert costs.against(scheme) == "one activation scale for all rows of a call would tie them to each other"
    assert costs.read_bytes(32, 64, scheme) == 4 * 32 * 64
    assert costs.memory_bytes(32, 64, scheme) == 4 * 32 * 64 + scheme.bytes((32, 64))


@pytest.mark.parametrize("name", [*SCHEMES, "w4g24", "fp8", "fp8-e5m2-weight", "w8a8-atensor", "w4a8g64"])
def test_the_reasons_against_are_the_kernels_own(name: str) -> None:
    scheme = Scheme.parse(name)
    weight = torch.randn((16, 192), generator=torch.Generator().manual_seed(0))
    packed = codec(scheme.weight.kind).quantize(weight, scheme)
    assert costs.against(scheme) == native.against(Linear("a", packed))


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "fp8", "int4"])
@pytest.mark.parametrize("head_dim, kv_heads, block", [(64, 8, 64), (80, 1, 64), (6, 3, 16), (129, 2, 32)])
def test_a_block_holds_what_pages_hold(kv: str, head_dim: int, kv_heads: int, block: int) -> None:
    config = llama(3, kv_heads, head_dim, heads=kv_heads)
    if kv == "int4" and head_dim % 16:
        with user_error("kv_unsupported"):
            costs.page_bytes(config, scheme(kv), block)
        return
    pages = PagedKV.zeros(5, block, kv_heads, head_dim, scheme(kv))
    assert costs.page_bytes(config, scheme(kv), block) * 5 == pages.nbytes
    assert costs.block_bytes(config, scheme(kv), block) * 5 == 3 * pages.nbytes
    assert costs.kv_bytes(config, scheme(kv)) * block == costs.block_bytes(config, scheme(kv), block)


def test_what_schemes_want_beside_blocks_is_what_pages_hold() -> None:
    config = llama(3, 2, 64, heads=2)
    assert costs.beside_bytes(config, scheme("int4"), 5) == costs.beside_bytes(config, scheme("int8"), 5) == 0
    pages = PagedKV.zeros(1, 64, 2, 64, scheme("kivi2"), tails=15)
    assert pages.recent is not None
    assert costs.beside_bytes(config, scheme("kivi2"), 5) == 3 * (pages.recent.keys.nbytes + pages.recent.values.nbytes)
    rows, matrices = torch.zeros(2, 64), (torch.zeros(2, 64, 64) for _ in range(4))
    both = Bases(*(Basis(next(matrices), next(matrices), rows, rows, ((4,) * 8,) * 2) for _ in range(2)))
    held = {
        each.untyped_storage().data_ptr(): each.nbytes
        for side in (both.keys, both.values)
        if isinstance(side, Basis)
        for each in (side.into, side.back, side.queries)
    }
    bases = costs.beside_bytes(config, scheme("klt4"), 5) - costs.calibration_bytes(config, scheme("klt4"))
    assert bases == 3 * (sum(held.values()) + 2 * 3 * rows.nbytes)
    of = Channels(torch.zeros(2, 64), torch.ones(2, 64), torch.zeros(16), True)
    bases = costs.beside_bytes(config, scheme("nuq4"), 5) - costs.calibration_bytes(config, scheme("nuq4"))
    assert bases == 3 * 2 * sum(each.nbytes for each in (of.mean, of.spread, of.levels))
    assert (
        costs.page_bytes(config, scheme("nuq4"))
        == PagedKV.zeros(1, 64, 2, 64, scheme("nuq4"), bases=Bases(of, of)).nbytes
    )


def test_the_block_is_the_cache_s_own() -> None:
    assert costs.BLOCK == cache.BLOCK
    config = shape("tiny")
    made = cache.KVCache(config, 200, 3, scheme("int8"))
    assert sum(pages.nbytes for pages in made.layers) == 3 * 4 * costs.block_bytes(config, scheme("int8"))


def test_known_sizes_of_caches() -> None:
    """2 L G D N b (methods: 7B with full heads; 70B with 8 key-value heads, which some texts give 64)."""
    seven, seventy, without_groups = llama(32, 32, heads=32), llama(80, 8), llama(80, 64)
    assert costs.kv_bytes(seven, scheme("bfloat16")) * 2048 == 2**30
    assert costs.kv_bytes(seven, scheme("bfloat16")) * 2048 * 100 == pytest.approx(107.4e9, rel=1e-3)
    assert costs.kv_bytes(seventy, scheme("bfloat16")) == 327_680
    for tokens, gigabytes in ((4096, 1.34), (32768, 10.74), (100_000, 32.77), (131_072, 42.95)):
        assert costs.kv_bytes(seventy, scheme("bfloat16")) * tokens == pytest.approx(gigabytes * 1e9, rel=4e-3)
    assert costs.kv_bytes(seventy, scheme("bfloat16")) * 131_072 == 40 * 2**30
    assert costs.kv_bytes(without_groups, scheme("bfloat16")) * 100_000 == pytest.approx(262.1e9, rel=1e-3)


def test_a_block_of_one_layer_is_not_a_block() -> None:
    """262 KB is often said to be a block of Llama-2-7B; it is one layer's."""
    seven = llama(32, 32, heads=32)
    assert costs.page_bytes(seven, scheme("bfloat16"), 16) == 262_144
    assert costs.block_bytes(seven, scheme("bfloat16"), 16) == 8_388_608


def test_int8_halves_bfloat16_but_for_its_scales() -> None:
    config = llama(32, 8)
    assert costs.kv_bytes(config, scheme("int8")) == costs.kv_bytes(config, scheme("bfloat16")) // 2 + 32 * 8 * 2 * 4


def test_a_window_is_read_but_everything_is_stored() -> None:
    both = ModelConfig(
        "x", vocab_size=8, hidden=16, heads=1, kv_heads=1, head_dim=16, intermediate=8, context=4096,
        windows=(None, 100), ropes=(None, None),
    )  # fmt: skip
    layer = costs.kv_bytes(both, scheme("bfloat16")) // 2
    assert costs.kv_bytes(both, scheme("bfloat16")) == 2 * 2 * 16 * 2
    assert costs.kv_read_bytes(both, scheme("bfloat16"), 50) == 100 * layer
    assert costs.kv_read_bytes(both, scheme("bfloat16"), 1000) == (1000 + 100) * layer


@pytest.mark.parametrize("head, gigabytes, most", [("w4g128", 0.64, 97), ("w8", 0.77, 81), ("", 1.03, 60)])
def test_known_bytes_of_a_step(head: str, gigabytes: float, most: float) -> None:
    """The Llama-3.2-1B shape at w4g128, by the format of its output matrix, and its limit at 62 GB/s."""
    matrix = Scheme.parse(head).with_scale_dtype("float16") if head else None
    storage = Storage(Scheme.parse("w4g128").with_scale_dtype("float16"), matrix)
    read = costs.step_bytes(shape("llama-3.2-1b"), storage)
    assert read == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert 62e9 / read == pytest.approx(most, rel=0.01)


def test_experts_that_several_tokens_choose_are_read_once() -> None:
    config = read_config({"architectures": ["MixtralForCausalLM"], **SMALL, **FAMILIES["MixtralForCausalLM"]})
    alone, several, all_of_them = (costs.step_bytes(config, Storage(), rows) for rows in (1, 2, 1000))
    expert = 2 * 3 * 48 * 32 * 2  # two layers, three matrices, bfloat16
    everything = sum(costs.read_bytes(each.rows, each.columns, None) for each in costs.matrices(config))
    assert all_of_them == everything
    assert everything - alone == expert  # two of three run
    assert several - alone == round(expert * 3 * (1 - 1 / 9)) - 2 * expert


def test_operations_of_linears() -> None:
    config, scheme = shape("llama-3.2-1b"), Scheme.parse("w4g128")
    assert costs.int8_flops(config, Storage(scheme)) == 2 * 973_078_528
    assert costs.int8_flops(config, Storage(scheme, scheme)) == 2 * (973_078_528 + 262_668_288)
    assert costs.int8_flops(config, Storage()) == 0


@pytest.mark.parametrize(
    "operations, bits, rows",
    [(312e12, 16, 153), (312e12, 4, 38), (312e12, 4.25, 41), (624e12, 8, 153), (624e12, 4, 76)],
)
def test_known_ridges(operations: float, bits: float, rows: float) -> None:
    """An A100 at 2.039 TB/s: rows from which compute is the limit, by scheme rather than one for all."""
    assert costs.ridge(operations, 2.039e12, bits) == pytest.approx(rows, abs=0.6)


def test_storages_by_name() -> None:
    assert Storage.named("bf16").linears is None
    assert Storage.named("dense", dtype="float16").label == "fp16"
    assert Storage.named("w4g128", dtype="float16").linears == Scheme.parse("w4g128").with_scale_dtype("float16")
    with user_error("scheme_unknown"):
        Storage.named("q9_9")


def test_impossible_settings_are_named() -> None:
    config = shape("tiny")
    with user_error("group_size_indivisible", "model.layers.0.self_attn.q_proj"):
        costs.weight_bytes(config, Storage.named("w4g96"))
    with user_error("kv_unknown"):
        costs.page_bytes(config, scheme("fp16"))
    with pytest.raises(ValueError, match="a multiple of 16 slots, not 24"):
        costs.page_bytes(config, scheme("int8"), 24)


def test_ropes_do_not_matter_to_size() -> None:
    plain = llama(2, 2, heads=2)
    turned = ModelConfig(**{f: getattr(plain, f) for f in plain.__slots__} | {"ropes": (Rope(1e4, 64),) * 2})
    assert costs.weight_bytes(plain, Storage()) == costs.weight_bytes(turned, Storage())


@pytest.mark.parametrize("module", ["costs", "steps", "fit", "report"])
def test_planning_needs_no_torch(module: str) -> None:
    code = f"import attar.plan.{module}, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_shape_can_be_planned() -> None:
    for name, weights in itertools.product(("llama-3.1-8b", "qwen2.5-0.5b", "tiny"), ("dense", "w8a8", "w4g128")):
        assert costs.weight_bytes(shape(name), Storage.named(weights)).total > 0
