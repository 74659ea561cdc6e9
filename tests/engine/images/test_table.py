"""The table of docs/images.md: each feature beside images gives what it gives alone, or is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attar.checkpoints.adapters import lora
from attar.engine.engine import Engine
from attar.engine.images.limits import against_images, no_images
from attar.engine.llm.llm import LLM
from attar.engine.startup import start_engine
from attar.kernels import dispatch
from attar.kv import sparse_prefill
from attar.kv.eviction import Eviction
from attar.kv.schemes import SCHEMES
from attar.kv.sparse import SparseAttention
from attar.kv.sparse_prefill import SparsePrefill
from attar.model import sparse_layers
from attar.model.decoder import Decoder
from attar.model.sparse_layers import SparseLayers
from attar.model.vision.against import Beside
from attar.model.vision.config import VisionConfig
from attar.protocol.grammar import Grammar
from attar.protocol.messages import Failed, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from attar.sampling.drafters.lookahead import LookaheadDrafter
from attar.sampling.drafters.suffix import SuffixDrafter
from attar.text.tokenizer import Tokenizer
from tests.engine.conftest import Answers, answers, make_engine, run, run_as_they_come
from tests.engine.images import models
from tests.engine.images.seeing import SeededTower, image, submit
from tests.engine.test_adapters import save
from tests.engine.test_resume import FEATURES
from tests.engine.test_resume import submit as submit_text
from tests.errors import user_error
from tests.server.replicas.engines import answered

PAGE = Path(__file__).parents[3] / "docs" / "images.md"
A, B, C = image(1), image(2, 20), image(3, 5)
TEXT = tuple(range(1, 40))
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=11, logprobs=1)
REPEATS = SamplingParams(max_tokens=40, temperature=0, seed=0)
DRAFTING = SchedulerConfig(max_running=4, max_step_tokens=40, headroom=0.0, max_drafts=8)
LIMITS = replace(DRAFTING, max_drafts=0)


def asks(params: SamplingParams = SEEDED, **more: Any) -> list[Submit]:
    return [
        submit("a", *TEXT, A, 5, 6, params=params, **more),
        submit("b", *TEXT, A, 5, B, 6, 7, params=params, **more),
        submit("c", C, *TEXT, C, params=params, **more),
        submit("d", *TEXT, B, 5, 6, params=params, **more),
        submit("text", *TEXT, params=params, **more),
    ]


def equal_to_alone(decoder: Decoder, given: list[Submit], **how: Any) -> Answers:
    """Check that answers in company, with preemptions, are those of each request alone; return them."""
    how = {"limits": LIMITS, "image_cache": 30 * 256} | how
    made = {key: how.pop(key) for key in ("drafter",) if key in how}

    def engine(blocks: int) -> Any:
        fresh = {key: make() for key, make in made.items()}
        return make_engine(decoder, blocks, tower=SeededTower(), **how, **fresh)

    alone: Answers = {}
    for ask in given:
        alone |= answers(run(engine(40), [ask]))
    assert all("internal" not in answer and "invalid" not in answer for answer in alone.values()), alone
    for seed in range(2):
        draw = random.Random(seed)
        company = engine(draw.choice([6, 9]))
        assert answers(run_as_they_come(company, draw.sample(given, len(given)), draw)) == alone, seed
    return alone


@pytest.fixture(scope="module")
def llm(demo: Path) -> LLM:
    return LLM(demo, verify=False)


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.load(demo)


def test_choices(decoder: Decoder) -> None:
    assert len(equal_to_alone(decoder, asks(n=3))) == 15


def test_grammars_and_stop_strings(decoder: Decoder, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, stop=("zq",))
    constrained = [msgspec.structs.replace(ask, grammar=Grammar("regex", "(?s:.{60,})")) for ask in asks(params)]
    equal_to_alone(decoder, constrained, tokenizer=tokenizer, limits=DRAFTING)


def test_tools(decoder: Decoder, llm: LLM) -> None:
    tools = submit_text(llm, FEATURES["tools"][1]).grammar
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=3)
    calling = [msgspec.structs.replace(ask, grammar=tools) for ask in asks(params)]
    found = equal_to_alone(decoder, calling, tokenizer=llm.tokenizer, limits=DRAFTING)
    assert found != equal_to_alone(decoder, asks(params), limits=DRAFTING)  # the tools' grammar decided something


def test_replicas(decoder: Decoder, tmp_path: Path) -> None:
    """Two engines, and one of them again while each dies within its answers."""

    def engines() -> list[Engine]:
        return [make_engine(decoder, tower=SeededTower(), limits=LIMITS) for _ in range(2)]

    alone = {ask.id: answers(run(engines()[0], [ask])) for ask in asks()}
    for at, dies in enumerate((0, 6)):
        (tmp_path / str(at)).mkdir()
        told = answered(engines(), asks(), tmp_path / str(at), dies)
        assert {id: answers(events) for id, events in told.events.items()} == alone
        assert all(told.routed)
        assert bool(told.replays["continued"]) == bool(dies)


def test_penalties_and_biases(decoder: Decoder) -> None:
    params = replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={3: 2.0}, min_tokens=5)
    equal_to_alone(decoder, asks(params))


@pytest.mark.parametrize("drafter", [SuffixDrafter, LookaheadDrafter])
def test_speculation_without_a_model(decoder: Decoder, drafter: Callable[[], Any]) -> None:
    plain = equal_to_alone(decoder, asks(REPEATS))
    found = equal_to_alone(decoder, asks(REPEATS), drafter=drafter, draft_tokens=4, limits=DRAFTING)
    assert found == plain


def test_drafters_never_draft_an_image(decoder: Decoder) -> None:
    """A prompt that repeats itself, with an image behind each repetition."""
    again = submit("a", 1, 2, 3, A, 1, 2, 3, A, 1, 2, 3, params=REPEATS)
    engine = make_engine(decoder, tower=SeededTower(), drafter=SuffixDrafter(), draft_tokens=4, limits=DRAFTING)
    events = run(engine, [again])
    assert not any(isinstance(event, Failed) for event in events)
    assert engine.speculation is not None
    assert engine.speculation.errors == 0


def test_a_draft_model_is_refused(decoder: Decoder) -> None:
    class Model(SuffixDrafter):
        name, costly = "model", True

    with user_error("option_conflict", "model", "suffix or lookahead"):
        make_engine(decoder, tower=SeededTower(), drafter=Model(), limits=DRAFTING)


@pytest.mark.parametrize("kv", ["bfloat16", "int8", "klt4", "klt2", "int4"])
def test_kv_schemes(decoder: Decoder, kv: str) -> None:
    equal_to_alone(decoder, asks(), kv=kv)


def test_adapters(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    decoder = tiny_decoder(scheme="w4g32", store=dispatch.store("int8g32"))
    save(tmp_path / "tone", lora.shapes_of(decoder), 1)
    lora.install(decoder, 1, tmp_path / "tone")
    mixed = [*asks(adapter="tone"), *(msgspec.structs.replace(ask, id=f"{ask.id} base") for ask in asks())]
    found = equal_to_alone(decoder, mixed, adapters=("tone",))
    assert found["a", 0] != found["a base", 0]


def test_few_keys_of_a_long_context(decoder: Decoder) -> None:
    ids = torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(3))
    few = SparseLayers(SparseAttention(topk=48, dense_below=40), sparse_layers.calibrate(decoder, ids))
    equal_to_alone(decoder, asks(), sparse=few)


def test_few_keys_of_prompts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_prefill, "WHOLE", 24)
    equal_to_alone(decoder, asks(), prefill=SparsePrefill(sinks=4, window=24, last=10))


def test_sliding_windows(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder(scheme="w4g32", store=dispatch.store("int8g32"), window=20)
    equal_to_alone(decoder, asks(), sliding_blocks=30)


def test_overlapping_steps(decoder: Decoder) -> None:
    assert equal_to_alone(decoder, asks(), overlaps=True) == equal_to_alone(decoder, asks(), overlaps=False)


def test_kv_eviction_is_for_text_and_a_start_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tower is loaded beside a policy: images go with kv_eviction none."""
    models.save("llava", tmp_path)
    small: dict[str, Any] = {"memory": 2 << 30, "context": 256, "threads": 1}
    _, ready = start_engine(Settings(str(tmp_path), "m", kv_eviction=("sink:4+124",), **small))
    assert ready.images
    assert 'images: requests with some need "kv_eviction": "none"' in capsys.readouterr().err
    start_engine(Settings(str(tmp_path), "m", **small))
    assert "kv_eviction" not in capsys.readouterr().err


