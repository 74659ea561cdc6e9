"""Rules that accept drafts: which distribution they give, and how often they reject, against theory."""

from __future__ import annotations

import torch
from torch import Tensor

from attar.kernels import noise
from attar.metrics.accept_rules import draw, ratio, total_variation, typical, typical_tv

STATES = 8
MANY = 100_000


def distributions(*shape: int, seed: int, sharp: float = 2.0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(*shape, generator=numbers, dtype=torch.float64)).softmax(-1)


def uniforms(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def frequencies(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=STATES).double() / len(tokens)


def one(p: Tensor, q: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Many chains of one draft: p for both rows, and drafts drawn from q."""
    drafts = draw(q.expand(MANY, -1), uniforms(MANY, seed=seed))[:, None]
    return p.expand(MANY, 2, -1), q.expand(MANY, 1, -1), drafts


def test_the_ratio_test_gives_the_targets_distribution_and_accepts_as_often_as_any_rule_can() -> None:
    for seed in range(5):
        p, q = distributions(STATES, seed=seed), distributions(STATES, seed=100 + seed)
        rows, guesses, drafts = one(p, q, seed)
        count, behind = ratio(rows, guesses, drafts, uniforms(MANY, 2, seed=50 + seed))
        first = torch.where(count > 0, drafts[:, 0], behind)
        assert total_variation(frequencies(first), p) < 0.01
        assert abs(count.double().mean() - (1 - total_variation(p, q))) < 0.01


def test_drafts_behind_a_rejected_one_are_dropped() -> None:
    p, q = torch.zeros(1, 4, STATES).double(), torch.zeros(1, 3, STATES).double()
    for row, token in enumerate((1, 2, 3, 4)):
        p[0, row, token] = 1
    for row, token in enumerate((1, 5, 3)):
        q[0, row, token] = 1
    drafts = torch.tensor([[1, 5, 3]])
    count, behind = ratio(p, q, drafts, torch.zeros(1, 4).double())
    assert (count.item(), behind.item()) == (1, 2)
    assert [each.item() for each in typical(p, drafts, torch.zeros(1).double())] == [1, 2]
    drafts = torch.tensor([[1, 2, 3]])
    assert [each.item() for each in ratio(p, p[:, :-1], drafts, torch.zeros(1, 4).double())] == [3, 4]


def test_typical_acceptance_changes_the_distribution_by_what_it_says() -> None:
    changes = []
    for seed in range(5):
        p, q = distributions(STATES, seed=seed, sharp=1.0), distributions(STATES, seed=100 + seed, sharp=1.0)
        rows, _, drafts = one(p, q, seed)
        count, behind = typical(rows, drafts, uniforms(MANY, seed=50 + seed))
        first = torch.where(count > 0, drafts[:, 0], behind)
        changes.append(typical_tv(p, q))
        assert abs(total_variation(frequencies(first), p) - changes[-1]) < 0.01
        assert typical_tv(p, p) < 1
    assert max(changes) > 0.1


def test_rejections_along_a_chain_are_those_of_the_theorem() -> None:
    """Yin et al. (arXiv 2411.00841): with the ratio test, sum over the positions of the expected TV, in a chain of 50
    tokens. With the match rule, between that and the sum of 2 TV / (1 + TV)."""
    length, chains = 50, 6000
    p, q = distributions(length, STATES, STATES, seed=1), distributions(length, STATES, STATES, seed=2, sharp=1.5)
    tv = total_variation(p, q)  # [T, state before]
    there = torch.full((STATES,), 1 / STATES, dtype=torch.float64)
    expected = most = 0.0
    for at in range(length):
        expected += float(there @ tv[at])
        most += float(there @ (2 * tv[at] / (1 + tv[at])))
        there = there @ p[at]
    before = matched = torch.arange(chains) % STATES
    rejected = differ = 0
    for at in range(length):
        drafts = draw(q[at, before], uniforms(chains, seed=1000 + at))[:, None]
        rows = p[at, before][:, None].expand(-1, 2, -1)
        count, behind = ratio(rows, q[at, before][:, None], drafts, uniforms(chains, 2, seed=2000 + at))
        rejected += int((count == 0).sum())
        before = torch.where(count > 0, drafts[:, 0], behind)
        shared = noise.gumbel(noise.draws(range(chains), [at] * chains), STATES)
        token = (p[at, matched].log() + shared).argmax(-1)
        differ += int((token != (q[at, matched].log() + shared).argmax(-1)).sum())
        matched = token
    assert abs(rejected / chains / expected - 1) < 0.01
    assert expected < differ / chains < most
