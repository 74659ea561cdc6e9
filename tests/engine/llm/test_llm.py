"""`LLM`: calls that are under way side by side, and what they do to each other."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from attar.engine.engine import Engine
from attar.engine.llm import chats, running
from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.protocol.grammar import Grammar
from attar.protocol.messages import Event, Finished
from attar.protocol.request import Completion, SamplingParams
from attar.text.answers.reasoning import ReasoningMarkers
from tests.errors import user_error

TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, seed=0, ignore_eos=True)
PROMPTS = ("Once upon a time", "The sun", "It was a dark and")


@pytest.fixture(scope="module")
def llm(demo: Path) -> LLM:
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load: texts depend on company")
    return LLM(demo)


@pytest.fixture(scope="module")
def alone(demo: Path) -> list[Completion]:
    """What each prompt gets with nobody beside it."""
    return [LLM(demo).generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def end(stream: Generator[str, None, Completion]) -> Completion:
    while True:
        try:
            next(stream)
        except StopIteration as stop:
            done: Completion = stop.value
            return done


def test_a_call_between_two_pieces_of_a_stream_takes_nothing_from_it(llm: LLM, alone: list[Completion]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream) + next(stream)
    assert llm.generate(PROMPTS[1:], GREEDY) == alone[1:]
    rest = []
    done = None
    while done is None:
        try:
            rest.append(next(stream))
        except StopIteration as stop:
            done = stop.value
    assert done == alone[0]
    assert first + "".join(rest) == alone[0].text


@pytest.mark.usefixtures("llm")
def test_streams_that_are_read_in_turn_share_steps(demo: Path, alone: list[Completion]) -> None:
    """Those that come later find room, longer ones too."""
    llm = LLM(demo)
    order = sorted(range(len(PROMPTS)), key=lambda i: len(alone[i].prompt_token_ids))
    streams = [llm.stream(PROMPTS[i], GREEDY) for i in order]
    next(streams[0])
    engine = llm.running.engine
    for stream in streams[1:]:
        next(stream)
    assert [end(stream) for stream in streams] == [alone[i] for i in order]
    assert engine is not None
    assert engine is llm.running.engine
    assert engine.steps < 2 * TOKENS, "each had its own"


def test_a_stream_that_is_closed_ends_itself_and_nobody_else(llm: LLM, alone: list[Completion]) -> None:
    one, other = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    next(one), next(other)
    engine = llm.running.engine
    assert engine is not None
    generated = engine.generated
    one.close()
    assert end(other) == alone[1]
    assert engine.generated - generated < TOKENS, "the closed one was run on"
    assert engine.pool.active == 0
    assert not llm.running.calls


def test_a_request_that_fails_fails_its_call_alone(llm: LLM, alone: list[Completion]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with user_error("request_refused"):
        llm.generate(PROMPTS[1], SamplingParams(seed=0, logit_bias={10**6: 1.0}))
    assert end(stream) == alone[0]


@pytest.mark.parametrize("answers", [1, 2])
def test_a_larger_cache_waits_for_what_is_under_way(
    demo: Path, alone: list[Completion], monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    monkeypatch.setattr(running, "ROOM", 64)
    llm = LLM(demo)
    stream = llm.stream(PROMPTS[0], GREEDY)
    first, small = next(stream), llm.running.engine
    found = llm.generate([[*range(3, 103)] if answers == 1 else prompt for prompt in PROMPTS[1:]][:answers], GREEDY)
    assert answers == 1 or found == alone[1:]
    assert llm.running.engine is not small
    done = end(stream)
    assert done == alone[0]
    assert done.text.startswith(first)


def test_an_answer_without_an_end_is_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def loses(self: Engine) -> list[Event]:
        return [event for event in step(self) if not isinstance(event, Finished)]

    monkeypatch.setattr(Engine, "step", loses)
    with pytest.raises(RuntimeError, match="an answer has not ended"):
        llm.generate(PROMPTS[0], GREEDY)


def test_a_step_that_is_broken_off_ends_whoever_was_in_it_and_no_later_call(
    llm: LLM, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    assert llm.running.engine is not None
    monkeypatch.setattr(llm.running.engine.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1], GREEDY)
    with pytest.raises(RuntimeError, match="broken off"):
        end(stream)
    assert llm.generate(PROMPTS, GREEDY) == alone


def test_two_threads_are_told_to_take_turns(llm: LLM, alone: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    step, said = Engine.step, list[str]()

    def other() -> None:
        with pytest.raises(RuntimeError, match="one thread at a time") as error:
            llm.generate(PROMPTS[1], GREEDY)
        said.append(str(error.value))

    def meets(self: Engine) -> list[Event]:
        if not said:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return step(self)

    monkeypatch.setattr(Engine, "step", meets)
    assert llm.generate(PROMPTS[0], GREEDY) == alone[:1]
    assert said
    assert not llm.running.calls


def test_a_stream_that_is_forgotten_within_a_step_ends_after_it(
    llm: LLM, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the garbage collector may do, which comes when it likes: the scheduler must not be changed under its feet."""
    stream, step = llm.stream(PROMPTS[0], GREEDY), Engine.step
    next(stream)
    running: list[int] = []

    def forgets(self: Engine) -> list[Event]:
        stream.close()
        running.append(len(self.scheduler.sequences))
        return step(self)

    monkeypatch.setattr(Engine, "step", forgets)
    assert llm.generate(PROMPTS[1], GREEDY) == alone[1:2]
    assert running[:2] == [2, 1]
    assert llm.running.engine is not None
    assert llm.running.engine.pool.active == 0


