"""Tasks, asked and marked: the harness's prompts and rules, attar's model, intervals over items.

The package `lm-eval` has the tasks (extra `[eval]`). It fetches their items from the Hub, unless a path is given.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hf, hub
from attar.checkpoints.sources.vision import image_settings, vision_of
from attar.errors import UserError
from attar.evaluation.report import Model, load
from attar.evaluation.tasks import local_items
from attar.evaluation.tasks.catalogue import FOLDERS, MEMBERS, TaskSource
from attar.images.settings import ImageSettings
from attar.kernels import dispatch
from attar.metrics import bootstrap
from attar.metrics.bootstrap import LEVEL, RESAMPLES, SEED, Interval
from attar.metrics.images import Seeing
from attar.metrics.streaming import exp
from attar.model.decoder import Decoder
from attar.progress import Progress
from attar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import datasets
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

    from attar.evaluation.tasks.harness_model import HarnessModel

EXTRA = "attar eval --task needs the package lm-eval: pip install 'attar[eval]'"
SUBJECT = "subject"  # the column of MMLU's items that names their subtask


@dataclass(frozen=True, slots=True)
class Answers:
    """A task's figures by name, such as `acc` or `exact_match,strict-match`, each with its interval over items.

    `values` has the figure of each item, in the order of items: what the figures are means of. `version` is that of
    the harness's task, `shots` the number of examples in front of each item.
    """

    items: int
    shots: int
    version: str
    figures: Mapping[str, Interval]
    values: Mapping[str, Sequence[float]] = field(repr=False, default_factory=dict)


@dataclass(frozen=True, eq=False)
class TaskReport:
    """Answers by task of the harness, such as `arc_easy`, and the versions behind them."""

    answers: Mapping[str, Answers]
    bos: int | None
    harness: str

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values: `tasks` (name to `items`, `shots`, `version`, figures, and `intervals`: name
        to [low, high], None for a single item), `bos`, `lm_eval` and `protocol`."""
        return {
            "tasks": {
                name: {
                    "items": each.items, "shots": each.shots, "version": each.version,
                    **{key: figure.value for key, figure in each.figures.items()},
                    "intervals": {
                        key: None if figure.low is None else [figure.low, figure.high]
                        for key, figure in each.figures.items()
                    },
                }
                for name, each in self.answers.items()
            },
            "bos": self.bos,
            "lm_eval": self.harness,
            "protocol": f"{LEVEL:.0%} bootstrap over items, {RESAMPLES} resamples, seed {SEED}",
        }  # fmt: skip

    def table(self) -> str:
        """Return the figures as text for a terminal."""
        lines = []
        for name, each in self.answers.items():
            shots = f"{each.shots} example{'s' * (each.shots != 1)}"
            lines.append(f"{name}: {each.items:,} items, {shots}, version {each.version}")
            for key, figure in each.figures.items():
                pair = "" if figure.low is None else f"  [{figure.low:.4g}, {figure.high:.4g}]"
                lines.append(f"  {key:<28} {figure.value:>10.5g}{pair}")
        bos = "no BOS" if self.bos is None else f"BOS {self.bos} first"
        lines.append(f"lm-eval {self.harness}, {bos}")
        return "\n".join(lines)


