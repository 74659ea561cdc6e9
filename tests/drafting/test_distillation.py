"""Training of early exits and small models: their losses, what is written, and drafts that the engine makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.checkpoints.drafts import early_exit
from attar.checkpoints.sources import hf
from attar.drafting.early_exit import ExitLearner
from attar.drafting.run import DraftTraining, Kind, train_draft
from attar.drafting.small import SmallLearner
from attar.drafting.target import Target, frequent
from attar.engine.llm.llm import LLM
from attar.model.cache import ForwardBatch
from attar.protocol.request import SamplingParams
from tests.errors import user_error

CLOSE = 1e-4  # of logits and relative of losses, float32


def shaken(learner: ExitLearner | SmallLearner) -> None:
    with torch.no_grad():
        for place, weight in enumerate(learner.parameters()):
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(place)) / 20
            weight.copy_(weight.bfloat16())  # as an exit is stored


def test_the_learner_computes_the_exit_that_is_read(target: Target, ids: Tensor, tmp_path: Path) -> None:
    learner = ExitLearner(target, 1, frequent(ids, 64, 256), "published")
    shaken(learner)
    learner.head = learner.head.bfloat16().float()
    states = target.states(ids[:1], learner.layers)
    learner.write(tmp_path)
    with torch.no_grad():
        wanted = learner._x(states) @ learner.head.T
    made = early_exit.read(tmp_path, target.decoder)
    found = made.forward(ids[0], ForwardBatch((32,), 64))
    assert (found - wanted).abs().max() < CLOSE


def test_the_learner_computes_the_model_that_is_read(target: Target, ids: Tensor, tmp_path: Path) -> None:
    learner = SmallLearner(target, 2, 64, "published", 0)
    shaken(learner)
    learner.write(tmp_path)
    with torch.no_grad():
        wanted = learner._x(ids[:1]) @ learner.weights[learner.embedding].T
    found = hf.load(tmp_path, torch.float32).forward(ids[0], ForwardBatch((32,), 64))
    assert (found - wanted).abs().max() < CLOSE * float(wanted.abs().max())


@pytest.mark.parametrize("loss", ["published", "acceptance"])
@pytest.mark.parametrize("kind", ["exit", "small"])
def test_loss_and_gradient_are_those_of_autograd(target: Target, ids: Tensor, kind: str, loss: str) -> None:
    kept = frequent(ids, 64, 256) if kind == "exit" else None
    made: ExitLearner | SmallLearner = (
        ExitLearner(target, 1, kept, loss) if kind == "exit" else SmallLearner(target, 1, 32, loss, 0)
    )
    shaken(made)
    some = ids[:2]
    states = target.states(some, made.layers)
    found = made.learn(some, states)
    mine = [p.grad.clone() for p in made.parameters() if p.grad is not None]
    for each in made.parameters():
        each.grad = None
    if isinstance(made, ExitLearner):
        logits = made._x(states) @ made.head.T
    else:
        logits = made._x(some) @ made.weights[made.embedding].T
    p, q = torch.softmax(target.decoder.logits(states.of(made.layers[-1])), -1), logits.softmax(-1)
    p = p if kept is None else p[:, kept]
    if loss == "published":
        total = -(p / p.sum(-1, keepdim=True) * q.log()).sum(-1).mean()
    else:
        total = -torch.minimum(p, q).sum(-1).log().mean()
    total.backward()
    assert found == pytest.approx(float(total.detach()), rel=CLOSE)
    for one, other in zip(mine, made.parameters(), strict=True):
        assert other.grad is not None
        assert (one - other.grad).norm() <= CLOSE * 10 * other.grad.norm() + 1e-7


@pytest.mark.parametrize("kind", ["exit", "small"])
def test_it_learns_and_the_engine_reads_it(tiny: Path, ids: Tensor, tmp_path: Path, kind: Kind) -> None:
    options = DraftTraining(
        kind, layers=1, width=64 if kind == "small" else None, draft_vocab=64 if kind == "exit" else None, rate=1e-2,
        epochs=12, batch=64, save_every=7,
    )  # fmt: skip
    found = train_draft(tiny, tmp_path / "made", ids, options)
    assert found.losses[-1] < found.losses[0] * 0.9
    assert found.curve[-1][1][0] > found.curve[0][1][0]
    value = json.loads((tmp_path / "made" / "training.json").read_text())
    assert (value["kind"], value["layers"], value["depths"]) == (kind, 1, None)
    assert value["source"].keys() >= {"config.json", "model.safetensors"}
    llm = LLM(tiny, draft=str(tmp_path / "made"), draft_tokens=3, verify=False)
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=2, ignore_eos=True)
    plain = LLM(tiny, verify=False).generate([ids[0, :6].tolist()], params)
    assert [each.token_ids for each in llm.generate([ids[0, :6].tolist()], params)] == [plain[0].token_ids]
    assert llm.running.engine is not None
    assert llm.running.engine.speculation is not None
    assert llm.running.engine.speculation.drafter.name == {"exit": "exit", "small": "model"}[kind]
    assert llm.running.engine.speculation.drafted > 5
    assert llm.running.engine.speculation.errors == 0


class Killed(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_bytes(tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    options = DraftTraining("small", layers=1, width=32, rate=1e-2, epochs=5, batch=64, save_every=4)
    train_draft(tiny, tmp_path / "whole", ids, options)

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("training", 6):
            raise Killed

    with pytest.raises(Killed):
        train_draft(tiny, tmp_path / "killed", ids, options, progress=kill)
    train_draft(tiny, tmp_path / "killed", ids, options)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes()


def test_settings_of_another_kind_are_refused(tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    with user_error("option_unused", "depths"):
        DraftTraining("small", depths=2)
    with user_error("option_unused", "width"):
        DraftTraining("medusa", width=64)
    with user_error("option_out_of_range", "48"):
        DraftTraining("small", width=48)
    with user_error("option_out_of_range", "3"):
        train_draft(tiny, tmp_path / "made", ids, DraftTraining("exit", layers=3))