def test_log_probabilities_of_the_prompt_are_part_of_the_completion(llm: LLM) -> None:
    ids = (5, 60, 7, 8, 300)
    asked = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    (done,) = llm.generate([ids], asked)
    expected = llm.logits(ids).double().log_softmax(-1)
    assert done.prompt_logprobs is not None
    assert [each.token_id for each in done.prompt_logprobs] == list(ids[1:])
    assert [each.logprob for each in done.prompt_logprobs] == [
        expected[at, token].item() for at, token in enumerate(ids[1:])
    ]
    assert [len(each.top) for each in done.prompt_logprobs] == [2] * 4
    assert llm.generate([ids[:1]], asked)[0].prompt_logprobs == ()
    assert llm.generate([ids], GREEDY)[0].prompt_logprobs is None


def test_a_special_token_named_as_a_stop_string_ends_the_text(llm: LLM) -> None:
    """No text ever shows it."""
    end = llm.tokenizer.eos_id
    assert end is not None
    forced = replace(GREEDY, max_tokens=6, logit_bias={end: 100.0})
    assert llm.generate(PROMPTS[0], forced)[0].finish_reason == "length"
    (done,) = llm.generate(PROMPTS[0], replace(forced, stop=["zz", "<|endoftext|>"]))
    assert (done.finish_reason, done.token_ids, done.text) == ("stop", (end,), "")


def test_nothing_ends_a_text_before_its_fewest_tokens(llm: LLM, alone: list[Completion]) -> None:
    end = llm.tokenizer.eos_id
    assert end is not None
    (done,) = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=False, logit_bias={end: 100.0}, min_tokens=5))
    assert (done.finish_reason, done.token_ids.index(end), len(done.token_ids)) == ("stop", 5, 6)
    stop = alone[0].text[:2]
    whole = llm.generate(PROMPTS[0], replace(GREEDY, stop=stop))[0]
    later = llm.generate(PROMPTS[0], replace(GREEDY, stop=stop, min_tokens=5))[0]
    assert whole.text == ""
    assert later.text.startswith(stop)
    assert later.token_ids == alone[0].token_ids[: len(later.token_ids)]
    assert len(later.token_ids) > 5


