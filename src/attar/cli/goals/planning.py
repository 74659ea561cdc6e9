"""`attar plan --goal`: from options to a question, and from its answer to text, JSON and an exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attar.cli.terminal import CHECK_FAILED, emit, progress, tell
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.plan.comparison import Subject
    from attar.plan.costs import Storage
    from attar.plan.goals.halving import Outcome
    from attar.plan.goals.parse import Goal
    from attar.plan.goals.search import Answer, Question, Workload
    from attar.plan.goals.simulate import Arrival
    from attar.plan.gpus import GpuSpec
    from attar.plan.vision import ImageLoad
    from attar.progress import Progress
    from attar.protocol.settings import Settings

DEFAULT_CONTEXT = 2048
TOGETHER = 8  # requests of a trace that the cache holds, without --users


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """The options of `plan` that a plan by goals takes. name: a model's path or id, or a shape's name."""

    goal: str | None
    scenario: str | None
    name: str
    shape: Subject | None
    users: int
    context: int | None
    prompt: int | None
    trace: Path | None
    rates: Path | None
    outputs: Sequence[str]
    gpu: GpuSpec | None
    settings: Settings
    as_json: bool
    measure: float | None = None
    apply: Path | None = None
    text: Path | None = None
    calib: str | None = None
    samples: int = 128
    quiet: bool = False
    acceptance: float | None = None
    images: int | None = None
    image_size: tuple[int, int] = (0, 0)


def plan_by_goal(config: GoalOptions) -> None:
    """Plan by the goals of the options, print the plan, and end with status 1 where nothing meets them."""
    import typer

    from attar.plan.goals import halving_report, parse, report
    from attar.plan.goals.advice import advise
    from attar.plan.goals.search import search

    text = config.goal if config.goal is not None else parse.scenario(str(config.scenario))
    goals = parse.parse(text)
    if config.scenario is not None:
        tell(f'--scenario {config.scenario} is --goal "{text}"')
    experimental = config.measure is not None or config.apply is not None
    if experimental:
        check_experiments(config)
    question, notes = ask(config, goals)
    answer = search(question)
    outcome, applied = None, None
    if experimental:
        with progress(config.quiet) as bar:
            answer, outcome, applied = experiment(config, answer, bar)
    advice = advise(question, answer.nearest.kv)
    print(report.to_text(answer, config.name, advice, notes))
    told = report.to_dict(answer, config.name, advice, notes)
    if outcome is not None:
        print("\n".join(["", *halving_report.to_text(outcome)]))
        told |= halving_report.to_dict(outcome)
    if applied is not None:
        command = report.serving(answer, applied)
        print(f"\n{applied}: {command}")
        told |= {"applied": {"path": applied, "command": command}}
    emit(config.as_json, told)
    if not answer.met:
        raise typer.Exit(CHECK_FAILED)


def check_experiments(config: GoalOptions) -> None:
    """Raise UserError for options that experiments cannot be made with, before anything is measured."""
    if config.gpu is not None or config.rates is not None:
        message = "--measure and --apply run on this machine's CPU: leave out --gpu, --device and --rates"
        raise UserError("option_conflict", message)
    if config.shape is not None:
        raise UserError("option_conflict", "a --shape has no weights to compress or to measure: name a model")
    if config.measure is not None and config.images is not None:
        raise UserError("option_conflict", "load tests of --measure send text alone: leave out --images")
    if config.measure is not None and config.text is None:
        raise UserError("option_missing", "--measure needs held-out text to measure divergences on: --text FILE")
    for path in (config.text, None if config.calib in (None, "self") else Path(config.calib)):
        if path is not None:
            path.open("rb").close()


def experiment(config: GoalOptions, answer: Answer, bar: Progress) -> tuple[Answer, Outcome | None, str | None]:
    """Measure, where there is a limit of time, and write the best to --apply, where the goals are met, with the plan in
    its receipt. Return the answer, what was measured, and where the weights are."""
    from attar.checkpoints.receipts.recorded import record_plan
    from attar.checkpoints.sources import hub
    from attar.cli.goals import experiments
    from attar.plan.goals.halving import Clock, halve
    from attar.plan.goals.history import History
    from attar.plan.goals.record import recorded
    from attar.plan.rates import store

    clock = None if config.measure is None else Clock(config.measure)
    path = hub.resolve(config.name)
    materials = experiments.Materials(
        model=config.name, path=path, text=config.text, calib=config.calib or "self", samples=config.samples,
        trace=config.trace,
    )  # fmt: skip
    folder = experiments.place(materials, config.apply)
    lab = experiments.Experiments(answer.question, materials, folder, bar, config.apply)
    outcome = None
    if clock is not None:
        outcome = halve(answer, lab, clock, lab.notes, tell)
        answer = outcome.answer
        past = History(store.folder(), store.key())
        past.add(config.name, answer.question.workload, outcome.pairs)
        if past.problem is not None:
            tell(past.problem)
    if config.apply is None or answer.best is None:
        return answer, outcome, None
    served = experiments.apply(lab, answer.best.weights, tell)
    if answer.best.weights.recipe is not None:
        record_plan(config.apply, recorded(answer, outcome))
    return answer, outcome, served


def ask(config: GoalOptions, goals: Sequence[Goal]) -> tuple[Question, list[str]]:
    """Return the question of the options, and notes on what it rests on. Raises UserError for invalid options."""
    from attar import machine
    from attar.engine import deployment
    from attar.evaluation.planning import questions
    from attar.model.split import Share
    from attar.plan.fit import size
    from attar.plan.goals import candidates
    from attar.plan.goals.history import History
    from attar.plan.goals.parse import shown
    from attar.plan.goals.search import Question, require_users
    from attar.plan.rates import store
    from attar.plan.rates.step_time import of_gpu
    from attar.plan.steps import StepLimits
    from attar.plan.vision import AMX, encoding

    require_users(config.users)
    subject = config.shape or questions.subject(config.name)
    candidates.check_size(subject.config)
    load = None
    if config.images is not None:
        asked = deployment.for_users(config.settings, config.users)
        load = deployment.image_load(asked, subject, config.images, config.image_size, gpu=config.gpu is not None)
    work, notes = workload(config, subject, load)
    settings = deployment.for_users(config.settings, work.users)
    limits = StepLimits.of(settings.limits(), settings.threads or machine.cores())
    gpu, memory, images = config.gpu, settings.memory, 0
    share = Share(0, settings.tp, settings.pp)
    outputs = questions.outputs(config.outputs, subject.config)
    if gpu is not None:
        profile = of_gpu(gpu)
        memory = memory or int(gpu.memory * machine.SHARE)
        said = "data sheet" if gpu.verified else "figures, which are unverified"
        notes.append(f"{gpu.name}: times are limits of its {said}; memory {memory / 1e9:.3g} GB")
        if share.count > 1:
            notes.append(f"memory is of each of {share.count} GPUs, and what they send each other takes no time here")
        if share.pp > 1:
            notes.append("stages take a prompt one after another here, and overlap when served: TTFT is an upper bound")
    else:
        storages, tower = _storages(subject, [each.storage for each in outputs]), subject.tower
        wide = load is not None and tower is not None and tower.on_amx(True)
        known = questions.rates(config.rates, questions.curve_names(subject.config, storages), tell, wide)
        profile = known.profile
        # Rates of this machine may be of AMX that PyTorch does not use: its towers are then computed in float32.
        amx = tower is not None and profile.isa == AMX and (not known.here or deployment.has_amx())
        if load is not None and tower is not None:
            seen = encoding(tower, load, profile, amx)
            work = replace(work, encoding=seen)
            low, high = (shown("ttft", each) for each in seen.range)
            took = f"{shown('ttft', seen.seconds)} ({seen.evidence}, {low} to {high})"
            notes.append(f"{load}; the vision tower takes {took}")
        memory, source = questions.memory(memory, known.here)
        notes += known.notes
        notes.append(
            f"rates of {profile.measured}: {profile.bandwidth.value / 1e9:.1f} GB/s ± {profile.bandwidth.spread:.0%}, "
            f"{profile.isa}, {_threads(profile.key.threads)}"
        )
        images = deployment.image_bytes(settings, subject, amx)
        if images:
            notes.append(f"memory holds {size(images)} of vision tower, projector and features of images")
        notes.append(f"memory {source if memory is None else f'{memory / 1e9:.3g} GB, {source}'}")
        if limits.threads > profile.key.threads:
            notes.append(f"rates are of {_threads(profile.key.threads)}, memory is planned for {limits.threads}")
    past = History(store.folder(), store.key())
    notes += [each for each in (past.sentence() if gpu is None else None, past.problem) if each is not None]
    notes.append("KL ranges that are fitted come from two models (docs/planning.md): measure yours with attar eval")
    if candidates.compressed(subject.config, subject.storage):
        notes.append("KL is against the model as it is stored")
    rows = settings.max_step_tokens
    made = Question(
        subject.config, subject.storage, tuple(goals), work, profile, memory, limits, gpu, kv=settings.kv, rows=rows,
        outputs=outputs, calib=config.calib or "self", factors={} if gpu is not None else past.factors(),
        acceptance=config.acceptance, images=images, tower_size=0 if subject.tower is None else subject.tower.size,
        share=share, vision=None if load is None or subject.tower is None else subject.tower.config,
    )  # fmt: skip
    return made, notes


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _storages(subject: Subject, more: Sequence[Storage]) -> list[Storage]:
    from attar.plan.goals import candidates

    found, _ = candidates.weights(subject.config, subject.storage, None)
    return [*(each.storage for each in found), *more]


def workload(config: GoalOptions, subject: Subject, load: ImageLoad | None = None) -> tuple[Workload, list[str]]:
    """Return the workload of the options, and what it means; rows of images are part of its prompts. Raises UserError
    for a prompt that leaves no answer."""
    from attar.plan.goals.search import Workload

    if config.trace is not None:
        arrivals = _trace(config.trace)
        longest = max(each.length for each in arrivals)
        users = config.users if config.users > 1 else min(TOGETHER, len(arrivals))
        said = f"the first {len(arrivals)} requests of {config.trace} at their own times, of up to {longest:,} tokens"
        return Workload(users, 1, 1, arrivals), [f"{said}; the cache holds {users} of the longest"]
    rows = 0 if load is None else load.tokens
    context = config.context or min(DEFAULT_CONTEXT, subject.config.context - rows)
    if context < 2:
        raise UserError("option_out_of_range", "a plan by goals needs a --context of 2 tokens: a prompt and an answer")
    prompt = config.prompt if config.prompt is not None else max(1, context * 3 // 4)
    if prompt >= context:
        raise UserError(
            "option_conflict", f"a prompt of {prompt:,} tokens leaves no answer in a context of {context:,}"
        )
    each = f"{config.users} users, all at the full context" if config.users > 1 else "one user"
    said = f"{each}: prompts of {prompt:,} tokens and answers of {context - prompt:,}"
    said += f", and {rows:,} rows of images" * bool(rows)
    return Workload(config.users, rows + prompt, context - prompt), [said]


def _trace(path: Path) -> tuple[Arrival, ...]:
    from attar.load import traces
    from attar.plan.goals.simulate import MOST_REQUESTS, Arrival

    return tuple(
        Arrival(each.at, max(1, len(each.prompt)), max(1, each.output)) for each in traces.read(path, MOST_REQUESTS)
    )