def evaluate_tasks(
    model: Model,
    tasks: Sequence[TaskSource],
    *,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    limit: int | None = None,
    shots: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    adapter: Path | None = None,
    progress: Progress | None = None,
) -> TaskReport:
    """Ask a model the first `limit` items of each task.

    `context` is the most tokens of an item, by default the model's; `shots` the number of examples in front of each
    item, by default the task's own; `adapter` the folder of one that the model computes with. A decoder given as
    `model` has no tokenizer of its own: `tokenizer` stands in. Raises UserError without the package lm-eval, for items
    that cannot be had or are not of the task, a model that cannot be loaded, and logits that are not finite.
    """
    _require()
    dispatch.require(device)
    computed = hf.compute_dtype(dtype, device)
    told = progress or (lambda stage, done, total: None)
    folder = None if isinstance(model, Decoder) else hub.resolve(model)
    if tokenizer is None:
        if folder is None:
            raise UserError("tokenizer_missing", "a loaded decoder has no tokenizer: pass one")
        tokenizer = vocabulary.tokenizer(folder)
    with _quiet():
        asked = _load(tasks, shots)  # fails before a model is loaded
        images = _images(folder, device) if any(getattr(task, "MULTIMODAL", False) for task in asked) else None
        decoder = load(model, folder, computed, told, adapter, device)
        supported = decoder.config.context
        if context is not None and context > supported:
            message = f"a context of {context} is longer than the {supported} positions that the model supports"
            raise UserError("context_exceeded", message)
        limits = tokenizer, context or supported, told
        if images is None:
            from attar.evaluation.tasks.harness_model import HarnessModel

            made = HarnessModel(decoder, *limits)
        else:
            from attar.evaluation.tasks.image_model import ImageHarnessModel

            assert folder is not None, "settings of images come from a folder"
            made = ImageHarnessModel(Seeing(decoder, vision_of(folder, decoder.dtype)), images, *limits)
        found = _ask(made, asked, limit)
    return TaskReport(found, tokenizer.added_bos, metadata.version("lm-eval"))


def _images(folder: Path | None, device: str) -> ImageSettings:
    """Return how a model wants images. Raises UserError for one that takes none, and for a device other than a CPU."""
    if folder is None:
        raise UserError("feature_unsupported", "a loaded decoder has no vision tower: name the model's folder")
    if device != "cpu":
        raise UserError("device_unsupported", "tasks with images are computed on a CPU: leave --device out")
    return image_settings(folder)


def _require() -> None:
    try:
        metadata.version("lm-eval")
    except metadata.PackageNotFoundError as error:
        raise UserError("package_missing", EXTRA) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log and the progress bars of the harness and its libraries from the terminal: attar has its own."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read once, when tqdm is imported
    import datasets

    logger, shown = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not shown:
            datasets.enable_progress_bars()


def task_manager() -> TaskManager:
    """Return the harness's tasks of the catalogue, by name."""
    import lm_eval.tasks

    place = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(include_path=[str(place / name) for name in FOLDERS], include_defaults=False)


def _load(sources: Sequence[TaskSource], shots: int | None) -> list[Task]:
    """Return the harness's tasks of these names, each with its items. Raises UserError where these cannot be had, and
    where a task needs examples that its items do not include."""
    import datasets.exceptions

    manager = task_manager()
    made: list[Task] = []
    for source in sources:
        for member in MEMBERS[source.name]:
            specs = [member] if source.path is None else _local(manager, member, source.path)
            try:
                made += manager.load(specs)["tasks"].values()
            except UserError:
                raise
            except (datasets.exceptions.DatasetsError, ConnectionError, OSError) as error:
                message = f"the items of {source.name} cannot be had from the Hub: give them as {source.name}=PATH"
                raise UserError("download_failed", f"{message} ({error})") from error
            except Exception as error:  # of code that reads columns of items, which may be of any kind
                if source.path is None:
                    raise
                message = f"{source.path} does not hold items of {source.name} in the Hub's form"
                raise UserError("task_malformed", f"{message} ({type(error).__name__}: {error})") from error
    names = [task.task_name for task in made]
    if len(set(names)) < len(names):
        raise UserError("option_conflict", "a task is named twice")
    for task in made:
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
        _check_examples(task)
    return made


def _check_examples(task: Task) -> None:
    wanted, config = task.get_config("num_fewshot"), task.config
    if wanted and config.fewshot_split is None and config.training_split is None:
        message = f"{task.task_name} has {wanted} examples in front of each item, and no split that they come from"
        raise UserError("task_malformed", f"{message}: give a folder that has one (train or dev), or --shots 0")


