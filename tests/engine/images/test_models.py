"""Whole vision-language models: files in, answers out, equal to transformers' for the same images."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")

from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.protocol.messages import Finished, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from tests.engine.conftest import answers, make_engine, run, run_as_they_come
from tests.engine.images import models
from tests.errors import user_error
from tests.images.test_decoding import file, picture

GREEDY = SamplingParams(max_tokens=8, temperature=0, seed=0, ignore_eos=True, logit_bias={models.IMAGE: -100.0})
FIRST, SECOND = picture(100, 37), picture(31, 65, 1)


class Seeing(NamedTuple):
    kind: str
    folder: Path
    reference: Any
    llm: LLM


@pytest.fixture(scope="module", params=models.KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = tmp_path_factory.mktemp("models") / request.param
    reference = models.save(request.param, folder)
    return Seeing(request.param, folder, reference, LLM(folder, verify=False))


def said(*parts: Any) -> list[dict[str, Any]]:
    """A conversation of one turn; what is no text is an image."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "parts",
    [
        ("Hello there",),
        (FIRST, "what is this?"),
        ("and ", FIRST, " or ", SECOND, "?"),
        (SECOND, ",", FIRST, ",", SECOND, "!"),
    ],
)
def test_answers_are_those_of_transformers(seeing: Seeing, parts: tuple[Any, ...]) -> None:
    pictures = [part for part in parts if not isinstance(part, str)]
    found = seeing.llm.chat(said(*parts), GREEDY)
    wanted = models.answer(seeing.kind, seeing.reference, found.prompt_token_ids, pictures, GREEDY.max_tokens)
    assert list(found.token_ids) == wanted


@pytest.mark.parametrize("scheme", ["w8", "w8a8"])
def test_answers_of_a_quantized_tower_are_near_those_of_the_original(
    seeing: Seeing, scheme: str, tmp_path: Path
) -> None:
    """The language model is as good as exact, so what is left is the tower."""
    compress_request(CompressionRequest(seeing.folder, tmp_path / "out", recipe="rtn-w8", vision=scheme))
    made = LLM(tmp_path / "out")
    tower = made.model.tower
    assert tower is not None
    assert any(getattr(each.weight, "rounds", False) for each in tower.linears()) == (dispatch.store() is not None)
    params = replace(GREEDY, max_tokens=1, logprobs=5)
    ours, exact = (each.chat(said(FIRST, "what is this?"), params) for each in (made, seeing.llm))
    assert ours.logprobs is not None
    assert exact.logprobs is not None
    first, wanted = dict(ours.logprobs[0].top), dict(exact.logprobs[0].top)
    shared = first.keys() & wanted.keys()
    assert len(shared) >= 3
    assert all(abs(first[token] - wanted[token]) <= 0.5 for token in shared)


def test_an_image_may_be_a_path_bytes_a_url_or_a_pil_image(seeing: Seeing, tmp_path: Path) -> None:
    data = file(FIRST)
    (tmp_path / "image.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    wanted = seeing.llm.chat(said(FIRST, "what?"), GREEDY)
    for given in (tmp_path / "image.png", str(tmp_path / "image.png"), data, url):
        parts: list[dict[str, Any]] = [{"type": "image", "image": given}, {"type": "text", "text": "what?"}]
        assert seeing.llm.chat([{"role": "user", "content": parts}], GREEDY).token_ids == wanted.token_ids
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    assert seeing.llm.chat([{"role": "user", "content": parts}], GREEDY).token_ids == wanted.token_ids
    with user_error("file_not_found"):
        seeing.llm.chat(said(tmp_path / "none.png", "what?"), GREEDY)
    with user_error("image_invalid"):
        seeing.llm.chat(said(b"no image", "what?"), GREEDY)


def test_prompts_may_have_images(seeing: Seeing) -> None:
    at = models.place(seeing.kind)
    prompts, images = [f"{at} what? ", "no image ", f"{at}, {at}: "], [[FIRST], [], [SECOND, FIRST]]
    found = seeing.llm.generate(prompts, GREEDY, images=images)
    for prompt, own, answer in zip(prompts, images, found, strict=True):
        if not own:
            assert answer.token_ids == seeing.llm.generate(prompt, GREEDY)[0].token_ids
        wanted = models.answer(seeing.kind, seeing.reference, answer.prompt_token_ids, own, GREEDY.max_tokens)
        assert list(answer.token_ids) == wanted
    with user_error("template_failed"):
        seeing.llm.generate("no place", GREEDY, images=[FIRST])


def asks(seeing: Seeing) -> list[Submit]:
    """Requests whose prompts begin alike."""
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=3, logprobs=2, ignore_eos=True)
    found = []
    for at, parts in enumerate([("a ", FIRST, "b"), ("a ", FIRST, "b", SECOND, "c"), ("a ", SECOND, "b"), ("a b",)]):
        answer = seeing.llm.chat(said(*parts), GREEDY)
        images = seeing.llm._decoded([part for part in parts if not isinstance(part, str)])
        found.append(Submit(str(at), answer.prompt_token_ids, params, images=images))
    return found


