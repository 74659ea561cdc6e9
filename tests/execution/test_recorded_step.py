"""Decode steps, recorded and not: the same bits as running every step in full, alone or in company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attar.execution.recorded_step import Decoding
from attar.kernels import dispatch
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from tests.errors import user_error

Make = Callable[..., Decoder]

PROMPTS = ([5, 9, 3], [7, 1, 1, 2, 8, 60, 4], [11])
STEPS = 20


@pytest.fixture(params=["int8", "int8g32", "exact"])
def native(request: pytest.FixtureRequest, tiny_decoder: Make) -> Decoder:
    store = dispatch.store(request.param)
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    return tiny_decoder(scheme="w4g32", store=store)


def prefilled(decoder: Decoder, prompts: tuple[list[int], ...], horizon: int, rows: int = 1) -> Decoding:
    cache = decoder.cache(horizon, len(prompts))
    lengths = tuple(map(len, prompts))
    decoder.forward(
        torch.tensor([token for prompt in prompts for token in prompt]), ForwardBatch(lengths, horizon, cache)
    )
    return Decoding(decoder, cache, horizon, rows=rows)


def tokens_of(prompt: list[int], count: int) -> list[int]:
    """Tokens to feed, different for every prompt."""
    return [(7 * prompt[0] + 13 * i) % 97 for i in range(count)]


def run(decoder: Decoder, prompts: tuple[list[int], ...]) -> list[Tensor]:
    """The logits [sequences, vocab] of every step."""
    decoding = prefilled(decoder, prompts, 40)
    fed = zip(*(tokens_of(prompt, STEPS) for prompt in prompts), strict=True)
    return [decoding.step(tokens).clone() for tokens in fed]


def test_recorded_steps_equal_the_whole_sequence_in_one_piece(native: Decoder) -> None:
    assert native.against_recording() is None
    for prompt in PROMPTS:
        ids = torch.tensor(prompt + tokens_of(prompt, STEPS))
        whole = native.forward(ids, ForwardBatch((len(ids),), 40, native.cache(40)))[len(prompt) :]
        assert torch.equal(torch.cat(run(native, (prompt,))), whole)


@pytest.mark.parametrize("rows", [2, 4, 5])
def test_steps_of_several_rows_equal_as_many_steps(native: Decoder, rows: int) -> None:
    one, several = run(native, PROMPTS), prefilled(native, PROMPTS, 40, rows)
    for first in range(0, STEPS, rows):
        fed = [token for prompt in PROMPTS for token in tokens_of(prompt, STEPS)[first : first + rows]]
        logits = several.step(fed).view(len(PROMPTS), rows, -1)
        for at in range(rows):
            assert torch.equal(logits[:, at], one[first + at])


def test_a_step_of_several_rows_that_does_not_fit_is_refused(native: Decoder) -> None:
    decoding = prefilled(native, ([5, 9, 3],), 8, rows=3)
    decoding.step([1, 2, 3])
    with user_error("context_exceeded"):
        decoding.step([1, 2, 3])


def test_company_changes_no_bit(native: Decoder) -> None:
    together = run(native, PROMPTS)
    for s, prompt in enumerate(PROMPTS):
        alone = run(native, (prompt,))
        assert all(torch.equal(step[s], one[0]) for step, one in zip(together, alone, strict=True))


def test_threads_change_no_bit(native: Decoder) -> None:
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(run(native, PROMPTS))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_a_model_that_is_not_native_runs_every_step_in_full(tiny_decoder: Make) -> None:
    decoder = tiny_decoder(scheme="w4g32")
    assert decoder.against_recording() == "the model is not laid out for the native kernels"
    prompt = PROMPTS[1]
    ids = torch.tensor(prompt + tokens_of(prompt, STEPS))
    whole = decoder.forward(ids, ForwardBatch((len(ids),), 40, decoder.cache(40)))[len(prompt) :]
    torch.testing.assert_close(torch.cat(run(decoder, (prompt,))), whole, rtol=1e-4, atol=1e-4)


def test_a_full_cache_is_an_error(native: Decoder) -> None:
    decoding = prefilled(native, ([1, 2],), 5)
    for _ in range(3):
        decoding.step([1])
    with user_error("context_exceeded"):
        decoding.step([1])
