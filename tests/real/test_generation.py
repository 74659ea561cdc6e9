"""Greedy answers of real models: sensible, the same every time, and the same in company."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.engine.llm import LLM
from attar.kernels import dispatch
from attar.protocol.request import SamplingParams
from attar.text.template import render_chat

pytestmark = pytest.mark.real

GREEDY = SamplingParams(max_tokens=24, temperature=0)


def asked(llm: LLM, question: str) -> list[int]:
    """Token ids of a question in the model's own chat template."""
    tokenizer = llm.tokenizer
    messages = [{"role": "user", "content": question}]
    rendered = render_chat(
        tokenizer.chat_template(), messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    return tokenizer.encode_chat(rendered)


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
