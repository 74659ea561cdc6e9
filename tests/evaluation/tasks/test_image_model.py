"""Tasks whose items have images: the harness's own tasks and rules, answers and scores beside transformers'."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hf
from attar.checkpoints.sources.vision import image_settings, vision_of
from attar.evaluation.tasks import local_items
from attar.evaluation.tasks.catalogue import TaskSource
from attar.evaluation.tasks.image_model import ImageHarnessModel
from attar.evaluation.tasks.run import evaluate_tasks, task_manager
from attar.images.decoding import ImageSource, decode
from attar.metrics.images import Seeing
from tests.engine.images import models
from tests.errors import user_error
from tests.evaluation.tasks.test_harness_model import request as instance
from tests.images import oracle
from tests.images.test_decoding import file, picture

LOSS = 1e-4  # nats of a continuation, against transformers in float32
FIRST, SECOND = picture(100, 37), picture(31, 65, 1)
ITEMS = [12, pytest.param(100, marks=pytest.mark.slow)]
COMPARED = 10  # of the items whose answers transformers writes as well
QUESTIONS = ["what is this?", "a cat?", "row 3 crops", "help you see"]
CHOICES = ["a cat.", "help", " see better"]


class Given(NamedTuple):
    kind: str
    folder: Path
    reference: Any
    model: ImageHarnessModel


def loaded(folder: Path, context: int | None = None) -> ImageHarnessModel:
    decoder = hf.load(folder, torch.float32)
    seeing, context = Seeing(decoder, vision_of(folder, torch.float32)), context or decoder.config.context
    return ImageHarnessModel(
        seeing, image_settings(folder), vocabulary.tokenizer(folder), context, lambda *_: None
    )  # fmt: skip


@pytest.fixture(scope="module", params=models.KINDS)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("models") / request.param
    reference = models.save(request.param, folder)
    return Given(request.param, folder, reference, loaded(folder))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("models") / "llava"
    reference = models.save("llava", folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2048  # ChartQA's instructions are long
    oracle.put(folder / "config.json", config)
    return Given("llava", folder, reference, loaded(folder))


def _ids(given: Given, text: str, images: Sequence[Any]) -> list[int]:
    """Return the tokens of a text of the harness. An image of LLaVA has 16 rows, so none is decoded for it."""
    if given.kind == "llava":
        return given.model.tok_encode(text.replace("<image>", "<image>" * 16))
    shown = decode(image_settings(given.folder), [ImageSource(file(each)) for each in images])
    return given.model.tok_encode(given.model.shown(text, shown))


@torch.inference_mode()
def _logits(given: Given, ids: list[int], images: Sequence[Any]) -> Tensor:
    """Return transformers' logits [N, V] of a prompt with images."""
    batch = [list(images)] if given.kind == "smolvlm" else list(images)
    more = dict(oracle.processor(given.kind)(images=batch, return_tensors="pt"))
    more = {name: value for name, value in more.items() if isinstance(value, Tensor)}
    tokens = torch.tensor([ids])
    if given.kind == "qwen2_vl":
        more["mm_token_type_ids"] = (tokens == models.IMAGE).int()
    if given.kind == "gemma3":
        more["token_type_ids"] = (tokens == models.IMAGE).long()
    return given.reference(  # type: ignore[no-any-return]
        input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **more
    ).logits[0]


def _likelihood(given: Given, context: str, continuation: str, images: Sequence[Any]) -> tuple[float, bool]:
    front, whole = (_ids(given, text, images) for text in (context.rstrip(), context + continuation))
    back = whole[len(front) :]  # lm-eval's rule: blanks at the end of a context belong to what follows
    wanted = torch.tensor(back)
    logits = _logits(given, front + back, images)[len(front) - 1 : -1].double()
    value = logits.log_softmax(-1).gather(1, wanted[:, None]).sum().item()
    return value, bool((logits.argmax(-1) == wanted).all())


CASES: list[tuple[str, list[Any]]] = [
    ("<image>what is this?\n\nAssistant:", [FIRST]),
    ("a <image> or <image>?", [FIRST, SECOND]),
    ("<image> <image>, <image>\n", [SECOND, FIRST, SECOND]),
]