def test_kv_eviction_is_refused_by_name_for_images_alone(decoder: Decoder) -> None:
    policy = Eviction.parse("sink:4+124")
    engine = make_engine(decoder, tower=SeededTower(), evictions=(policy,))
    failed = [event for event in run(engine, asks()) if isinstance(event, Failed)]
    assert {event.id for event in failed} == {"a", "b", "c", "d"}
    assert all(event.code == "invalid" and "KV eviction sink:4+124" in event.message for event in failed)
    params = replace(SEEDED, kv_eviction="none")
    assert answers(run(engine, asks(params))) == equal_to_alone(decoder, asks(params), evictions=(policy,))


SMALL = VisionConfig(
    hidden=32, heads=2, intermediate=48, layers=1, patch=4, image_size=32, out=64, connector="shuffle", factor=2,
    image_token=96,
)  # fmt: skip


TURNING, MUTUAL = replace(SMALL, sections=True), replace(SMALL, bidirectional=True)


@pytest.mark.parametrize(
    ("config", "device", "processes", "draft", "other", "word"),
    [
        (SMALL, "cuda", 1, None, Beside(), "--device cuda"),
        (SMALL, "cpu", 2, None, Beside(), "--tp and --pp"),
        (SMALL, "cpu", 1, "/a/draft", Beside(), "--draft /a/draft"),
        (TURNING, "cpu", 1, None, Beside(evicts=True), "--kv-eviction"),
        (MUTUAL, "cpu", 1, None, Beside(few=True), "--sparse-attention"),
        (MUTUAL, "cpu", 1, None, Beside(scheme=SCHEMES["klt2"]), "--kv klt2"),
    ],
)
def test_settings_that_images_do_not_go_with_are_named(
    config: VisionConfig, device: str, processes: int, draft: str | None, other: Beside, word: str
) -> None:
    assert word in (against_images(config, device, processes, draft, other) or "")


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"cache_dir": "/a"}, "--cache-dir"),
        ({"role": "decode"}, "--role decode"),
        ({"image_cache": 0}, "--image-cache 0"),
        ({"tp": 2}, "--tp"),
        ({"pp": 2}, "--pp"),
        ({"role": "prefill"}, "--role prefill"),
        ({}, ""),
    ],
)
def test_settings_of_a_server_are_named(given: dict[str, Any], word: str) -> None:
    found = no_images(Settings("model", "", **given), SMALL)
    assert (found is None) == (not word)
    assert word in (found or "")