def _local(manager: TaskManager, member: str, path: Path) -> list[dict[str, Any]]:
    """Return the harness's settings of a task whose items are at `path`: of MMLU, one task a subject."""
    if member != "mmlu":
        settings = _settings(manager, member)
        return [_given(settings, local_items.read(path, settings.get("test_split") or settings["validation_split"]))]
    splits = local_items.read(path, "test")
    by_subject: dict[str, dict[str, datasets.Dataset]] = {}
    for split, items in splits.items():
        if SUBJECT not in items.column_names:
            raise UserError("task_malformed", f"{path}: MMLU's items have a column {SUBJECT!r}")
        for subject in items.unique(SUBJECT):
            at = [i for i, value in enumerate(items[SUBJECT]) if value == subject]
            by_subject.setdefault(subject, {})[split] = items.select(at)
    known = {name.removeprefix("mmlu_") for name in manager.all_subtasks if name.startswith("mmlu_")}
    if unknown := sorted(set(by_subject) - known):
        raise UserError("task_malformed", f"{path}: MMLU has no subject {unknown[0]!r}")
    return [
        _given(_settings(manager, f"mmlu_{subject}"), each)
        for subject, each in sorted(by_subject.items())
        if "test" in each
    ]


def _given(settings: Mapping[str, Any], splits: dict[str, datasets.Dataset]) -> dict[str, Any]:
    """Return a task's settings with these items. What names its data on the Hub is taken out, and so are splits that
    the items lack."""
    named = ("dataset_path", "dataset_name", "dataset_kwargs", "tag")
    kept = {
        key: value
        for key, value in settings.items()
        if key not in named and (not key.endswith("_split") or value in splits)
    }
    return kept | {"custom_dataset": partial(_return, splits)}


def _return(splits: dict[str, datasets.Dataset], **_: Any) -> dict[str, datasets.Dataset]:
    return splits


def _settings(manager: TaskManager, member: str) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    found: dict[str, Any] = load_yaml(manager.task_index[member].yaml_path, resolve_func=True)
    return found


def _ask(model: HarnessModel, asked: Sequence[Task], limit: int | None) -> dict[str, Answers]:
    from lm_eval import evaluator

    found = evaluator.simple_evaluate(
        model, tasks=list(asked), limit=limit, bootstrap_iters=0, random_seed=SEED, numpy_random_seed=SEED,
        torch_random_seed=SEED, fewshot_random_seed=SEED,
        task_manager=task_manager(),  # else the harness reads all of its own, for many seconds
    )  # fmt: skip
    assert found is not None, "the harness returns nothing to processes other than the first"
    pooled: dict[str, list[Task]] = {}
    for task in asked:
        pooled.setdefault("mmlu" if task.task_name.startswith("mmlu_") else task.task_name, []).append(task)
    return {name: _answers(members, found["samples"]) for name, members in pooled.items()}


def _answers(tasks: Sequence[Task], samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Answers:
    """Return the figures of tasks whose items count alike."""
    values: dict[str, list[Any]] = {}
    for task in tasks:
        for sample in sorted(samples[task.task_name], key=lambda each: each["doc_id"]):
            for metric in sample["metrics"]:
                name = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                values.setdefault(name, []).append(sample[metric])
    figures = {name: _figure(name, each) for name, each in values.items()}
    config = tasks[0].config
    return Answers(
        max(map(len, values.values())), config.num_fewshot or 0, str(config.metadata.get("version", "")), figures,
        {name: [float(np.sum(value)) for value in each] for name, each in values.items()},
    )  # fmt: skip


def _figure(name: str, values: Sequence[Any]) -> Interval:
    """Return the harness's figure of its items' values: e to the mean loss for a perplexity, else the mean of all.

    An item may have several values, as IFEval's instructions.
    """
    sums = np.array([np.sum(value) for value in values], dtype=np.float64)
    counts = np.array([np.size(value) for value in values], dtype=np.float64)
    if name.partition(",")[0] == "perplexity":
        return bootstrap.ratio(-sums, counts).map(exp)
    return bootstrap.ratio(sums, counts)