@pytest.mark.parametrize(("context", "images"), CASES)
def test_scores_are_those_of_transformers(given: Given, context: str, images: list[Any]) -> None:
    beside = {"visual": [{"bytes": file(each), "path": None} for each in images]}
    asked = [instance("loglikelihood", context, each, beside) for each in CHOICES]
    found = given.model.loglikelihood(asked)
    for choice, (value, greedy) in zip(CHOICES, found, strict=True):
        expected, best = _likelihood(given, context, choice, images)
        assert value == pytest.approx(expected, abs=LOSS)
        assert greedy == best


@pytest.mark.parametrize(("context", "images"), CASES)
def test_texts_are_those_of_transformers(given: Given, context: str, images: list[Any]) -> None:
    ids = _ids(given, context, images)
    wanted = models.answer(given.kind, given.reference, ids, images, 6)
    text = given.model.tokens.decode(wanted[: wanted.index(1)] if 1 in wanted else wanted)  # 1 ends a text
    for form in (lambda each: each, file, _url):
        beside = {"visual": [form(each) for each in images]}  # type: ignore[operator]
        asked = instance("generate_until", context, {"until": [], "max_gen_toks": 6}, beside)
        assert given.model.generate_until([asked]) == [text]


def test_items_without_images_are_answered_beside_them(llava: Given) -> None:
    settings, beside = {"until": [], "max_gen_toks": 4}, {"visual": [file(FIRST)]}
    asked = [
        instance("generate_until", "a cat", settings), instance("generate_until", "<image>a cat", settings, beside),
        instance("generate_until", "row 3", settings),
    ]  # fmt: skip
    alone = [llava.model.generate_until([each])[0] for each in asked]
    assert llava.model.generate_until(asked) == alone
    scores = [instance("loglikelihood", "a", " cat"), instance("loglikelihood", "<image>a", " cat", beside)]
    assert llava.model.loglikelihood(scores) == [llava.model.loglikelihood([each])[0] for each in scores]


