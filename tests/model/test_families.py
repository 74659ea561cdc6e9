"""Every family against transformers: tiny models with random weights, norms and biases, saved and read back by name.

The oracle runs in float32 with eager attention, on sequences longer than the sliding window and than the context that
the rope was scaled from. Each test of the table `OFF` switches one feature off and must be noticed.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from attar.kernels import dispatch
from attar.kernels.dispatch import BackendWeights
from attar.kernels.operands import Linear
from attar.model.assembly import build
from attar.model.cache import ForwardBatch, KVCache
from attar.model.config import ModelConfig, Names, Rope
from attar.model.decoder import Decoder
from attar.model.families import ARCHITECTURES, read_config
from tests.errors import user_error

EQUAL = 1e-4  # max |difference| / max |reference|, float32
NOTICED = 1e-3  # what switching a feature off must at least cost
LONG, SHORT = 44, 19  # tokens of the two sequences; contexts and windows below lie between and under these
VOCABULARY = 120

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {**SIZES, **HEADS, **IDS, "rms_norm_eps": 1e-2, "max_position_embeddings": 32}
QWEN = {**LLAMA, "tie_word_embeddings": False}
GEMMA = {**LLAMA, "head_dim": 32, "query_pre_attn_scalar": 50, "sliding_window": 8}
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 48, **IDS,
}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 48, **IDS}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
QWEN2_MOE = {**QWEN, **EXPERTS, "shared_expert_intermediate_size": 56}
MIXED = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
PAIRS = 8  # rotary pairs of a head of 16
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, **parameters}}


LONGROPE = rope(
    "longrope",
    short_factor=[1 + 0.1 * i for i in range(PAIRS)],
    long_factor=[1 + 0.5 * i for i in range(PAIRS)],
)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=2.0)
YARN_RATIO = {"rope_parameters": {**YARN["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {**LLAMA, "num_key_value_heads": 4}),
    "llama3": ("Llama", {**LLAMA, **LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": ("Llama", {**LLAMA, **rope("linear", factor=3.0)}),
    "llama-dynamic": ("Llama", {**LLAMA, **rope("dynamic", factor=3.0)}),
    "llama-yarn": ("Llama", {**LLAMA, **YARN}),
    "llama-yarn-ratio": ("Llama", {**LLAMA, **YARN_RATIO}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2", QWEN),
    "qwen2-windows": ("Qwen2", {**QWEN, **WINDOWED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**QWEN, "head_dim": 32}),
    "qwen3-biases": ("Qwen3", {**QWEN, "head_dim": 32, "attention_bias": True, **WINDOWED}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 6,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gemma3-vision": ("Gemma3Vision", {**GEMMA, "num_hidden_layers": 6}),
    "phi3": ("Phi3", {**LLAMA, "sliding_window": 8}),
    "phi3-partial": ("Phi3", {**LLAMA, **rope("default", partial_rotary_factor=0.5)}),
    "phi3-longrope": ("Phi3", {**LLAMA, "original_max_position_embeddings": 24, **LONGROPE}),
    "opt": ("OPT", OPT),
    "opt-galactica": ("OPT", {**OPT, "enable_bias": False, "activation_function": "gelu"}),
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", {**GPT2, "n_inner": 80, "tie_word_embeddings": False, "scale_attn_weights": False}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN2_MOE, "norm_topk_prob": False}),
    "qwen2-moe-mixed": ("Qwen2Moe", {**QWEN2_MOE, **MIXED, **WINDOWED, "norm_topk_prob": True}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN, **EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-plain": (
        "Qwen3Moe",
        {**QWEN, **EXPERTS, "head_dim": 32, "norm_topk_prob": False, **WINDOWED, "tie_word_embeddings": True},
    ),
}


class Stored:
    """`Weights` over the tensors that save_pretrained wrote."""

    def __init__(self, names: Names, tensors: dict[str, Tensor]) -> None:
        self.names, self.tensors = names, tensors

    def _find(self, name: str) -> str | None:
        return next((s for s in self.names.spellings(name) if s in self.tensors), None)

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def tensor(self, name: str) -> Tensor:
        found = self._find(name)
        assert found is not None, name
        return self.tensors[found]

    dtype = torch.float32
    matrix = tensor

    def linear(self, name: str) -> Linear:
        weight = self.tensor(f"{name}.weight")
        bias = self.tensor(f"{name}.bias") if self.has(f"{name}.bias") else None
        return Linear(name, weight.T if self.names.is_transposed(name) else weight, bias)


@dataclass(frozen=True)
class Oracle:
    config: ModelConfig
    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    ids: tuple[Tensor, Tensor]  # a long and a short sequence
    logits: tuple[Tensor, Tensor]

    def decoder(
        self,
        config: ModelConfig | None = None,
        tensors: dict[str, Tensor] | None = None,
        store: BackendWeights | None = None,
    ) -> Decoder:
        config = config or self.config
        return build(config, Stored(config.names, self.tensors if tensors is None else tensors), store=store)


def make(family: str, settings: dict[str, Any]) -> Any:
    settings = {**settings, "attn_implementation": "eager"}
    if family == "Gemma3Vision":
        config = transformers.Gemma3Config(
            text_config=settings,
            vision_config=VISION,
            mm_tokens_per_image=4,
            attn_implementation="eager",
            boi_token_index=117,
            eoi_token_index=118,
            image_token_index=119,
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config"))
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    return getattr(transformers, family + head)(config_class(**settings))


def randomize(model: Any) -> None:
    """Random values everywhere, of sizes at which every feature matters and logits vary by more than 1."""
    generator = torch.Generator().manual_seed(1)
    centre = 0.0 if "Gemma" in type(model).__name__ else 1.0  # of a norm's weight
    transposed = "GPT2" in type(model).__name__
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.data = noise * 0.5
        elif parameter.ndim == 1:
            parameter.data = centre + noise * 0.4
        elif any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
            parameter.data = noise * 0.4
        else:
            columns = parameter.shape[-2] if transposed else parameter.shape[-1]
            parameter.data = noise * (1.6 * columns**-0.5)


@functools.cache
def oracle(case: str) -> Oracle:
    torch.manual_seed(0)
    model = make(*CASES[case]).eval()
    randomize(model)
    generator = torch.Generator().manual_seed(2)
    long, short = (torch.randint(3, 110, (n,), generator=generator) for n in (LONG, SHORT))
    with torch.inference_mode():
        logits = tuple(model(ids[None], use_cache=False).logits[0] for ids in (long, short))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        raw = json.loads((Path(folder) / "config.json").read_text())
        tensors = {k: v.clone() for k, v in load_file(Path(folder) / "model.safetensors").items()}
    return Oracle(read_config(raw), raw, tensors, (long, short), (logits[0], logits[1]))


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def in_pieces(decoder: Decoder, ids: Tensor, lengths: list[int]) -> Tensor:
    """Logits of `ids`, run through a cache in pieces of the given lengths."""
    cache = decoder.cache(len(ids))
    return torch.cat(
        [decoder.forward(piece, ForwardBatch((len(piece),), len(ids), cache)) for piece in ids.split(lengths)]
    )


def test_every_architecture_has_a_case() -> None:
    names = {"GPT2": "GPT2LMHeadModel", "Gemma3Vision": "Gemma3ForConditionalGeneration"}
    assert {names.get(family, f"{family}ForCausalLM") for family, _ in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    o = oracle(case)
    decoder = o.decoder()
    for ids, theirs in zip(o.ids, o.logits, strict=True):
        assert theirs.std() >= 1
        assert difference(decoder.forward(ids, ForwardBatch((len(ids),), len(ids))), theirs) <= EQUAL
    long, theirs = o.ids[0], o.logits[0]
    assert difference(in_pieces(decoder, long, [1] * LONG), theirs) <= EQUAL, "token by token"
    assert difference(in_pieces(decoder, long, [5, 1, 17, LONG - 23]), theirs) <= EQUAL, "in chunks"


@pytest.mark.parametrize("case", CASES)
def test_native_kernels_give_the_same_logits_in_the_same_bits(case: str) -> None:
    o = oracle(case)
    store = dispatch.store()
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    decoder = o.decoder(store=store)
    assert store.refused == {}
    long, theirs = o.ids[0], o.logits[0]
    whole = in_pieces(decoder, long, [LONG])
    assert difference(whole, theirs) <= EQUAL
    for pieces in ([1] * LONG, [5, 1, 17, LONG - 23]):
        assert difference(in_pieces(decoder, long, pieces), theirs) <= EQUAL


@pytest.mark.parametrize("case", CASES)
def test_a_batch_equals_its_sequences_alone(case: str) -> None:
    o = oracle(case)
    decoder, theirs = o.decoder(), torch.cat(o.logits)
    together = decoder.forward(torch.cat(o.ids), ForwardBatch((LONG, SHORT), (LONG, SHORT)))
    assert difference(together, theirs) <= EQUAL

    cache = decoder.cache(LONG, batch=2)
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for lengths in [(30, 10), (1, 1), (0, SHORT - 11), (LONG - 31, 0)]:
        ids = torch.cat([o.ids[s][cache.filled[s] : cache.filled[s] + n] for s, n in enumerate(lengths)])
        out = decoder.forward(ids, ForwardBatch(lengths, (LONG, SHORT), cache)).split(lengths)
        rows[0].append(out[0])
        rows[1].append(out[1])
    assert cache.filled == [LONG, SHORT]
    assert difference(torch.cat(rows[0] + rows[1]), theirs) <= EQUAL


def names(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda c: replace(c, names=replace(c.names, **changes))


def ropes(change: Callable[[Rope], Rope | None]) -> Callable[[ModelConfig], ModelConfig]:
    return lambda c: replace(c, ropes=tuple(r and change(r) for r in c.ropes))


def fields(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda c: replace(c, **changes)


def experts(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda c: replace(c, experts=c.experts and replace(c.experts, **changes))


def no_windows(c: ModelConfig) -> ModelConfig:
    return replace(c, windows=(None,) * c.layers)


def swapped_ropes(c: ModelConfig) -> ModelConfig:
    return replace(c, ropes=c.ropes[-1:] * c.layers)


unscaled = ropes(lambda r: Rope(r.theta, r.dims))
no_rope = ropes(lambda r: None)
factor_one = ropes(lambda r: replace(r, attention_factor=1.0))

OFF: list[tuple[str, str, Callable[[ModelConfig], ModelConfig]]] = [
    *((case, "sliding windows", no_windows) for case, (_, settings) in CASES.items() if "sliding_window" in settings),
    *((case, "rope", no_rope) for case, (family, _) in CASES.items() if family not in ("OPT", "GPT2")),
    *((case, "qk-norm", fields(qk_norm=False)) for case in CASES if case.startswith(("qwen3", "gemma3"))),
    *((case, "activation", fields(activation="relu")) for case in CASES if case != "opt"),
    *((case, "norm eps", fields(norm_eps=1e-6)) for case in ("llama2", "qwen3", "gemma2", "phi3", "mixtral")),
    ("opt", "activation", fields(activation="gelu")),
    *((f"llama{kind}", "rope scaling", unscaled) for kind in ("3", "-linear", "-dynamic", "-yarn", "-yarn-ratio")),
    ("llama3", "low frequencies", ropes(lambda r: replace(r, low_freq_factor=r.low_freq_factor * 2))),
    ("llama3", "high frequencies", ropes(lambda r: replace(r, high_freq_factor=r.high_freq_factor * 2))),
    ("llama-yarn", "attention factor", factor_one),
    ("llama-yarn", "fast turns", ropes(lambda r: replace(r, beta_fast=8.0))),
    ("llama-yarn", "slow turns", ropes(lambda r: replace(r, beta_slow=0.25))),
    ("llama-yarn-ratio", "attention factor", factor_one),
    ("llama-yarn-ratio", "fractional range", ropes(lambda r: replace(r, truncate=True))),
    ("phi3-longrope", "rope scaling", unscaled),
    ("phi3-longrope", "long factors", ropes(lambda r: replace(r, long_factor=r.short_factor))),
    ("phi3-longrope", "attention factor", factor_one),
    ("phi3-partial", "partial rotary", lambda c: replace(c, ropes=(Rope(500.0, c.head_dim),) * c.layers)),
    *(
        (case, feature, off)
        for case in ("gemma2", "gemma3", "gemma3-vision")
        for feature, off in [
            ("norm offset", fields(norm_offset=0.0)),
            ("embedding scale", fields(embedding_scale=1.0)),
            ("attention scale", fields(attention_scale=None)),
            ("norm after attention", names(attention_post_norm=None)),
            ("norm after feed-forward", names(feed_forward_post_norm=None)),
        ]
    ),
    ("gemma2", "attention soft cap", fields(attention_soft_cap=None)),
    ("gemma2", "logit soft cap", fields(logit_soft_cap=None)),
    ("gemma3", "logit soft cap", fields(logit_soft_cap=None)),
    ("gemma3", "rope by kind of layer", swapped_ropes),
    ("gemma3", "rope scaling", unscaled),
    ("opt", "learned positions", names(positions=None)),
    ("opt", "position offset", lambda c: replace(c, position_offset=0, learned_positions=c.learned_positions + 2)),
    ("opt", "mean subtracted in norms", fields(norm="rms")),
    ("gpt2", "learned positions", names(positions=None)),
    ("gpt2-untied", "attention scale", fields(attention_scale=None)),
    ("llama2", "gate", lambda c: names(gate_up=("mlp.gate_proj",))(replace(c, gated=False))),
    ("mixtral", "normalised weights", experts(normalise_top_k=False)),
    ("qwen2-moe", "normalised weights", experts(normalise_top_k=True)),
    ("qwen2-moe-mixed", "normalised weights", experts(normalise_top_k=False)),
    ("qwen3-moe", "normalised weights", experts(normalise_top_k=False)),
    ("qwen3-moe-plain", "normalised weights", experts(normalise_top_k=True)),
    ("qwen2-moe", "shared expert", experts(shared_intermediate=0)),
    ("qwen2-moe-mixed", "shared expert", experts(shared_intermediate=0)),
    ("mixtral", "second expert", experts(top_k=1)),
]


@pytest.mark.parametrize("case, feature, off", OFF, ids=[f"{case}: {feature}" for case, feature, _ in OFF])
def test_switching_a_feature_off_is_noticed(case: str, feature: str, off: Callable[[ModelConfig], ModelConfig]) -> None:
    o = oracle(case)
    config = off(o.config)
    assert config != o.config
    ours = o.decoder(config).forward(o.ids[0], ForwardBatch((LONG,), LONG))
    assert difference(ours, o.logits[0]) > NOTICED


BIASES = [
    ("llama-biases", "qkv_bias", "v_proj.bias"),
    ("llama-biases", "output_bias", "o_proj.bias"),
    ("llama-biases", "feed_forward_bias", "up_proj.bias"),
    ("qwen2", "qkv_bias", "q_proj.bias"),
    ("qwen2-moe", "qkv_bias", "q_proj.bias"),
    ("qwen3-biases", "qkv_bias", "k_proj.bias"),
    ("opt", "feed_forward_bias", "fc1.bias"),
    ("gpt2", "qkv_bias", "c_attn.bias"),
]


@pytest.mark.parametrize("case, flag, ending", BIASES)
def test_a_bias_that_is_missing_is_an_error_and_one_that_is_dropped_is_noticed(
    case: str, flag: str, ending: str
) -> None:
    o = oracle(case)
    left = {name: tensor for name, tensor in o.tensors.items() if not name.endswith(ending)}
    assert len(left) < len(o.tensors)
    with user_error("checkpoint_incomplete"):
        o.decoder(tensors=left)
    ours = o.decoder(replace(o.config, **{flag: False}), left).forward(o.ids[0], ForwardBatch((LONG,), LONG))
    assert difference(ours, o.logits[0]) > NOTICED


def test_the_two_shapes_of_gelu_are_told_apart() -> None:
    """They differ by less than 5e-4 at any input: more than the tolerance of equality, less than that of features."""
    o = oracle("gpt2")
    ours = o.decoder(replace(o.config, activation="gelu")).forward(o.ids[0], ForwardBatch((LONG,), LONG))
    assert difference(ours, o.logits[0]) > EQUAL


def test_tied_models_are_read_from_either_name() -> None:
    o = oracle("llama3")
    table = o.tensors["model.embed_tokens.weight"]
    rest = {name: tensor for name, tensor in o.tensors.items() if tensor is not table}
    for stored in ({"model.embed_tokens.weight": table}, {"lm_head.weight": table}):
        decoder = o.decoder(tensors={**rest, **stored})
        assert difference(decoder.forward(o.ids[1], ForwardBatch((SHORT,), SHORT)), o.logits[1]) <= EQUAL
        assert decoder.head.weight is decoder.embedding.table
    both = o.decoder(tensors={**rest, "model.embed_tokens.weight": table, "lm_head.weight": table.clone()})
    assert both.head.weight is both.embedding.table
    apart = o.decoder(tensors={**rest, "model.embed_tokens.weight": table, "lm_head.weight": -table})
    assert difference(apart.forward(o.ids[1], ForwardBatch((SHORT,), SHORT)), -o.logits[1]) <= EQUAL


@pytest.mark.parametrize("case, ours, theirs", [("gpt2", "transformer.", ""), ("opt", "model.", "")])
def test_checkpoints_of_base_models_are_read(case: str, ours: str, theirs: str) -> None:
    o = oracle(case)
    decoder = o.decoder(tensors={theirs + name.removeprefix(ours): t for name, t in o.tensors.items()})
    assert difference(decoder.forward(o.ids[1], ForwardBatch((SHORT,), SHORT)), o.logits[1]) <= EQUAL


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_other_spellings_of_a_model_with_vision(prefix: str) -> None:
    o = oracle("gemma3-vision")
    renamed = {name.replace("language_model.model.", prefix): t for name, t in o.tensors.items()}
    decoder = o.decoder(tensors=renamed)
    assert difference(decoder.forward(o.ids[1], ForwardBatch((SHORT,), SHORT)), o.logits[1]) <= EQUAL


@pytest.mark.parametrize(
    "case, name",
    [
        ("llama2", "model.layers.1.self_attn.q_proj.weight"),
        ("llama2", "model.layers.1.mlp.down_proj.weight"),
        ("llama2", "model.embed_tokens.weight"),
        ("llama2", "lm_head.weight"),
        ("llama2", "model.norm.weight"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("gpt2", "transformer.wpe.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("qwen2-moe", "model.layers.0.mlp.shared_expert_gate.weight"),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named(case: str, name: str) -> None:
    o = oracle(case)
    wrong = torch.cat([o.tensors[name]] * 2)
    with user_error("checkpoint_mismatch"):
        o.decoder(tensors={**o.tensors, name: wrong})


def test_chosen_rows_and_watched_blocks() -> None:
    o = oracle("gemma2")
    decoder = o.decoder()
    seen: list[Tensor] = []
    rows = torch.tensor([LONG - 1, 3])
    some = decoder.forward(o.ids[0], ForwardBatch((LONG,), LONG), rows, lambda i, hidden: seen.append(hidden))
    assert difference(some, o.logits[0][rows]) <= EQUAL
    assert len(seen) == o.config.layers
    assert difference(decoder.logits(seen[-1]), o.logits[0]) <= EQUAL

    hidden = decoder.embedding.forward(o.ids[0], torch.arange(LONG))
    with torch.inference_mode():
        for block, expected in zip(decoder.blocks, seen, strict=True):
            hidden = block.run(hidden, ForwardBatch((LONG,), LONG))
            assert difference(hidden, expected) <= EQUAL


@pytest.mark.parametrize("case", ["llama2", "gpt2", "qwen2-moe"])
def test_the_tap_sees_every_linear_that_runs(case: str) -> None:
    o = oracle(case)
    decoder = o.decoder()
    block, step = decoder.blocks[0], ForwardBatch((LONG,), LONG)
    taken: dict[str, int] = {}

    def hook(linear: Linear, rows: Tensor) -> None:
        assert rows.shape[1] == linear.shape[1]
        taken[linear.name] = taken.get(linear.name, 0) + len(rows)

    with torch.inference_mode():
        block.run(decoder.embedding.forward(o.ids[0], step.positions), step, hook)
    assert set(taken) == {linear.name for linear in block.linears()}
    if o.config.experts is None:
        assert set(taken.values()) == {LONG}
    else:
        routed = [n for name, n in taken.items() if ".experts." in name and name.endswith("down_proj")]
        assert sum(routed) == LONG * o.config.experts.top_k


def test_progress_is_reported_for_each_block() -> None:
    o = oracle("llama2")
    done: list[tuple[int, int]] = []
    build(o.config, Stored(o.config.names, o.tensors), lambda i, total: done.append((i, total)))
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_a_cache_can_be_cut_back() -> None:
    o = oracle("mistral")
    decoder, ids = o.decoder(), o.ids[0]
    cache = decoder.cache(LONG)
    decoder.forward(torch.cat([ids[:20], ids[:5]]), ForwardBatch((25,), LONG, cache))
    cache.truncate(0, 20)
    out = decoder.forward(ids[20:], ForwardBatch((LONG - 20,), LONG, cache))
    assert difference(out, o.logits[0][20:]) <= EQUAL


def test_what_does_not_fit_is_refused() -> None:
    o = oracle("gpt2")
    decoder = o.decoder()
    with pytest.raises(ValueError, match="2 too few"):
        ForwardBatch((8,), 8, KVCache(o.config, 6))
    with user_error("context_exceeded"):
        decoder.forward(o.ids[0], ForwardBatch((LONG,), 49))