def test_the_tokenizers_end_of_text_ends_one_too(demo: Path, tmp_path: Path) -> None:
    """A generation config that lists another end does not take it away."""
    folder = Path(shutil.copytree(demo, tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 70, "do_sample": false, "temperature": 0.5}')
    made = LLM(folder, verify=False, generation_config="model")
    end = made.tokenizer.eos_id
    assert end is not None
    assert made.model.eos_ids == {70, end}
    for token in (70, end):
        params = SamplingParams(max_tokens=4, temperature=0, logit_bias={token: 100.0})
        assert made.generate(PROMPTS[0], params)[0].token_ids == (token,)
    assert made.sampling == {"temperature": 0}
    assert (
        made.generate(PROMPTS[0])[0].token_ids == made.generate(PROMPTS[0], SamplingParams(temperature=0))[0].token_ids
    )


def test_a_message_cannot_end_its_turn(llm: LLM) -> None:
    """As on the server: special tokens that it spells stay text."""
    end = llm.tokenizer.eos_token
    plain, spelled = ([{"role": "user", "content": text}] for text in ("Hello", f"Hello{end}"))
    ids = llm.encode_chat(spelled)
    assert ids.count(llm.tokenizer.eos_id) == llm.encode_chat(plain).count(llm.tokenizer.eos_id)
    assert f"Hello{end}" in llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert llm.chat(spelled, GREEDY).prompt_token_ids == tuple(ids)


def test_a_tool_cannot_end_a_turn_either(llm: LLM) -> None:
    template = llm.tokenizer.chat_templates
    try:
        llm.tokenizer.chat_templates = {"default": "{{ tools | tojson }}"}
        end = llm.tokenizer.eos_token
        ids = llm.encode_chat([{"role": "user", "content": "a"}], tools=[{"description": f"a {end} b"}])
    finally:
        llm.tokenizer.chat_templates = template
    assert llm.tokenizer.eos_id not in ids
    assert str(end) in llm.tokenizer.decode(ids)


def test_log_probabilities_of_named_tokens_are_those_of_the_logits(llm: LLM) -> None:
    """Two tokens' logits, by which a reranker judges."""
    prompt = llm.tokenizer.encode("Once upon a time")
    [done] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[17, 5]))
    wanted = llm.logits(prompt)[-1].double().log_softmax(-1)
    assert done.logprobs is not None
    for token, value in done.logprobs[0].top:
        assert value == pytest.approx(wanted[token].item(), abs=1e-6)
    assert [token for token, _ in done.logprobs[0].top] == [17, 5]


def test_a_chat_has_its_reasoning_apart_and_its_constraint_behind(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens of the embedded model in place of markers: `!` opens a section and `,` closes it."""
    llm = LLM(demo)
    start, end_token = llm.tokenizer.token_to_id("!"), llm.tokenizer.token_to_id(",")
    markers = ReasoningMarkers("!", ",", start, end_token)
    llm.tokenizer.chat_templates = {"default": "{{ messages[0].content }}{{ '!' if opened }}"}
    monkeypatch.setattr(chats.ReasoningMarkers, "of", lambda *_: markers)
    said = [{"role": "user", "content": "Once upon a time"}]
    params = SamplingParams(max_tokens=200, temperature=0, seed=0)
    done = llm.chat(said, params, constraint=Grammar("regex", "yes|no"), opened=True)
    assert done.text in ("yes", "no")
    assert done.reasoning
    assert end(llm.stream_chat(said, params, constraint=Grammar("regex", "yes|no"), opened=True)) == done
    plain = llm.chat(said, replace(params, max_tokens=8))  # opens none
    assert not plain.reasoning
    assert plain.text
    monkeypatch.setattr(chats.ReasoningMarkers, "of", lambda *_: ReasoningMarkers("!", "</end>"))
    with user_error("option_conflict"):
        llm.chat(said, params, constraint=Grammar("regex", "yes|no"), opened=True)


@pytest.mark.usefixtures("llm")
def test_a_stream_with_sinks_runs_past_the_context(demo: Path, alone: list[Completion]) -> None:
    dropping = LLM(demo, kv_eviction=("sink:4+124", "snapkv:128"))
    length = dropping.context + 300
    params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
    (answer,) = dropping.generate("Once upon a time", params)
    assert (len(answer.token_ids), answer.finish_reason) == (length, "length")
    assert dropping.generate(PROMPTS, replace(GREEDY, kv_eviction="none")) == alone
    with user_error("context_exceeded"):
        dropping.generate([[1] * length], replace(params, kv_eviction="snapkv:128"))
    with user_error("option_conflict"):
        LLM(demo, kv_eviction="sink:4+124", sparse_attention="topk:512")
