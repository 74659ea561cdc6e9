"""Candidates and static trees of drafters."""

from __future__ import annotations

import torch

from attar.protocol.request import SamplingParams
from attar.sampling.drafters.branching import candidates, static_tree
from attar.sampling.sampler import SampledToken, Sampler, sample


def test_a_static_tree_has_its_best_nodes_first() -> None:
    for nodes in range(1, 17):
        for depths in (1, 2, 5):
            shape = static_tree(nodes, depths)
            assert len(shape) == nodes
            costs = []
            for number, node in enumerate(shape, 1):
                assert 0 <= node.parent < number
                before = costs[node.parent - 1] if node.parent else 0
                assert node.depth == (shape[node.parent - 1].depth + 1 if node.parent else 0) < depths
                costs.append(before + node.rank + 1)
            assert costs == sorted(costs)
            assert len(set(shape)) == nodes
    assert [node.rank for node in static_tree(4, 1)] == [0, 1, 2, 3]


def test_candidates_differ_and_the_first_is_the_draw() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1.0):
        states = [Sampler(SamplingParams(temperature=temperature, seed=i), [1], 11) for i in range(3)]
        found = candidates(logits, states, 4)
        drawn = sample(logits, states)
        assert [own[0] for own in found] == [each.token_id for each in drawn if isinstance(each, SampledToken)]
        assert all(len(set(own)) == 4 for own in found)
        if not temperature:
            assert found == logits.topk(4).indices.tolist()


def test_there_are_no_more_candidates_than_tokens_that_are_allowed() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 2] = 0.0
    assert candidates(logits, [Sampler(SamplingParams(temperature=0, seed=0), [1], 5)], 3) == [[2]]
