"""The harness's view of a decoder: scores beside transformers', shared inputs, windows, greedy texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from attar.checkpoints.sources import hf
from attar.evaluation.tasks import harness_model
from attar.evaluation.tasks.harness_model import HarnessModel, Pair
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.text.tokenizer import Tokenizer
from tests.errors import user_error

Make = Callable[..., Decoder]
LOSS = 1e-4  # nats of a continuation, against transformers in float32


def made(folder: Path, context: int | None = None) -> HarnessModel:
    decoder = hf.load(folder, torch.float32)
    return HarnessModel(decoder, Tokenizer.load(folder), context or decoder.config.context, lambda *_: None)


def request(kind: Any, *args: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=args, idx=0)


@pytest.mark.parametrize("model", ["demo", "stories"])
def test_scores_are_those_of_transformers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder: Path = request.getfixturevalue(model)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    here = made(folder)
    texts = [("The cat sat on the", " mat"), ("The cat sat on the", " house"), ("Once upon a time ", "there was a dog")]
    pairs = [here._encode_pair(*text) for text in texts]
    found = here.score(pairs)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        ids = context + continuation
        with torch.no_grad():
            logits = peer(torch.tensor([ids[:-1]])).logits[0, -len(continuation) :].double()
        wanted = torch.tensor(continuation)
        expected = logits.log_softmax(-1).gather(1, wanted[:, None]).sum().item()
        assert value == pytest.approx(expected, abs=LOSS)
        assert greedy == bool((logits.argmax(-1) == wanted).all())
    monkeypatch.setattr(harness_model, "ROWS_AT_ONCE", 1)  # each alone
    for (value, _), (alone, _) in zip(found, here.score(pairs), strict=True):
        assert value == pytest.approx(alone, abs=LOSS)


def test_equal_inputs_run_once(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, seen = made(demo), []
    forward = Decoder.forward

    def counted(self: Decoder, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(len(ids))
        return forward(self, ids, *more)

    context = [5, 6, 7]
    pairs: list[Pair] = [(context, [8]), (context, [9]), ([5], [6, 7, 8]), (context, [8, 9])]
    alone = [here.score([pair])[0] for pair in pairs]
    monkeypatch.setattr(Decoder, "forward", counted)
    found = here.score(pairs)
    assert seen == [3 + 4]  # of the first three, and of the last
    assert found == [(pytest.approx(value, abs=LOSS), greedy) for value, greedy in alone]


def test_a_continuation_that_the_tokenizer_joins_with_its_context(stories: Path) -> None:
    """The whole has no more tokens than the context alone, so that the harness's rule leaves none."""
    here = made(stories)
    context, continuation = "He was happ", "y"
    assert len(here.tok_encode(context + continuation)) < len(here.tok_encode(context))
    front, back = here._encode_pair(context, continuation)
    assert "y" in here.tokens.decode(back)
    assert front + back == here.tok_encode(context + continuation)


def test_long_contexts_lose_their_beginning(demo: Path) -> None:
    here = made(demo, 6)
    ids = list(range(20, 32))
    assert here.score([(ids[:-2], ids[-2:])]) == here.score([(ids[-7:-2], ids[-2:])])
    with user_error("context_exceeded"):
        here.score([([1], list(range(7)))])


def test_rolling_windows_score_every_token_once(demo: Path) -> None:
    here = made(demo, 16)
    text = "The cat sat on the mat, and the dog sat by the door of the old house. Nobody saw them there at night."
    ids = here.tok_encode(text, add_special_tokens=False)
    assert len(ids) > 16  # more than one window
    expected, past = 0.0, [here.prefix_token_id]
    for at in range(0, len(ids), 16):
        piece = ids[at : at + 16]
        if len(piece) < 16 and at:  # the last window is as long as all others
            past = ids[len(ids) - 17 : at]
        expected += here.score([(past, piece)])[0][0]
        past = piece[-1:]
    assert here.loglikelihood_rolling([request("loglikelihood_rolling", text)]) == [pytest.approx(expected, abs=LOSS)]


def test_greedy_texts(demo: Path) -> None:
    here = made(demo)
    prompts = ["Once upon a time", "The old man looked at the sea, and", "She"]
    whole = here.generate_until([
        request("generate_until", prompt, {"until": [], "max_gen_toks": 12}) for prompt in prompts
    ])  # fmt: skip
    for prompt, text in zip(prompts, whole, strict=True):
        ids = here.tok_encode(prompt)
        for _ in range(12):
            logits = here.decoder.forward(torch.tensor(ids), ForwardBatch((len(ids),), len(ids)))
            ids.append(int(logits[-1].argmax()))
        assert text == here.tokens.decode(ids[-12:])
    word = whole[0].split()[1]
    cut = here.generate_until([request("generate_until", prompts[0], {"until": word, "max_gen_toks": 12})])
    assert cut == [whole[0].partition(word)[0]]
    with user_error("task_malformed"):
        here.generate_until([request("generate_until", "x", {"do_sample": True})])


def test_damaged_weights_are_an_error(tiny_decoder: Make, demo: Path) -> None:
    nan = {"model.norm.weight": torch.full((64,), float("nan"))}
    here = HarnessModel(tiny_decoder(tensors=nan), Tokenizer.load(demo), 16, lambda *_: None)
    with user_error("not_finite"):
        here.score([([1, 2], [3])])