@pytest.mark.parametrize("count", ITEMS)
def test_a_task_of_ones_own_with_images(llava: Given, count: int) -> None:
    """Items in the format of the harness: the share of right choices is the one by transformers' scores."""
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask

    shown = [picture(24 + 7 * (i % 9), 20 + 5 * (i % 7), i) for i in range(count)]
    rows = {
        "image": [{"bytes": file(each), "path": None} for each in shown], "label": [i % 3 for i in range(count)],
        "question": [QUESTIONS[i % 4] for i in range(count)],
    }  # fmt: skip
    items = {"test": datasets.Dataset.from_dict(rows)}
    task = ConfigurableTask(config={
        "task": "shapes", "custom_dataset": partial(_given, items), "test_split": "test", "num_fewshot": 0,
        "output_type": "multiple_choice", "doc_to_image": ["image"], "doc_to_text": "<image>{{question}}",
        "doc_to_choice": CHOICES, "doc_to_target": "label", "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    })  # fmt: skip
    manager = task_manager()
    found = evaluator.simple_evaluate(llava.model, tasks=[task], bootstrap_iters=0, task_manager=manager)
    assert found is not None
    right = []
    for i, image in enumerate(shown):
        scores = [_likelihood(llava, "<image>" + QUESTIONS[i % 4], choice, [image])[0] for choice in CHOICES]
        right.append(scores.index(max(scores)) == i % 3)
    assert 0 < sum(right) < count
    assert found["results"]["shapes"]["acc,none"] == pytest.approx(sum(right) / count)


def _url(image: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(file(image)).decode()


def _given(items: Any, **_: Any) -> Any:
    return items


def _charts(llava: Given, path: Path, as_json: bool, count: int) -> tuple[Path, list[float]]:
    """Write items in ChartQA's form; return their path, and for the first whether transformers' answer holds the
    number that is right."""
    from lm_eval.tasks.chartqa.utils import anywhere_accuracy

    long = evaluate_context(llava)
    rows, wanted = list[dict[str, Any]](), list[float]()
    for i in range(count):
        image, query = picture(20 + i % 13, 30 + i % 5, i), QUESTIONS[i % 4]
        label = str(i % 10)
        if i < COMPARED:
            ids = _ids(llava, chart_text(query), [image])
            made = models.answer("llava", llava.reference, ids, [image], long - len(ids) + 1)
            text = llava.model.tokens.decode(made[: made.index(1)] if 1 in made else made)
            label = next((each for each in text if each.isdigit() and each.isascii()), "7")
            wanted.append(float((anywhere_accuracy([label], [text]) or {}).get("anywhere_accuracy", 0.0)))
        data = _url(image) if as_json else {"bytes": file(image), "path": None}
        rows.append({"image": data, "query": query, "label": [label], "human_or_machine": 0})
    if as_json:
        (path / "chartqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path / "chartqa.jsonl", wanted
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    whole = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    whole.to_parquet(path / "chartqa.parquet")
    return path / "chartqa.parquet", wanted


def chart_text(query: str) -> str:
    """Return ChartQA's prompt as the harness writes it."""
    import lm_eval.tasks
    from lm_eval import utils
    from lm_eval.tasks._yaml_loader import load_yaml

    settings = load_yaml(Path(lm_eval.tasks.__file__).parent / "chartqa" / "chartqa.yaml", resolve_func=False)
    return utils.apply_template(settings["doc_to_text"], {"query": query})


def evaluate_context(llava: Given) -> int:
    """Return a context that leaves some tokens for an answer to the longest question."""
    return max(len(_ids(llava, chart_text(each), [FIRST])) for each in QUESTIONS) + 5


@pytest.mark.parametrize("count", ITEMS)
@pytest.mark.parametrize("as_json", [False, True])
def test_chartqa_of_ones_own_items(
    llava: Given, tmp_path: Path, as_json: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    path, wanted = _charts(llava, tmp_path, as_json, count)

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("an image of an item was decoded in the process of the model")

    monkeypatch.setattr(Image, "open", opened)
    found = evaluate_tasks(
        llava.folder, [TaskSource.parse(f"chartqa={path}")], context=evaluate_context(llava), dtype="float32"
    ).answers["chartqa"]
    assert found.items == count
    assert list(found.values["anywhere_accuracy"][:COMPARED]) == wanted
    assert found.figures["exact_match"].value == 0


BAD: list[tuple[str, Any, str, str]] = [
    ("<image>a", [], "task_malformed", "0 images"),
    ("a", [file(FIRST)], "task_malformed", "1 images"),
    ("<image>a", ["/etc/passwd"], "image_invalid", "image is given as"),
    ("<image>a", ["http://localhost/a.png"], "image_invalid", "not fetched"),
    ("<image>a", [{"bytes": None, "path": "/etc/passwd"}], "task_malformed", "bytes"),
    ("<image>a", [None], "task_malformed", "bytes"),
    ("<image>a", [b"no image"], "image_invalid", "PNG"),
    ("<image>" * 9, [file(FIRST)] * 9, "image_too_large", "8"),
    ("<image>" + "a " * 3000, [file(FIRST)], "context_exceeded", "16 of them"),
]


@pytest.mark.parametrize(("text", "visual", "code", "word"), BAD)
def test_items_that_do_not_go_are_refused(llava: Given, text: str, visual: Any, code: str, word: str) -> None:
    with user_error(code, word):
        llava.model.generate_until([instance("generate_until", text, {"until": []}, {"visual": visual})])
    with user_error(code, word):
        llava.model.loglikelihood([instance("loglikelihood", text, "a", {"visual": visual})])


def test_other_models_and_requests_are_refused(llava: Given, demo: Path, tmp_path: Path) -> None:
    with user_error("task_malformed", "likelihood"):
        llava.model.loglikelihood_rolling([instance("loglikelihood_rolling", "a", {}, {"visual": []})])
    with user_error("option_malformed", "chartqa=PATH"):
        TaskSource.parse("chartqa")
    row = {"image": _url(FIRST), "query": "a", "label": ["b"]}
    (tmp_path / "items.jsonl").write_text(json.dumps(row))
    source = TaskSource.parse(f"chartqa={tmp_path / 'items.jsonl'}")
    with user_error("feature_unsupported", "vision tower"):
        evaluate_tasks(demo, [source])
    with user_error("feature_unsupported", "vision tower"):
        evaluate_tasks(hf.load(demo, torch.float32), [source], tokenizer=vocabulary.tokenizer(demo))


def test_images_of_parquet_files_are_not_decoded(tmp_path: Path) -> None:
    column = {"image": [{"bytes": file(FIRST), "path": None}]}
    datasets.Dataset.from_dict(column).cast_column("image", datasets.Image()).to_parquet(tmp_path / "test.parquet")
    (item,) = local_items.read(tmp_path, "test")["test"]
    assert item["image"]["bytes"] == file(FIRST)
