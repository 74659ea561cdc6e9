"""Traces of the three kinds, small ones made here and the real ones where they are."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.load import traces
from attar.load.traces import HIGH, LOW, Ask, Synthetic
from tests.errors import user_error

BLOCKS = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 3500, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    {"timestamp": 3500, "input_length": 600, "output_length": 33, "hash_ids": [0, 7]},
]


def put(path: Path, lines: list[Any]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    data = text.encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def shared_beginning(a: Ask, b: Ask) -> int:
    pairs = zip(a.prompt, b.prompt, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.prompt), len(b.prompt)))


@pytest.mark.parametrize("name", ["blocks.jsonl", "blocks.jsonl.xz"])
@pytest.mark.parametrize("divisor", [1, 16])
def test_hash_blocks_share_what_the_trace_shares(tmp_path: Path, name: str, divisor: int) -> None:
    asks = traces.read(put(tmp_path / name, BLOCKS), divisor=divisor)
    assert [len(ask.prompt) for ask in asks] == [-(-n // divisor) for n in (1100, 1024, 600)]
    assert [ask.output for ask in asks] == [-(-n // divisor) for n in (50, 1, 33)]
    assert [ask.at for ask in asks] == [0.0, 2.5, 2.5]
    assert shared_beginning(asks[0], asks[1]) == 1024 // divisor
    assert 512 // divisor <= shared_beginning(asks[0], asks[2]) <= 512 // divisor + 3  # tokens may agree by chance
    assert all(LOW <= token < HIGH for ask in asks for token in ask.prompt)


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    lines = [
        {"input_toks": 4, "output_toks": 9, "arrival_time_ns": 2_000_000_000, "input_tok_ids": [5, 6, 7, 8]},
        {"input_toks": 2, "output_toks": 0, "arrival_time_ns": 500_000_000, "input_tok_ids": [1, 2]},
    ]
    path = put(tmp_path / "ids.jsonl", lines)
    assert traces.read(path) == [Ask(0.0, (1, 2), 1), Ask(1.5, (5, 6, 7, 8), 9)]
    assert traces.read(path, divisor=3) == [Ask(0.0, (1,), 1), Ask(1.5, (5, 6), 3)]
    assert traces.read(path, count=1) == [Ask(0.0, (5, 6, 7, 8), 9)]


def test_lengths(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109"
    )
    asks = traces.read(path)
    assert [(len(ask.prompt), ask.output) for ask in asks] == [(374, 44), (396, 109)]
    assert asks[1].at == pytest.approx(4.314579)
    assert shared_beginning(*asks) < 4


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "file_wrong_kind"),
        ("a,b,c\n1,2,3\n", "file_wrong_kind"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "trace_malformed"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "trace_malformed"),
        ('{"a": 1}\n', "trace_malformed"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "trace_malformed"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}\n', "trace_malformed"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1, "hash_ids": [1]}\n', "trace_malformed"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n', "trace_malformed"),
        ('{"input_tok_ids": ["a"], "output_toks": 1, "arrival_time_ns": 0}\n', "trace_malformed"),
        ('{"input_tok_ids": [1], "output_toks": 1e99, "arrival_time_ns": 0}\n', "trace_malformed"),
        ('{"input_length"', "trace_malformed"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with user_error(sentence):
        traces.read(path)


def test_what_is_not_packed(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl.xz"
    path.write_bytes(b"plain")
    with user_error("trace_malformed", "bad.jsonl"):
        traces.read(path)


def test_divisors(tmp_path: Path) -> None:
    path = put(tmp_path / "blocks.jsonl", BLOCKS)
    with user_error("option_out_of_range"):
        traces.read(path, divisor=3)
    with user_error("option_out_of_range"):
        traces.read(path, divisor=0)


def test_synthetic_requests() -> None:
    what = Synthetic(prompt=100, output=20, spread=0.25, prefixes=3, prefix_tokens=40)
    asks = traces.synthetic(what, 200, seed=1)
    assert asks == traces.synthetic(what, 200, seed=1)
    assert asks != traces.synthetic(what, 200, seed=2)
    assert {len(ask.prompt) for ask in asks} <= set(range(75, 126))
    assert {ask.output for ask in asks} <= set(range(15, 26))
    assert len({ask.prompt[:40] for ask in asks}) == 3
    assert len({ask.prompt for ask in asks}) == 200
    exact = traces.synthetic(Synthetic(8, 3), 5)
    assert {(len(ask.prompt), ask.output) for ask in exact} == {(8, 3)}


@pytest.mark.parametrize(
    "settings",
    [{"prompt": 0}, {"output": 0}, {"spread": 1.0}, {"prefixes": 2}, {"prefix_tokens": 2},
     {"prompt": 10, "prefixes": 1, "prefix_tokens": 10}],
)  # fmt: skip
def test_impossible_synthetic_requests(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Synthetic(**settings)


prompts = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=20), min_size=1, max_size=6)


@given(prompts, st.integers(0, 10_000))
def test_shifting_changes_every_token_and_no_structure(lists: list[list[int]], by: int) -> None:
    asks = [Ask(0.0, tuple(each), 1) for each in lists]
    turned = traces.shifted(asks, by)
    everything = {token for ask in asks for token in ask.prompt}
    assert max(token for ask in turned for token in ask.prompt) <= max(everything)
    for a, b in zip(asks, turned, strict=True):
        assert len(a.prompt) == len(b.prompt)
        for x, y in zip(asks, turned, strict=True):
            assert shared_beginning(a, x) == shared_beginning(b, y)
    span = max(everything) + 1 - LOW
    if span > 1 and by % span:
        assert all(a != b for x, y in zip(asks, turned, strict=True) for a, b in zip(x.prompt, y.prompt, strict=True)
                   if a >= LOW)  # fmt: skip


@given(prompts, st.integers(LOW + 1, 4000))
def test_folding_keeps_ids_in_the_vocabulary(lists: list[list[int]], vocabulary: int) -> None:
    asks = [Ask(0.0, tuple(each), 1) for each in lists]
    inside = traces.folded(asks, vocabulary)
    assert all(0 <= token < vocabulary for ask in inside for token in ask.prompt)
    for a, b in zip(asks, inside, strict=True):
        kept = [(x, y) for x, y in zip(a.prompt, b.prompt, strict=True) if x < vocabulary]
        assert all(x == y for x, y in kept)
    with user_error("option_out_of_range"):
        traces.folded(asks, LOW)


def test_long_requests_are_left_out() -> None:
    asks = [Ask(0.0, (1,) * 10, 5), Ask(0.0, (1,) * 10, 6)]
    assert traces.within(asks, 15) == asks[:1]


def test_the_real_traces(shared: Path) -> None:
    folder = shared / "data" / "traces"
    talk = traces.read(folder / "mooncake_conversation.jsonl.xz", count=200, divisor=16)
    assert len(talk) == 200
    assert all(shared_beginning(talk[0], ask) >= 32 for ask in talk)
    ids = traces.read(folder / "sharegpt-llama-3.1-8b-300-sps10.jsonl")
    assert len(ids) == 300
    assert 29 < ids[-1].at < 30
    assert len(traces.read(folder / "AzureLLMInferenceTrace_conv.csv", count=1000, divisor=8)) == 1000
