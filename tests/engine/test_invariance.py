"""Every family: however a prompt is cut into steps and whoever is beside it, on native kernels no bit changes.

Log probabilities of the whole prompt are compared, so that no row of any step is left out. `test_engine.py` does more
of one family: random lives, preemption, prefixes, schemes for keys and values.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.model.families import ARCHITECTURES
from attar.protocol.messages import Delta, Failed, PromptLogprobs, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import make_engine
from tests.model.random_model import LLAMA, write

CONTEXT = 160
SIZES = {**LLAMA, "max_position_embeddings": CONTEXT}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 50, "sliding_window": 24, "final_logit_softcapping": 4.0}
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
MODELS: dict[str, dict[str, object]] = {
    "LlamaForCausalLM": {**SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "MistralForCausalLM": {**SIZES, "sliding_window": 24},
    "Qwen2ForCausalLM": SIZES,
    "Qwen3ForCausalLM": {**SIZES, "head_dim": 32},
    "Gemma2ForCausalLM": {**GEMMA, "attn_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": GEMMA,
    "Phi3ForCausalLM": {**SIZES, **PARTIAL},
    "OPTForCausalLM": {**SIZES, "ffn_dim": 96},
    "GPT2LMHeadModel": {"vocab_size": 120, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT},
    "MixtralForCausalLM": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 56, "norm_topk_prob": False},
    "Qwen3MoeForCausalLM": {**SIZES, **EXPERTS, "head_dim": 32, "norm_topk_prob": True},
}
LENGTHS = (40, 100, 130)
ASKED = SamplingParams(max_tokens=4, temperature=0, seed=0, logprobs=0, prompt_logprobs=0)

Said = dict[str, list[object]]


def said(decoder: Decoder, rows: int, lengths: tuple[int, ...] = LENGTHS) -> Said:
    """What prompts of these lengths get together in one engine, whose steps have so many rows."""
    engine = make_engine(decoder, 16, SchedulerConfig(max_running=4, max_step_tokens=rows), context=CONTEXT)
    for length in lengths:
        engine.submit(Submit(f"{length}", tuple((i * 37 + length) % 120 for i in range(length)), ASKED))
    found: Said = {}
    while not engine.idle:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta | PromptLogprobs):
                found.setdefault(event.id, []).append(event.logprobs)
    return found


@pytest.mark.parametrize("activations", ["exact", "int8g32"])
@pytest.mark.parametrize("architecture", MODELS)
def test_no_bit_depends_on_how_a_prompt_is_cut_nor_on_company(
    architecture: str, activations: str, tmp_path: Path
) -> None:
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    path = write(tmp_path / "model", {**MODELS[architecture], "architectures": [architecture]})
    decoder = LLM(path, activations=activations, verify=False).decoder
    assert decoder.store is not None
    assert not decoder.store.refused
    alone: Said = {}
    for length in LENGTHS:
        alone |= said(decoder, 512, (length,))
    assert all(len(each) == 1 + ASKED.max_tokens for each in alone.values())
    for rows in (512, 33, 8):  # torch's loops are of 16 or 32 numbers, and a rest
        assert said(decoder, rows) == alone, f"in steps of {rows} rows"


def test_every_family_is_here() -> None:
    """But the text part of a Gemma 3 that sees, which is a Gemma 3."""
    assert MODELS.keys() == ARCHITECTURES.keys() - {"Gemma3ForConditionalGeneration"}
