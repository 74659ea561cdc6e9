"""A draft model beside its target: what is refused, the memory, and texts that stay the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.engine import startup
from attar.engine.drafts.draft_model import check_same_tokens, memory_bytes
from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.model.config import Rope
from attar.model.decoder import Decoder
from attar.protocol.messages import Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from attar.sampling.drafters.model import ModelDrafter
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import answers, make_engine, run
from tests.errors import user_error

PARAMS = [SamplingParams(max_tokens=24, temperature=t, top_p=0.9, seed=3, ignore_eos=True) for t in (0.0, 0.8)]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn"])
def test_a_model_that_drafts_for_itself_changes_nothing_and_is_right(demo: Path, params: SamplingParams) -> None:
    plain = LLM(demo, verify=False).generate("Once upon a time", params)
    llm = LLM(demo, draft=str(demo), draft_tokens=3, verify=False)
    assert [each.token_ids for each in llm.generate("Once upon a time", params)] == [plain[0].token_ids]
    assert llm.running.engine is not None
    assert llm.running.engine.speculation is not None
    assert llm.running.engine.speculation.drafted == llm.running.engine.speculation.accepted > 12


def test_a_server_counts_the_draft_model_in_its_memory(demo: Path) -> None:
    plain = startup.start_engine(Settings(str(demo), "", context=256, memory=700 << 20, threads=1))[0]
    needed = memory_bytes(demo, 256, plain.scheduler.limits.together, 1)
    settings = Settings(str(demo), "", context=256, memory=700 << 20, threads=1, draft=str(demo))
    made = startup.start_engine(settings)[0]
    assert made.pool.total < plain.pool.total
    assert made.speculation is not None
    assert made.speculation.drafter.name == "model"
    with user_error("memory_insufficient", "draft model"):
        startup.start_engine(Settings(str(demo), "", memory=needed - 1, context=256, threads=1, draft=str(demo)))


def test_both_kinds_are_named_together(demo: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, seed=0)
    plain = LLM(demo, verify=False).generate("one two three. one two three. one two", params)
    llm = LLM(demo, draft=f"suffix,{demo}", draft_tokens=3, verify=False)
    assert llm.generate("one two three. one two three. one two", params) == plain
    assert llm.drafts[1] > 10
    settings = Settings(str(demo), "", draft=f"suffix,{demo}")
    assert settings.draft_model == str(demo)
    with user_error("file_not_found", "suffix,MODEL"):
        LLM(demo, draft="suffix,./nowhere", verify=False)


def test_another_tokenizer_is_refused(demo: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(demo, other)
    made = json.loads((other / "tokenizer.json").read_text())
    tokens = made["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (other / "tokenizer.json").write_text(json.dumps(made))
    with user_error("option_conflict", "another tokenizer"):
        LLM(demo, draft=str(other), verify=False)


def test_tokens_are_compared_up_to_the_models_own(demo: Path) -> None:
    tokenizer: Any = Tokenizer.load(demo)
    check_same_tokens(tokenizer, tokenizer, tokenizer.vocab_size)


GROWING = {
    "longrope": Rope(10000.0, 16, "longrope", original_context=24, short_factor=(1.0,) * 8, long_factor=(3.0,) * 8),
    "dynamic": Rope(10000.0, 16, "dynamic", factor=4.0, original_context=24),
}


@pytest.mark.parametrize("rope", GROWING)
def test_angles_that_depend_on_the_length_are_the_targets(tiny_decoder: Callable[..., Decoder], rope: str) -> None:
    """A model that drafts for itself is right on both sides of the length at which its keys become others."""
    decoder = tiny_decoder(scheme="w4g32", store=dispatch.store("exact"), rope=GROWING[rope])
    asks = [Submit("a", tuple(range(15)), SamplingParams(max_tokens=30, temperature=0))]
    expected = answers(run(make_engine(decoder), asks))
    limits = SchedulerConfig(max_step_tokens=48, max_drafts=16)
    drafter = ModelDrafter(decoder, 64, 1, decoder.config.vocab_size)
    made = make_engine(decoder, limits=limits, drafter=drafter, draft_tokens=3)
    assert answers(run(made, asks)) == expected
    assert made.speculation is not None
    assert made.speculation.errors == 0
    assert made.speculation.accepted / made.speculation.drafted > 0.8  # drafts across the border have its angles


def test_sequences_that_are_drafted_for_together_share_no_block(tiny_decoder: Callable[..., Decoder]) -> None:
    """With room for one, the other gets no drafts, rather than the first one's blocks."""
    decoder = tiny_decoder(scheme="w4g32", store=dispatch.store("int8g32"))
    drafter = ModelDrafter(decoder, 64, 2, decoder.config.vocab_size, blocks=1)
    limits = SchedulerConfig(max_step_tokens=48, max_drafts=16)
    params = SamplingParams(max_tokens=30, temperature=0)
    asks = [Submit("a", (5,) * 9, params), Submit("b", (7,) * 9, params)]
    made = make_engine(decoder, limits=limits, drafter=drafter, draft_tokens=3)
    assert answers(run(made, asks)) == answers(run(make_engine(decoder), asks))
    assert made.speculation is not None
    assert made.speculation.drafted == made.speculation.accepted > 20
    assert made.speculation.errors == 0


def test_a_smaller_vocabulary_is_refused_with_both_numbers(demo: Path, tiny: Path) -> None:
    size = str(Tokenizer.load(demo).vocab_size)
    with user_error("option_conflict", "256", size):
        LLM(demo, draft=str(tiny), verify=False)


def test_a_draft_model_without_the_targets_tokenizer_is_refused(demo: Path, tiny: Path) -> None:
    with user_error("option_conflict", "no tokenizer"):
        LLM(tiny, draft=str(demo), verify=False)


def test_memory_for_one_but_not_for_both_is_refused_with_both_numbers(demo: Path) -> None:
    limits = SchedulerConfig()
    needed = memory_bytes(demo, 256, limits.together, 1)
    settings = Settings(str(demo), "", context=256, memory=needed + (8 << 20), threads=1, draft=str(demo))
    with user_error("memory_insufficient", "the model", "of the draft model", "too little"):
        startup.start_engine(settings)


def test_a_draft_model_that_yields_nan_costs_its_drafts_alone(tiny_decoder: Callable[..., Decoder]) -> None:
    target = tiny_decoder(scheme="w4g32", store=dispatch.store("int8g32"))
    broken = tiny_decoder(tensors={"model.norm.weight": torch.full((64,), torch.nan)}, store=dispatch.store("int8g32"))
    asks = [Submit(f"{i}", (5 + i,) * 9, SamplingParams(max_tokens=20, seed=i)) for i in range(2)]
    limits = SchedulerConfig(max_step_tokens=48, max_drafts=16)
    drafter = ModelDrafter(broken, 64, 2, target.config.vocab_size)
    made = make_engine(target, limits=limits, drafter=drafter, draft_tokens=3)
    assert answers(run(made, asks)) == answers(run(make_engine(target), asks))
    assert made.speculation is not None
    assert made.speculation.drafted == 0
    assert made.speculation.errors > 20
    assert drafter.pool.free == drafter.pool.total


def test_several_processes_take_no_draft_model(demo: Path) -> None:
    from attar.engine.loader import Parallel

    with user_error("option_conflict", "suffix"):
        LLM(demo, draft=str(demo), parallel=Parallel(tp=2), verify=False)
