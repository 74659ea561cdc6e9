"""Training of draft heads: they learn what their target says, killed runs resume, and the engine reads the output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.checkpoints.receipts import receipt
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.texts import sample_from, token_hash
from attar.compression.training.trainable_model import schedule
from attar.drafting.eagle import EagleLearner
from attar.drafting.medusa import DECAY, MedusaLearner
from attar.drafting.run import SLOW, DraftTraining, Optimizer, train_draft
from attar.drafting.target import Target, frequent
from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams
from tests.errors import user_error

OPTIONS = DraftTraining(depths=2, draft_vocab=64, rate=1e-2, epochs=12, batch=64, save_every=7)
CLOSE = 1e-4  # relative, of losses and gradients in float32


@pytest.mark.parametrize("loss", ["published", "acceptance"])
@pytest.mark.parametrize("tokens", [None, 64])
def test_loss_and_gradient_are_those_of_autograd(target: Target, ids: Tensor, loss: str, tokens: int | None) -> None:
    kept = None if tokens is None else frequent(ids, tokens, 256)
    learner, some = MedusaLearner(target, 2, kept, loss), ids[:2].clone()
    some[1] = some[1].flip(0)
    with torch.no_grad():
        for weight in learner.weights:
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 30)
    states = target.states(some, learner.layers)
    found = learner.learn(some, states)
    hidden, length = states.of(3).view(2, 32, -1), 32
    p = torch.softmax(target.decoder.logits(hidden.flatten(0, 1)), -1).view(2, 32, -1)
    weights = [w.detach().clone().requires_grad_() for w in learner.weights]
    x = target.normed(hidden.flatten(0, 1)).view(2, 32, -1)
    total = torch.zeros(())
    vocabulary = torch.arange(256) if kept is None else kept
    for k, weight in enumerate(weights):
        terms = []
        for s in range(2):
            for t in range(length - k - 2):
                state = x[s, t] + torch.nn.functional.silu(weight @ x[s, t])
                q = torch.softmax(learner.head @ state, -1)
                place = (vocabulary == some[s, t + k + 2]).nonzero()
                if loss == "acceptance":
                    terms.append(-torch.minimum(p[s, t + k + 1][vocabulary], q).sum().log())
                elif len(place):
                    terms.append(-q[place[0, 0]].log())
        total = total + DECAY**k * torch.stack(terms).mean()
    total.backward()
    assert found == pytest.approx(float(total.detach()), rel=CLOSE)
    for mine, theirs in zip(learner.weights, weights, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad - theirs.grad).norm() < CLOSE * theirs.grad.norm()


def test_it_learns_and_the_engine_reads_it(tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    found = train_draft(tiny, tmp_path / "head", ids, OPTIONS)
    assert found.losses[-1] < found.losses[0] / 2
    assert [at for at, _ in found.curve] == sorted(at for at, _ in found.curve)
    assert found.curve[0][0] == 0
    value = json.loads((tmp_path / "head" / "training.json").read_text())
    assert value["kind"] == "medusa"
    assert value["source"].keys() >= {"config.json", "model.safetensors"}
    assert value["files"]["model.safetensors"] == receipt.sha256(tmp_path / "head" / "model.safetensors")
    assert value["curve"][-1][0] == found.curve[-1][0]
    llm = LLM(tiny, draft=str(tmp_path / "head"), draft_tokens=2, verify=False)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    plain = LLM(tiny, verify=False).generate([ids[0, :6].tolist()], params)
    assert [each.token_ids for each in llm.generate([ids[0, :6].tolist()], params)] == [plain[0].token_ids]
    assert llm.running.engine is not None
    assert llm.running.engine.speculation is not None
    assert llm.running.engine.speculation.drafted > 5


class Killed(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_bytes(tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    whole = train_draft(tiny, tmp_path / "whole", ids, OPTIONS)

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("training", 11):
            raise Killed

    with pytest.raises(Killed):
        train_draft(tiny, tmp_path / "killed", ids, OPTIONS, progress=kill)
    with user_error("resume_mismatch", "rate"):
        train_draft(tiny, tmp_path / "killed", ids, DraftTraining(depths=2, draft_vocab=64, rate=0.5))
    steps: list[int] = []
    points: list[tuple[int, tuple[float, ...]]] = []
    found = train_draft(
        tiny, tmp_path / "killed", ids, OPTIONS,
        progress=lambda stage, done, total: steps.append(done) if stage == "training" else None,
        watch=lambda tokens, shares, seconds: points.append((tokens, tuple(shares))),
    )  # fmt: skip
    assert tuple(points) == found.curve
    assert len(found.seconds) == len(points)
    assert list(found.seconds) == sorted(found.seconds)
    assert steps[0] == 8
    assert (found.losses, found.curve) == (whole.losses, whole.curve)
    for name in ("model.safetensors", "config.json", "training.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_text_that_the_model_writes(tiny: Path, tmp_path: Path) -> None:
    """It is that of `sample_from`; a killed run finds it, and resumes to the same bytes."""
    amount = Amount(8, 16, seed=4)
    options = DraftTraining(depths=2, draft_vocab=64, rate=1e-2, epochs=3, batch=64, save_every=2)
    train_draft(tiny, tmp_path / "whole", amount, options)
    value = json.loads((tmp_path / "whole" / "training.json").read_text())
    assert value["written"] == {"samples": 8, "length": 16, "seed": 4, "drawn": 0}
    assert value["text"] == token_hash(sample_from(Target(tiny).decoder, amount))

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("training", 3):
            raise Killed

    with pytest.raises(Killed):
        train_draft(tiny, tmp_path / "killed", amount, options, progress=kill)
    stages: list[str] = []
    train_draft(tiny, tmp_path / "killed", amount, options, progress=lambda stage, done, total: stages.append(stage))
    assert "sampling" not in stages
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes()


def test_agreement_is_the_share_of_equal_best_tokens(target: Target, ids: Tensor) -> None:
    """Untrained heads of all tokens are the LM head itself: head k says at a row what the target says there."""
    learner = MedusaLearner(target, 2, None, "published")
    states = target.states(ids[:2], learner.layers)
    best = states.best.view(2, -1)
    wanted = [(int((best[:, : 31 - k] == best[:, k + 1 :]).sum()), 2 * (31 - k)) for k in range(2)]
    assert learner.agreement(ids[:2], states) == wanted


def test_what_makes_no_sense_is_refused(tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    with user_error("text_too_short", "two sequences"):
        train_draft(tiny, tmp_path / "head", ids[:1], OPTIONS)
    with user_error("output_is_source"):
        train_draft(tiny, tiny, ids, OPTIONS)
    with user_error("option_out_of_range", "depths"):
        DraftTraining(depths=17)
    with user_error("option_unused", "speculators"):
        DraftTraining(layout="speculators")
    with user_error("name_unknown", "medusa"):
        DraftTraining(kind="hydra")  # type: ignore[arg-type]


def test_an_lm_head_that_begins_as_the_targets_learns_slowly(target: Target, ids: Tensor) -> None:
    """Adam's first step moves each number by the rate, up or down."""
    learner = EagleLearner(target, 1, None, "published", 0, ids)
    before = {name: weight.detach().clone() for name, weight in learner.weights.items()}
    done = 0.25
    Optimizer(learner, 1e-2).step(ids[:2], target.states(ids[:2], learner.layers), done)
    for name, weight in learner.weights.items():
        moved = float((weight.detach() - before[name]).abs().max())
        share = SLOW if name == "lm_head.weight" else 1.0
        assert moved == pytest.approx(1e-2 * share * schedule(done), rel=1e-3)


def test_the_most_frequent_tokens_are_drafted() -> None:
    found = frequent(torch.tensor([[5, 5, 5, 9, 9, 2]]), 2, 10)
    assert found is not None
    assert found.tolist() == [5, 9]
    assert frequent(torch.tensor([[1]]), 10, 10) is None