@pytest.mark.parametrize("draft", [None, "suffix", "lookahead"])
def test_others_take_images(draft: str | None) -> None:
    assert against_images(SMALL, "cpu", 1, draft, Beside(True, True, SCHEMES["klt2"])) is None
    assert against_images(MUTUAL, "cpu", 1, draft, Beside(True, False, SCHEMES["klt4"])) is None


def test_a_message_with_images_travels() -> None:
    """Replicas and recovery send a request again, with what was generated."""
    begun = msgspec.structs.replace(asks()[1], generated=((1, 2),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(begun), type=Submit) == begun


REFUSED_OF_A_REQUEST, REFUSED_AT_THE_START = "invalid", "unsupported_field"
"""Codes of refusals: of the engine for one request, and of the server for every request with images."""
TABLE: dict[str, tuple[str, Callable[..., None] | str]] = {
    "n": ("`n`", test_choices),
    "grammar": ("constraints", test_grammars_and_stop_strings),
    "tools": ("tools", test_tools),
    "LoRA": ("LoRA adapters", test_adapters),
    "speculation": ("`--draft suffix`, `lookahead`", test_speculation_without_a_model),
    "speculation by a model": ("other drafters", REFUSED_AT_THE_START),
    "eviction": ("`--kv-eviction`", REFUSED_OF_A_REQUEST),
    "retrieval": ("`--sparse-attention`", test_few_keys_of_a_long_context),
    "klt": ("`--kv klt2`, `klt4`", test_kv_schemes),
    "tp": ("`--tp`, `--pp`", REFUSED_AT_THE_START),
    "replicas": ("`--replicas`", test_replicas),
    "role": ("`--role`", REFUSED_AT_THE_START),
    "cache-dir": ("`--cache-dir`", REFUSED_AT_THE_START),
}
"""Each feature in words, with the test that finds it equal to alone, or the code of its refusal."""
SETTINGS: dict[str, dict[str, Any]] = {
    "speculation by a model": {"draft": "/a/draft"}, "tp": {"tp": 2}, "role": {"role": "decode"},
    "cache-dir": {"cache_dir": "/a"},
}  # fmt: skip


def test_no_row_of_the_table_is_missing() -> None:
    wanted = "n grammar tools LoRA speculation eviction retrieval klt tp replicas role cache-dir"
    assert set(wanted.split()) <= TABLE.keys()
    refused = {row for row, (_, cell) in TABLE.items() if cell == REFUSED_AT_THE_START}
    assert refused == SETTINGS.keys()


@pytest.mark.parametrize("row", SETTINGS)
def test_what_is_refused_at_the_start_is_named(row: str) -> None:
    """The engine starts as a language model, says so in its log, and tells the server, which refuses by that name
    (`tests/server/api/images/test_images_served.py`)."""
    (option,) = SETTINGS[row]
    assert f"--{option.replace('_', '-')}" in (no_images(Settings("model", "", **SETTINGS[row]), SMALL) or "")


def test_the_page_has_the_table() -> None:
    assert page() in PAGE.read_text()


def page() -> str:
    """The table in Markdown."""
    lines = ["| feature | with images |", "|---|---|"]
    for words, cell in TABLE.values():
        told = {
            REFUSED_OF_A_REQUEST: f"equal with `kv_eviction` `none`; other requests with images are refused (`{cell}`)",
            REFUSED_AT_THE_START: f"images are refused from the start (`{cell}`)",
        }
        shown = told[cell] if isinstance(cell, str) else "equal"
        lines.append(f"| {words} | {shown} |")
    return "\n".join(lines) + "\n"
