"""Greedy answers of real models: sensible, the same every time, and the same in company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.protocol.request import SamplingParams

pytestmark = pytest.mark.real

GREEDY = SamplingParams(max_tokens=24, temperature=0)


def asked(llm: LLM, question: str) -> list[int]:
    """Token ids of a question in the model's own chat template."""
    return llm.encode_chat([{"role": "user", "content": question}])


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the opposite of hot?", "cold"),
        ("How many days are in a week?", "7 days"),
        ("Write a Python function that adds two numbers.", "```python\ndef add"),
    ],
)
def test_answers_are_sensible_and_the_same_by_every_way(llm: LLM, question: str, word: str) -> None:
    """`chat`, its stream, and a prompt that was rendered apart."""
    messages = [{"role": "user", "content": question}]
    answer = llm.chat(messages, GREEDY)
    assert word in answer.text
    assert answer.text == "".join(llm.stream_chat(messages, GREEDY))
    (by_ids,) = llm.generate([asked(llm, question)], GREEDY)
    assert by_ids.token_ids == answer.token_ids


def test_the_template_ends_an_answer(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "How many days are in a week?"}], GREEDY)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in llm.model.eos_ids
    assert not answer.text.endswith(("<|im_end|>", "<|endoftext|>"))


def test_a_special_token_named_as_a_stop_string_stops(llm: LLM) -> None:
    messages = [{"role": "user", "content": "How many days are in a week?"}]
    usual = llm.chat(messages, GREEDY)
    past = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    assert llm.chat(messages, past).finish_reason == "length"
    named = llm.chat(messages, replace(past, stop=("<|im_end|>",)))
    assert (named.text, named.finish_reason) == (usual.text, "stop")


def test_a_batch_changes_no_token(llm: LLM) -> None:
    questions = ("What is the opposite of hot?", "Name three colours.", "def fibonacci(n):")
    prompts = [asked(llm, question) for question in questions]
    together = [each.token_ids for each in llm.generate(prompts, GREEDY)]
    assert together == [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]


def test_exact_activations_know_the_capital_of_france(path: Path) -> None:
    """The default turns a near tie in SmolLM2's first token (0.152 to 0.140), so only exact rows are asked."""
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    llm = LLM(path, activations="exact")
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
