"""Tasks: which tokens are a target's, their scores beside transformers', and the figures that come of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from attar.cli.main import app
from attar.evaluation import tasks
from attar.evaluation.tasks import Encoded, Item, Score, encode, evaluate_task, lambada, parse_task, score
from attar.model.decoder import Decoder
from attar.text.tokenizer import Tokenizer
from tests.errors import user_error

Make = Callable[..., Decoder]
LOSS = 1e-4  # nats of an item, against transformers in float32
TEXTS = ["The cat sat on the mat", "She looked at the old house and saw a light", "He said  it was\n\na  dog"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task") / "lambada.jsonl"
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS))
    return path


def test_the_last_word_and_the_space_before_it_are_the_target(file: Path) -> None:
    assert lambada(file) == [
        Item("The cat sat on the", " mat"),
        Item("She looked at the old house and saw a", " light"),
        Item("He said  it was\n\na", "  dog"),
    ]


@pytest.mark.parametrize("line", ['{"text": "word"}', '{"text": " word"}', '{"text": "two words "}', '{"body": "a b"}'])
def test_what_is_no_lambada(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a b"}\n' + line)
    with pytest.raises(ValueError, match=r"bad\.jsonl, (text|line) 2"):
        lambada(tmp_path / "bad.jsonl")


def test_tokens_of_a_target(demo: Path) -> None:
    tokenizer = Tokenizer.load(demo)
    item = Item("Once upon a time there was a", " garden")
    found = encode(tokenizer, item, 100)
    assert tokenizer.decode(found.ids) == item.context + item.target
    assert tokenizer.decode(found.ids[-found.targets :]) == item.target
    short = encode(tokenizer, item, found.targets + 2)
    assert short == Encoded(found.ids[-found.targets - 3 :], found.targets)
    with user_error("context_exceeded"):
        encode(tokenizer, item, found.targets - 1)


def test_a_token_across_the_boundary_is_the_targets(stories: Path) -> None:
    """TinyStories' tokens end with their space: the context's last token is another one when a word follows."""
    tokenizer = Tokenizer.load(stories)
    item = Item("I do not care about", " signs")
    found = encode(tokenizer, item, 100)
    assert list(found.ids) == tokenizer.encode("I do not care about signs")
    alone = tokenizer.encode(item.context)
    assert list(found.ids[: len(alone)]) != alone
    assert "signs" in tokenizer.decode(found.ids[-found.targets :])


@pytest.mark.parametrize("model", ["demo", "stories"])
def test_scores_are_those_of_transformers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, file: Path, model: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder: Path = request.getfixturevalue(model)
    tokenizer = Tokenizer.load(folder)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    report = evaluate_task(folder, "lambada", file)
    for item, found in zip(lambada(file), report.scores, strict=True):
        ids = tokenizer.encode(item.context + item.target)
        with torch.no_grad():
            logits = peer(torch.tensor([ids[:-1]])).logits[0, -found.tokens :].double()
        wanted = torch.tensor(ids[-found.tokens :])
        expected = logits.log_softmax(-1).gather(1, wanted[:, None]).sum().item()
        assert found.log_likelihood == pytest.approx(expected, abs=LOSS)
        assert found.greedy == bool((logits.argmax(-1) == wanted).all())
    monkeypatch.setattr(tasks, "ROWS_AT_ONCE", 1)  # each alone
    alone = evaluate_task(folder, "lambada", file)
    for one, other in zip(report.scores, alone.scores, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=LOSS)


def test_what_a_model_would_write_itself_is_greedy(tiny_decoder: Make) -> None:
    decoder = tiny_decoder()
    ids = [5, 6, 7]
    for _ in range(3):
        logits = decoder.forward(torch.tensor(ids), tasks.ForwardBatch((len(ids),), len(ids)))
        ids.append(int(logits[-1].argmax()))
    wrong = [*ids[:-1], (ids[-1] + 1) % 97]
    found = score(decoder, [Encoded(tuple(ids), 3), Encoded(tuple(wrong), 3), Encoded(tuple(wrong[:-1]), 2)])
    assert [each.greedy for each in found] == [True, False, True]
    assert [each.tokens for each in found] == [3, 3, 2]
    assert all(each.log_likelihood < 0 for each in found)


def test_figures(monkeypatch: pytest.MonkeyPatch, demo: Path, file: Path) -> None:
    made = [Score(-1.0, 1, True), Score(-3.0, 2, False), Score(-2.0, 1, False)]
    monkeypatch.setattr(tasks, "score", lambda decoder, batch: made[: len(batch)])
    told: list[tuple[str, int, int]] = []
    report = evaluate_task(demo, "lambada", file, progress=lambda *seen: told.append(seen))
    shown = report.to_dict()
    assert shown["ppl"] == pytest.approx(math.exp(2.0))
    assert shown["ppl_token"] == pytest.approx(math.exp(6 / 4))
    assert shown["accuracy"] == pytest.approx(1 / 3)
    assert (shown["items"], shown["tokens"], shown["bos"]) == (3, 4, None)
    low, high = shown["intervals"]["ppl"]
    assert math.exp(1) <= low <= shown["ppl"] <= high <= math.exp(3)
    assert told[-1] == ("evaluating", 3, 3)
    assert "3 items, 4 target tokens, no BOS" in report.table()
    alone = evaluate_task(demo, "lambada", file, limit=1)
    assert alone.to_dict()["intervals"]["ppl"] is None
    assert len(alone.scores) == 1


def test_the_command_line(demo: Path, file: Path) -> None:
    run = CliRunner().invoke
    done = run(app, ["eval", "demo", "--task", f"lambada={file}", "--limit", "2", "--quiet", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1]) == evaluate_task(demo, "lambada", file, limit=2).to_dict()
    for more, sentence in (
        (["--task", f"lambada={file}", "--text", str(file)], "not for a --task"),
        (["--task", "lambada"], "NAME=FILE"),
        (["--text", str(file), "--limit", "2"], "--max-tokens"),
    ):
        refused = run(app, ["eval", "demo", "--quiet", *more])
        assert refused.exit_code == 2
        assert sentence in refused.stderr


def test_what_is_refused(tiny_decoder: Make, demo: Path, file: Path, tmp_path: Path) -> None:
    assert parse_task("lambada=a=b.jsonl") == ("lambada", Path("a=b.jsonl"))
    for bad in ("lambada", "lambada=", "=x", "hellaswag=x", ""):
        with user_error("option_malformed"):
            parse_task(bad)
    with user_error("name_unknown"):
        evaluate_task(demo, "arc", file)
    with user_error("file_not_found"):
        evaluate_task(demo, "lambada", tmp_path / "absent.jsonl")
    with user_error("tokenizer_missing"):
        evaluate_task(tiny_decoder(), "lambada", file)
    with user_error("context_exceeded"):
        evaluate_task(demo, "lambada", file, context=513)
    nan = {"model.norm.weight": torch.full((64,), float("nan"))}
    with user_error("not_finite"):
        score(tiny_decoder(tensors=nan), [Encoded((1, 2, 3), 1)])
