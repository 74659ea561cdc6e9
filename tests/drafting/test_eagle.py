"""Training of an EAGLE-3 head: the unrolled steps are what the engine's head computes, and it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoints.drafts import eagle
from attar.checkpoints.drafts.files import kind_of
from attar.drafting.eagle import DECAY, STRIDE, EagleLearner
from attar.drafting.run import DraftTraining, train_draft
from attar.drafting.target import Target, frequent
from attar.engine.llm.llm import LLM
from attar.kv.schemes import SCHEMES
from attar.model import cache
from attar.model.cache import ForwardBatch, KVCache
from attar.protocol.request import SamplingParams

OPTIONS = DraftTraining("eagle3", depths=2, draft_vocab=64, rate=1e-2, epochs=12, batch=64, save_every=7)
CLOSE = 1e-4  # of logits around 5, float32


def learner_of(target: Target, ids: Tensor, loss: str = "published", depths: int = 3) -> EagleLearner:
    made = EagleLearner(target, depths, frequent(ids, 64, 256), loss, 0, ids)
    with torch.no_grad():
        for name, weight in made.weights.items():
            if "norm" not in name:
                weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 12
            weight.copy_(weight.bfloat16())  # as it is stored
    made.sizes = torch.tensor([0.5, 2.0, 4.0]).repeat_interleave(target.config.hidden)  # so does fc, divided by these
    return made


def test_unrolled_steps_are_what_the_head_drafts(target: Target, ids: Tensor, tmp_path: Path) -> None:
    """Behind each row, with the text's own tokens for drafts, by the head as it is read from disk."""
    learner, some = learner_of(target, ids), ids[:1, :12]
    states = target.states(some, learner.layers)
    with torch.no_grad():
        unrolled = [x @ learner.weights["lm_head.weight"].T for _, x in learner._unrolled(some, states)]
    learner.write(tmp_path)
    head = eagle.read(tmp_path, target.decoder)
    raw = head.fuse(torch.cat([states.of(layer) for layer in head.layers], 1))
    for row in range(9):
        pages = cache.pool(head.config, 1, SCHEMES["float32"], "cpu")
        tables = torch.zeros((1, 1), dtype=torch.int32)
        step = ForwardBatch((row + 1,), 64, KVCache.over(pages, tables, [0]))
        hidden, x = head.forward(some[0, 1 : row + 2], raw[: row + 1], step)
        for depth in range(3):
            found = head.logits(x[-1:])[0, learner.tokens]
            assert (found - unrolled[depth][row]).abs().max() < CLOSE
            step = ForwardBatch((1,), 64, KVCache.over(pages, tables, [row + depth + 1]))
            if depth < 2:
                hidden, x = head.forward(some[0, row + depth + 2][None], hidden[-1:], step)


def test_fc_is_learned_for_states_of_one_size(target: Target, ids: Tensor) -> None:
    """The first row's may be a hundred times as large as others, so the median counts."""
    made = EagleLearner(target, 2, None, "published", 0, ids[:1])
    states = target.states(ids[:1], made.layers)
    for layer, size in zip(made.aux, made.sizes.view(3, -1), strict=True):
        assert states.of(layer).square().mean(1).sqrt().median() == pytest.approx(float(size[0]), rel=1e-3)
        assert torch.equal(size, size[:1].expand_as(size))


def test_chains_of_some_rows_are_those_of_all(target: Target, ids: Tensor) -> None:
    learner, some = learner_of(target, ids), ids[:2, :14]
    states = target.states(some, learner.layers)
    with torch.no_grad():
        every, found = learner._unrolled(some, states), learner._unrolled(some, states, 2, STRIDE)
    for depth, ((rows, wanted), (mine, x)) in enumerate(zip(every, found, strict=True)):
        assert mine.tolist() == [r for r in rows.tolist() if depth == 0 or (r % 14 - depth - 1) % STRIDE == 2]
        assert (x - wanted[torch.isin(rows, mine)]).abs().max() < CLOSE


@pytest.mark.parametrize("loss", ["published", "acceptance"])
def test_the_loss_is_the_sum_over_rows(target: Target, ids: Tensor, loss: str) -> None:
    learner, some = learner_of(target, ids, loss, depths=2), ids[:2, :10]
    states = target.states(some, learner.layers)
    p = torch.softmax(target.decoder.logits(states.of(3)), -1).view(2, 10, -1)
    first, total = int(some.sum()) % STRIDE, 0.0
    with torch.no_grad():
        unrolled = learner._unrolled(some, states)
    for depth, (_, x) in enumerate(unrolled):
        head = learner.weights["lm_head.weight"].detach()
        q, terms = (x @ head.T).softmax(-1).view(2, 9 - depth, -1), []
        for s in range(2):
            for row in range(first if depth else 0, 9 - depth, STRIDE if depth else 1):
                wanted = p[s, row + depth + 1]
                kept = wanted[learner.tokens]
                if loss == "acceptance":
                    terms.append(-float(torch.minimum(kept, q[s, row]).sum().log()))
                elif int(wanted.argmax()) in learner.tokens.tolist():
                    terms.append(-float((kept / kept.sum() * q[s, row].log()).sum()))
        total += DECAY**depth * sum(terms) / max(1, len(terms))
    assert learner.learn(some, states) == pytest.approx(total, rel=1e-4)
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in learner.parameters())


@pytest.mark.parametrize("speculators", [True, False])
def test_both_layouts_hold_the_same_head(target: Target, ids: Tensor, tmp_path: Path, speculators: bool) -> None:
    learner = learner_of(target, ids)
    learner.speculators = speculators
    learner.write(tmp_path)
    assert kind_of(tmp_path) == "eagle3"
    config = json.loads((tmp_path / "config.json").read_text())
    if speculators:
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
        assert config["transformer_layer_config"]["model_type"] == "llama"
        names = set(load_file(tmp_path / "model.safetensors"))
        assert {"layers.0.hidden_norm.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names
    head = eagle.read(tmp_path, target.decoder)
    assert head.layers == learner.aux
    x = torch.randn(3, target.config.hidden)
    assert (head.logits(x)[:, learner.tokens] - x @ learner.weights["lm_head.weight"].T).abs().max() < CLOSE
    assert torch.equal(head.fc.weight.float() * learner.sizes, learner.weights["fc.weight"])
    assert torch.equal(head.feed_forward.down.weight.float(), learner.weights["midlayer.mlp.down_proj.weight"])  # type: ignore[arg-type]


def test_it_learns_and_the_engine_reads_it(tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    found = train_draft(tiny, tmp_path / "head", ids, OPTIONS)
    assert found.losses[-1] < found.losses[0] * 0.9
    assert found.curve[-1][1][0] > found.curve[0][1][0]
    llm = LLM(tiny, draft=str(tmp_path / "head"), draft_tokens=2, verify=False)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    plain = LLM(tiny, verify=False).generate([ids[0, :6].tolist()], params)
    assert [each.token_ids for each in llm.generate([ids[0, :6].tolist()], params)] == [plain[0].token_ids]
    assert llm.running.engine is not None
    assert llm.running.engine.speculation is not None
    assert llm.running.engine.speculation.drafter.name == "eagle3"
    assert llm.running.engine.speculation.drafted > 5
    assert llm.running.engine.speculation.errors == 0
