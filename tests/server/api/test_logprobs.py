"""Log probabilities are written as they come, a few between two turns of the event loop, and say what they said."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer as Backend

from attar.protocol.messages import Event, Finished, PromptLogprobs, Ready, Submit, encode
from attar.protocol.request import SamplingParams, TokenLogprob
from attar.server.admission.rate_limits import Caller
from attar.server.api import openai
from attar.server.api.dialects.extras import Extras
from attar.server.api.logprobs import LEAST, SLICE, Columns, Content, Offsets, Turns, rows
from attar.server.api.schemas import Sampling
from attar.server.dispatcher import Dispatcher
from attar.server.engine_client.client import EngineClient
from attar.server.engine_client.connection import Connection, PromptScores
from attar.server.engine_client.connection import Event as Arrived
from attar.server.errors import APIError
from attar.server.fair_thread_pool import TextThreads
from attar.server.prompts import Echo, Prompts
from attar.server.request_handler import RequestContext, RequestHandler
from attar.text.tokenizer import Detokenizer, Tokenizer
from tests.text.test_tokenizer import byte_level, sentencepiece_like

ECHO = Echo("", array("I", bytes(4 << 16)))  # of any number of tokens


def scores(tokens: int, top: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(at % 50, -0.5, tuple((id, -0.5 - id) for id in range(top))) for at in range(tokens))


def raw(logprobs: tuple[TokenLogprob, ...]) -> PromptScores:
    return PromptScores("a", msgspec.Raw(msgspec.msgpack.encode(logprobs)))


async def beside(work: Awaitable[object], turns: list[int]) -> None:
    """Do the work, and count in `turns[0]` how often the loop comes round to somebody else."""

    async def other() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    task = asyncio.get_running_loop().create_task(other())
    await asyncio.sleep(0)
    await work
    task.cancel()


@pytest.mark.parametrize("top", [0, 1, 20])
def test_the_loop_has_a_turn_after_every_slice(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, top: int) -> None:
    turns, had = [0], [0]
    seen: dict[int, int] = {}
    add = Columns.add

    def counted(columns: Columns, each: TokenLogprob) -> None:
        seen[turns[0]] = seen.get(turns[0], 0) + 1 + len(each.top)
        add(columns, each)

    def has() -> None:
        had[0] += 1

    monkeypatch.setattr(Columns, "add", counted)
    form = openai.CompletionFormat(tokenizer, True, 1, [(1, 2)], [ECHO], Extras(Sampling(), tokenizer, [(1, 2)]))
    asyncio.run(beside(form.add_prompt(0, raw(scores(3000, top)), Turns(has)), turns))
    assert sum(seen.values()) == 3000 * (top + 1)
    assert max(seen.values()) <= SLICE + top
    assert had[0] == 3000 * (top + 1) // (SLICE + -SLICE % (top + 1))


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_more_is_written_for_a_reader_that_has_gone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool, finished: bool
) -> None:
    """Also where the engine has said all that it had to say."""
    written = [0]
    add = Columns.add

    def counted(columns: Columns, each: TokenLogprob) -> None:
        written[0] += 1
        if written[0] == 2 * SLICE:
            work.leave()
        add(columns, each)

    async def scene() -> None:
        nonlocal work
        engine = EngineClient(Path("nobody"))
        engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
        dispatcher = Dispatcher(RequestContext(engine), 600.0)
        answer = engine.ask([Submit("a", (1, 2), SamplingParams())], 1)
        work = RequestHandler(Caller("a", 0.0, b""), [(1, 2)], 1, answer, dispatcher.context)
        engine._arrived([raw(scores(20 * SLICE, 0)), *[Finished("a", 0, "length", 0)] * finished])
        form = openai.CompletionFormat(tokenizer, True, 1, [(1, 2)], [ECHO], Extras(Sampling(), tokenizer, [(1, 2)]))
        if stream:
            (last,) = [piece async for piece in openai.stream(work, "fake", form)]
            assert b'"code":"cancelled"' in last
        else:
            with pytest.raises(APIError, match="cancelled"):
                await openai.whole(work, "fake", form)
        work.close()
        assert dispatcher.context.traces.find("a", b"").outcome == ("length" if finished else "cancelled")
        assert written[0] <= 3 * SLICE

    work: RequestHandler
    monkeypatch.setattr(Columns, "add", counted)
    asyncio.run(scene())
    assert 2 * SLICE <= written[0] <= 3 * SLICE


def test_what_is_written_of_an_answer_that_has_ended_well_is_all_of_it(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        engine = EngineClient(Path("nobody"))
        engine._arrived([Ready("fake", 512, 100, 10, 16, 8, ())])
        answer = engine.ask([Submit("a", (1, 2), SamplingParams())], 1)
        work = RequestHandler(Caller("a", 0.0, b""), [(1, 2)], 1, answer, RequestContext(engine))
        engine._arrived([raw(scores(4 * SLICE, 0)), Finished("a", 0, "length", 0)])
        form = openai.CompletionFormat(tokenizer, True, 1, [(1, 2)], [ECHO], Extras(Sampling(), tokenizer, [(1, 2)]))
        whole = json.loads(b"".join(await openai.whole(work, "fake", form)))
        assert len(whole["choices"][0]["logprobs"]["tokens"]) == 1 + 4 * SLICE
        work.close()

    asyncio.run(scene())


def test_what_was_received_is_read_row_by_row_and_belongs_to_nobody_else() -> None:
    sent = scores(40, 3)
    frame = encode([PromptLogprobs("a", sent), Finished("a", 0, "length", 0)])
    arrived: list[Arrived] = []
    connection = Connection(arrived.extend, lambda: None, pytest.fail)
    for at in range(0, len(frame), 100):  # the buffer must grow and shrink under what was made of it
        connection.data_received(frame[at : at + 100])
    connection.data_received(frame[:50])
    first, _ = arrived
    assert isinstance(first, PromptScores)
    assert tuple(rows(first.logprobs)) == sent


def test_every_event_of_the_engine_is_known_here() -> None:
    def tags(of: object) -> set[str]:
        return {each.__struct_config__.tag for each in of.__args__}  # type: ignore[attr-defined]

    assert tags(Arrived) == tags(Event)


def test_a_completions_columns_go_on_where_its_prompt_ends(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 😀")
    assert len(ids) > 3, "a character of several tokens"
    starts = iter(tokenizer.starts("a 😀"))
    prompt = Columns(tokenizer, lambda token: next(starts))
    prompt.add_first(ids[0])
    for token in ids[1:-1]:
        prompt.add(TokenLogprob(token, -1.0))
    for number in range(2):  # each choice goes on from the same place
        columns = Columns(tokenizer, Offsets(tokenizer, ids[:-1], len("a ")))
        columns.add(TokenLogprob(ids[-1], -2.0 - number, ((ids[0], -math.inf),)))
        columns.add(TokenLogprob(ids[0], -math.inf))
        table = json.loads(b"".join(columns.json(prompt)))
        assert table["token_logprobs"] == [None, *[-1.0] * (len(ids) - 2), -2.0 - number, LEAST]
        assert table["text_offset"][-2:] == [len("a "), len("a 😀")]
    columns.clear()
    columns.add(TokenLogprob(ids[0], -1.0))
    assert json.loads(b"".join(columns.json()))["text_offset"] == [len("a 😀a")]
    empty = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert json.loads(b"".join(Columns(tokenizer, len).json())) == empty  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [byte_level, sentencepiece_like])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize("text", ["ab ab", "  ab  c ab ", "a😀é b", "</s>ab", "ab </s> ab"])
def test_slices_between_offsets_are_the_tokens(kind: Callable[[], Backend], as_ids: bool, text: str) -> None:
    """Also where the tokenizer puts BOS and a space in front, which the text does not show."""
    tokenizer = Tokenizer(kind(), "<s>", "</s>")
    half = tokenizer.encode("😀")[-2:-1] if as_ids else []  # of a character
    ids = tokenizer.encode(text) + half
    prompt = ids if as_ids else text
    with contextlib.closing(TextThreads(1)) as threads:
        (echo,) = asyncio.run(Prompts(tokenizer, threads).echoes(b"", [prompt], scored=True))
    assert echo.text == (tokenizer.decode(ids, skip_special_tokens=False) if as_ids else text)
    assert len(echo.starts) == len(ids)
    parts = [echo.text[a:b] for a, b in itertools.pairwise([*echo.starts, len(echo.text)])]
    assert "".join(parts) == echo.text
    whole = [tokenizer.id_to_bytes(token) for token in ids]
    for part, token, raw in zip(parts, ids, whole, strict=True):
        shown = as_ids or token != tokenizer.bos_id
        if shown and not raw.decode("utf-8", "replace").count("\ufffd"):
            assert part.strip(" ") == raw.decode().strip(" ")
        elif not shown:
            assert part == ""


def test_what_is_generated_begins_where_its_text_does() -> None:
    """A sentencepiece word has its leading space behind a prompt that shows something, and nowhere else."""
    tokenizer = Tokenizer(sentencepiece_like(), "<s>", "</s>")
    bos, word = tokenizer.encode("ab")
    for prompt, expected in (((bos, word), [0, 3, 6]), ((bos,), [0, 2, 5])):
        offset = Offsets(tokenizer, prompt, 0)
        assert [offset(token) for token in (word, word, word)] == expected
        text = Detokenizer(tokenizer, prompt)
        assert len(text.push(word) + text.push(word)) == expected[2]


def test_a_chats_tokens(tokenizer: Tokenizer) -> None:
    content = Content(tokenizer)
    assert json.loads(b"".join(content.json())) == {"content": [], "refusal": None}
    for logprob in (-1.0, -math.inf):
        content.add(TokenLogprob(11, logprob, ((12, -0.5),)))
    first, second = json.loads(b"".join(content.json()))["content"]
    assert (first["logprob"], second["logprob"]) == (-1.0, LEAST)
    assert bytes(first["bytes"]) == tokenizer.id_to_bytes(11)
    assert [each["logprob"] for each in first["top_logprobs"]] == [-0.5]
