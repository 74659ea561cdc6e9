"""Draft heads that make trees: their guesses by an oracle, texts to the bit, and the option that asks for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attar.checkpoints.drafts import eagle, eagle1, medusa
from attar.engine import startup
from attar.engine.llm.llm import LLM
from attar.engine.speculation import drafter
from attar.execution import kv_cache
from attar.kernels import dispatch, ops
from attar.kv.schemes import SCHEMES
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.protocol.messages import Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from attar.protocol.speculation import check_draft
from attar.sampling.drafters.branching import static_tree
from attar.sampling.drafters.drafter import Draft, DraftRequest
from attar.sampling.drafters.eagle import BEAM, EagleDrafter
from attar.sampling.drafters.first_of import FirstOf
from attar.sampling.drafters.medusa import MedusaDrafter
from attar.scheduling import draft_tree
from tests.checkpoints.drafts import test_eagle as eagle_layout
from tests.checkpoints.drafts import test_eagle1 as eagle1_layout
from tests.checkpoints.drafts.test_medusa import oracle, served, write
from tests.engine.conftest import CONTEXT, ROOM, TIGHT, answers, make_engine, run, run_as_they_come
from tests.engine.drafts.test_draft_head import demo_head  # noqa: F401
from tests.engine.test_engine import some_requests
from tests.errors import user_error

DRAFTING = SchedulerConfig(max_step_tokens=48, max_drafts=16)

Guesses = list[tuple[list[int], Draft]]


def eagle_drafter(layout: ModuleType, folder: Path, decoder: Decoder, blocks: int = 40) -> EagleDrafter:
    path = layout.write(folder, layout.config(), layout.tensors())
    read = eagle.read if layout is eagle_layout else eagle1.read
    store = None if decoder.store is None else dispatch.store("exact")
    return EagleDrafter(read(path, decoder, store), CONTEXT, blocks, decoder.lossless, tree=True)


def medusa_drafter(folder: Path, decoder: Decoder) -> MedusaDrafter:
    heads = medusa.read(write(folder, *served()), decoder, None if decoder.store is None else dispatch.store("exact"))
    return MedusaDrafter(heads, decoder.final_norm, decoder.config.layers, tree=True)


def guesses_of(made: MedusaDrafter | EagleDrafter, decoder: Decoder, nodes: int, prompt: Sequence[int]) -> Guesses:
    """The trees that a drafter makes along a greedy text, with the tokens before each."""
    found: Guesses = []
    real = made.draft

    def draft(requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = real(requests)
        found.extend((list(r.sequence.tokens), d) for r, d in zip(requests, drafts, strict=True))
        return drafts

    made.draft = draft  # type: ignore[method-assign]
    engine = make_engine(decoder, limits=DRAFTING, drafter=made, draft_tree=nodes, context=128)
    run(engine, [Submit("a", tuple(prompt), SamplingParams(max_tokens=14, temperature=0))])
    assert engine.speculation is not None
    assert engine.speculation.errors == 0
    assert len(found) > 4
    return found


def test_trees_of_medusa_heads_have_the_best_guesses_of_each(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = tiny_decoder(store=dispatch.store("exact"))
    tensors = served()[1]
    for tokens, draft in guesses_of(medusa_drafter(tmp_path / "head", decoder), decoder, 8, (5, 6, 7)):
        step = ForwardBatch((len(tokens) - 1,), 64, keep=(3,))
        decoder.states(torch.tensor(tokens[:-1]), step)
        x = ops.norm(step.kept.of(3)[-1:], None, decoder.final_norm)[1]
        best = [
            oracle(x, [(tensors[f"blocks.{k}.layers.0.weight"], None)], tensors[f"lm_heads.{k}.weight"])[0]
            .topk(8)
            .indices.tolist()
            for k in range(3)
        ]
        shape = static_tree(8, 3)
        assert draft.parents == tuple(node.parent for node in shape)
        assert list(draft.tokens) == [best[node.depth][node.rank] for node in shape]


@pytest.mark.parametrize("length", [17, 60, 62])  # the tree lies in a block, or in two
@pytest.mark.parametrize("layout", [eagle_layout, eagle1_layout])
def test_trees_of_eagle_heads_are_those_of_the_oracle(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path, layout: ModuleType, length: int
) -> None:
    """The best nodes of those that are continued, by the product of probabilities, behind right and wrong drafts."""
    decoder, parts = tiny_decoder(store=dispatch.store("exact")), layout.tensors()
    made = eagle_drafter(layout, tmp_path / "head", decoder)
    table = decoder.embedding.forward(torch.arange(97), torch.zeros(97, dtype=torch.int64))
    layers = (0, 1, 2) if layout is eagle_layout else (3,)
    for tokens, draft in guesses_of(made, decoder, 8, [5 + i % 60 for i in range(length)]):
        step = ForwardBatch((len(tokens) - 1,), 128, keep=layers)
        decoder.states(torch.tensor(tokens[:-1]), step)
        if layout is eagle_layout:
            states = torch.cat([step.kept.of(layer) for layer in layers], 1) @ parts["fc.weight"].T
        else:
            states = ops.norm(step.kept.of(3), None, decoder.final_norm)[1]

        def behind(text: list[int], states: torch.Tensor) -> tuple[torch.Tensor, list[tuple[float, int]]]:
            """The states along a text, and the best tokens behind it with the logarithms of their probabilities."""
            if layout is eagle_layout:
                found, logits = eagle_layout.oracle(parts, table[torch.tensor(text)], states)
            else:
                found, logits = eagle1_layout.oracle(parts, table[torch.tensor(text)], states, table)
            best = logits[-1].double().log_softmax(-1).topk(BEAM)
            ids = eagle_layout.TOKENS[best.indices] if layout is eagle_layout else best.indices
            return torch.cat((states, found[-1:])), list(zip(best.values.tolist(), ids.tolist(), strict=True))

        level: list[tuple[float, list[int], torch.Tensor]] = [(0.0, tokens[1:], states)]
        nodes: list[tuple[float, list[int]]] = []
        for _ in range(5):
            grown: list[tuple[float, list[int], torch.Tensor]] = []
            for value, text, before in level:
                after, best = behind(text, before)
                grown += [(value + more, [*text, token], after) for more, token in best]
            nodes += [(value, text) for value, text, _ in grown]
            level = sorted(grown, key=lambda each: -each[0])[:BEAM]
        wanted = [text[len(tokens) - 1 :] for _, text in sorted(nodes, key=lambda each: -each[0])[:8]]
        depths = draft_tree.depths(draft.parents)
        texts: list[list[int]] = [[]]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            texts.append([*texts[parent], token])
        assert texts[1:] == wanted
        assert max(depths) <= 5


@pytest.mark.parametrize("kind", ["medusa", "suffix,medusa", "eagle3", "eagle"])
@pytest.mark.parametrize("kv", [None, "int8"])
@pytest.mark.parametrize("seed", range(2))
def test_no_schedule_with_trees_of_a_head_changes_a_bit(
    decoder: Decoder, tmp_path: Path, seed: int, kv: str | None, kind: str
) -> None:
    draw = random.Random(seed)
    asks = some_requests(seed + 9600, 8, decoder.config.vocab_size)
    alone = {}
    for ask in asks:
        alone |= answers(run(make_engine(decoder, kv=kv), [ask]))
    layout = eagle_layout if kind == "eagle3" else eagle1_layout
    head: MedusaDrafter | EagleDrafter = (
        medusa_drafter(tmp_path / "head", decoder)
        if "medusa" in kind
        else eagle_drafter(layout, tmp_path / "head", decoder, draw.choice((2, 40)))
    )
    made = make_engine(
        decoder, draw.choice((ROOM, TIGHT)), DRAFTING, kv=kv, drafter=FirstOf(head) if "suffix" in kind else head,
        draft_tree=draw.choice((4, 8, 16)),
    )  # fmt: skip
    assert answers(run_as_they_come(made, asks, draw)) == alone
    assert made.speculation is not None
    assert made.speculation.errors == 0
    assert made.speculation.drafted > 0


def test_trees_are_served(demo: Path, demo_head: Path) -> None:  # noqa: F811
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    plain = LLM(demo, verify=False).generate("Once upon a time", params)
    llm = LLM(demo, draft=str(demo_head), draft_tree=4, verify=False)
    assert [each.token_ids for each in llm.generate("Once upon a time", params)] == [plain[0].token_ids]
    assert llm.running.engine is not None
    assert llm.running.engine.speculation is not None
    assert llm.running.engine.speculation.drafted > 10
    assert llm.running.engine.speculation.errors == 0
    settings = Settings(
        str(demo), "", context=256, memory=700 << 20, threads=1, draft=f"suffix,{demo_head}", draft_tree=8
    )
    made = startup.start_engine(settings)[0]
    assert made.speculation is not None
    assert made.speculation.trees


def test_what_makes_no_trees_is_refused_by_name(demo: Path) -> None:
    for name, tokens, tree, code in (
        (None, None, 4, "option_unused"), ("suffix", None, 4, "option_conflict"),
        ("lookahead", None, 4, "option_conflict"), ("./head", 3, 4, "option_conflict"),
        ("./head", None, 1, "option_out_of_range"), ("./head", None, 17, "option_out_of_range"),
    ):  # fmt: skip
        with user_error(code, "draft-tree" if name in (None, "./head") else str(name)):
            check_draft(name, tokens, tree)
    check_draft("./head", None, 16)
    llm = LLM(demo, verify=False)
    with user_error("option_conflict", "draft model", "Medusa"):
        drafter(str(demo), llm.model, 64, 1, activations="int8g128", verify=False, trees=True)
    elsewhere = SimpleNamespace(device=torch.device("cuda"))
    with user_error("option_conflict", "CPUs"):
        kv_cache.check_trees(elsewhere, SCHEMES["int8"])  # type: ignore[arg-type]