def test_chunks_and_company_change_no_bit(seeing: Seeing) -> None:
    given, llm = asks(seeing), seeing.llm
    alone: dict[Any, Any] = {}
    for ask in given:
        whole = make_engine(llm.decoder, 40, SchedulerConfig(max_step_tokens=512), context=512, tower=llm.model.tower)
        alone |= answers(run(whole, [ask]))
    for budget, seed in ((12, 0), (40, 1)):  # Gemma 3 needs a step for the rows of an image
        limits = SchedulerConfig(max_running=4, max_step_tokens=budget, headroom=0.0)
        engine = make_engine(llm.decoder, 9, limits, context=512, tower=llm.model.tower)
        assert answers(run_as_they_come(engine, given, random.Random(seed))) == alone


def test_sent_twice_is_a_hit_past_the_image(seeing: Seeing) -> None:
    given, llm = asks(seeing), seeing.llm
    engine = make_engine(llm.decoder, 40, context=512, tower=llm.model.tower)
    run(engine, given[:1])
    assert engine.images is not None
    assert engine.images.encoded == 1
    again = run(engine, [Submit("again", given[0].prompt, given[0].params, images=given[0].images)])
    assert reused(again) == len(given[0].prompt) - 1
    assert engine.images.encoded == 1
    other = run(engine, [Submit("other", given[2].prompt, given[2].params, images=given[2].images)])
    pairs = enumerate(zip(given[0].prompt, given[2].prompt, strict=False))
    assert reused(other) == next(at for at, (ours, theirs) in pairs if ours != theirs or ours == models.IMAGE)


def reused(events: list[Any]) -> int:
    report = next(event.report for event in events if isinstance(event, Finished))
    return int(report.reused_tokens)


def test_a_model_without_a_tower_takes_no_images(demo: Path) -> None:
    llm = LLM(demo, verify=False)
    with user_error("feature_unsupported", "no vision tower"):
        llm.chat(said(FIRST, "what?"), GREEDY)


def wait_for(url: str, seconds: float = 60.0) -> None:
    """Until the server is ready."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(url, timeout=10):
            return
        assert time.monotonic() < end, "it is not ready"
        time.sleep(0.05)


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_a_server_gives_the_same_tokens(seeing: Seeing) -> None:
    """`attar serve` with a data URL, beside `LLM` and transformers; twice, so that the second is a hit."""
    wanted = seeing.llm.chat(said(FIRST, "what is this?"), GREEDY)
    url = f"data:image/png;base64,{base64.b64encode(file(FIRST)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
    body = {
        "model": "smolvlm", "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0,
        "ignore_eos": True, "logit_bias": {str(models.IMAGE): -100},
    }  # fmt: skip
    command = [sys.executable, "-m", "attar", "serve", str(seeing.folder), "--port", "0", "--json", "--threads", "1"]
    process = subprocess.Popen([*command, "--no-verify"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["url"]
        wait_for(f"{address}/readyz")
        cached = []
        for _ in range(2):
            request = urllib.request.Request(
                f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                found = json.load(reply)
            assert found["choices"][0]["message"]["content"] == wanted.text
            assert found["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
            cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, len(wanted.prompt_token_ids) - 1]
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
@pytest.mark.parametrize(("change", "word"), [("scale_factor", "merged by 3"), ("tensors", "lack the vision tower")])
def test_a_tower_that_cannot_be_used_leaves_a_language_model(
    seeing: Seeing, tmp_path: Path, change: str, word: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(seeing.folder, folder)
    if change == "tensors":
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "vision_model" not in name}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "scale_factor": 3}))
    llm = LLM(folder, verify=False)
    assert len(llm.chat(said("Hello"), GREEDY).token_ids) == GREEDY.max_tokens
    with user_error("feature_unsupported", word):
        llm.chat(said(FIRST, "what?"), GREEDY)
