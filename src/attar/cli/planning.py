"""The commands `plan` and `lab`: memory, number of users and speed, before anything is loaded, and simulators."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attar.cli import options
from attar.cli.commands import configured, flag, option
from attar.cli.options import (
    CALIBRATION_TEXT,
    Json,
    KvEviction,
    Memory,
    OptionalModel,
    Pp,
    Quiet,
    SparseAttention,
    Threads,
    Tp,
    parse_pixels,
    parse_size,
    parse_time,
)
from attar.cli.scheduling import SchedulerOptions
from attar.cli.terminal import emit, errors, progress, require, tell
from attar.errors import Code, UserError
from attar.protocol.image_limits import MAX_IMAGES

if TYPE_CHECKING:
    from attar.plan.comparison import Hardware, Subject
    from attar.plan.vision import ImageLoad
    from attar.protocol.settings import Settings


RESUME = "the same command goes on: what was measured and compressed is kept"


@dataclass(frozen=True, kw_only=True)
class PlanConfig(SchedulerOptions):
    """Options of `plan`."""

    model: OptionalModel = None
    shape: Annotated[
        str | None, option("Model", "NAME", "Instead of MODEL: a published shape, such as llama-3.1-8b.")
    ] = None
    head: Annotated[str | None, option("Model", "SCHEME", "LM head of the --shape, such as w8.", default="bf16")] = None
    adapter: Annotated[list[Path] | None, option("Model", "DIR", "LoRA adapter to serve beside the model.")] = None
    users: Annotated[int, option(
        "Workload", "N", "Concurrent requests of --context tokens. --max-running rises to N.", min=1,
    )] = 1  # fmt: skip
    context: Annotated[int | None, option(
        "Workload", "N", "Tokens of prompt and output.", min=1, default="the model's, or what fits",
    )] = None  # fmt: skip
    images: Annotated[int | None, option(
        "Workload", "N", "Images of each request. Their rows are added to --context.", min=1, max=MAX_IMAGES,
    )] = None  # fmt: skip
    image_size: Annotated[
        str | None, option("Workload", "PIXELS", "Width and height of each image.", default="1024x768")
    ] = None
    goal: Annotated[str | None, option(
        "Goal", "GOALS", "Find what meets these limits: kl, top1, ttft, tpot, tokens_per_second, memory, size, such as "
        "kl<=0.02, tpot<=60ms, memory<=4GB.",
    )] = None  # fmt: skip
    scenario: Annotated[str | None, option(
        "Goal", "NAME", "Usual limits: latency, throughput, long-context, general, quality, edge or extreme.",
    )] = None  # fmt: skip
    rates: Annotated[Path | None, option(
        "Goal", "FILE", "Rates of `attar bench --rates -o FILE`.", default="kept, or measured once",
    )] = None  # fmt: skip
    prompt: Annotated[int | None, option(
        "Goal", "N", "Tokens of --context that are prompt.", min=1, default="three quarters",
    )] = None  # fmt: skip
    trace: Annotated[Path | None, option(
        "Goal", "FILE", "Requests of this trace, as `attar bench-serve` reads them.",
    )] = None  # fmt: skip
    outputs: Annotated[list[str] | None, option(
        "Goal", "OUT", "Existing output of this model, whose receipt states its KL.", "--output",
    )] = None  # fmt: skip
    acceptance: Annotated[float | None, option(
        "Goal", "SHARE", "Share of drafts that are right, as `attar eval --draft` measures it.", min=0, max=1,
        default="assumed, 0.3 to 0.8",
    )] = None  # fmt: skip
    measure: Annotated[float | None, option(
        "Experiments", "TIME", "Confirm the plan within this time, such as 15m: compress, measure KL, run load tests. "
        "The same command goes on.", parser=parse_time,
    )] = None  # fmt: skip
    apply: Annotated[Path | None, option(
        "Experiments", "OUT", "Write the chosen weights to this folder, where the goals are met.",
    )] = None  # fmt: skip
    text: Annotated[Path | None, option("Experiments", "FILE", "Held-out text for KL (.txt, .jsonl).")] = None
    calib: Annotated[str | None, option("Experiments", "FILE", CALIBRATION_TEXT, default="self")] = None
    samples: Annotated[int, option("Experiments", "N", "Calibration sequences.", min=1)] = 128
    device: Annotated[
        str, option("Device", "DEVICE", "Plan for this machine's cpu or its GPU, cuda; cuda:1 is the second one.")
    ] = "cpu"
    gpu: Annotated[str | None, option(
        "Device", "NAME", "Plan for this GPU model (data-sheet values), such as h100; it need not be installed.",
    )] = None  # fmt: skip
    threads: Threads = None
    bandwidth: Annotated[int | None, option(
        "Device", "SIZE", "Bytes that memory reads a second.", parser=parse_size, default="measured",
    )] = None  # fmt: skip
    tp: Tp = 1
    pp: Pp = 1
    memory: Memory = None
    kv: Annotated[
        str | None, option("Cache", "FORMAT", "Plan for this KV cache format only.", "--kv", default="the usual ones")
    ] = None
    sparse_attention: SparseAttention = None
    kv_eviction: KvEviction = None
    as_json: Json = False
    quiet: Quiet = False

    def check(self) -> None:
        """Raise ValueError for options that contradict each other, and for a device that is not available."""
        if (self.model is None) == (self.shape is None):
            code: Code = "option_missing" if self.model is None else "option_conflict"
            raise UserError(code, "name a model or a --shape, one of the two")
        if self.model is not None and self.head is not None:
            raise UserError("option_unused", "--head needs --shape: a model's LM head is as it is stored")
        if self.gpu is not None and self.device != "cpu":
            raise UserError("option_conflict", "name a --device or a --gpu, one of the two")
        if self.goal is not None and self.scenario is not None:
            raise UserError("option_conflict", "a --scenario stands for a --goal: name one of the two")
        if self.image_size is not None and self.images is None:
            raise UserError("option_unused", "--image-size needs --images")
        _ = self.pixels  # which checks them
        self.check_goal()
        require(self.device)

    @property
    def by_goal(self) -> bool:
        return self.goal is not None or self.scenario is not None

    def check_goal(self) -> None:
        """Raise UserError for options of a plan by goals without goals, and for those that such a plan does not take
        yet."""
        own = {
            "--rates": self.rates, "--prompt": self.prompt, "--trace": self.trace, "--output": self.outputs,
            "--acceptance": self.acceptance is not None, "--measure": self.measure, "--apply": self.apply,
            "--text": self.text, "--calib": self.calib,
        }  # fmt: skip
        if not self.by_goal:
            if given := [name for name, value in own.items() if value]:
                raise UserError("option_unused", f"{', '.join(given)}: needs --goal or --scenario")
            return
        if self.rates is not None and (self.gpu is not None or self.device != "cpu"):
            raise UserError("option_conflict", "--rates describes a CPU: leave out --gpu and --device")
        others = {
            "--adapter": self.adapter, "--bandwidth": self.bandwidth, "--sparse-attention": self.sparse_attention,
            "--kv-eviction": self.kv_eviction,
            "--kv-fraction": self.kv_fraction,
            "--max-tokens-in-cache": self.max_tokens_in_cache,
        }  # fmt: skip
        if given := [name for name, value in others.items() if value]:
            raise UserError("option_conflict", f"{', '.join(given)}: a plan by goals does not take this yet")
        if self.tp * self.pp > 1 and self.gpu is None and self.device == "cpu":
            message = "--tp and --pp with --goal need a --gpu or --device: no rate of a CPU has what processes send"
            raise UserError("option_conflict", message)
        if self.trace is not None and self.prompt is not None:
            raise UserError("option_conflict", "a --trace has prompts of its own: leave out --prompt")
        if self.trace is not None and self.images is not None:
            raise UserError("option_conflict", "a --trace has prompts of its own: leave out --images")

    def plan_by_goal(self) -> None:
        """Plan by the goals, print the plan, and exit with status 1 where nothing meets them."""
        from attar.cli.goals.planning import GoalOptions, plan_by_goal

        by_gpu = self.gpu is not None or self.device != "cpu"
        plan_by_goal(GoalOptions(
            goal=self.goal, scenario=self.scenario, name=self.model or str(self.shape),
            shape=self.subject() if self.model is None else None, users=self.users, context=self.context,
            prompt=self.prompt, trace=self.trace, rates=self.rates, outputs=self.outputs or (),
            gpu=self.hardware().gpu if by_gpu else None, settings=self.engine(), as_json=self.as_json,
            measure=self.measure, apply=self.apply, text=self.text, calib=self.calib, samples=self.samples,
            quiet=self.quiet, acceptance=self.acceptance, images=self.images, image_size=self.pixels,
        ))  # fmt: skip

    def load(self, subject: Subject, settings: Settings) -> ImageLoad | None:
        """Return what the images of each request are, to a server of `settings`; None without --images. Raises
        ValueError for a model or options that do not go with images."""
        from attar.engine import deployment

        if self.images is None:
            return None
        by_gpu = self.gpu is not None or self.device != "cpu"
        return deployment.image_load(settings, subject, self.images, self.pixels, by_gpu)

    @property
    def pixels(self) -> tuple[int, int]:
        """Return the height and width of each image. Raises ValueError for malformed ones."""
        from attar.plan.vision import SIZE

        return SIZE if self.image_size is None else parse_pixels(self.image_size)

    def subject(self) -> Subject:
        """Find the model, by name or shape. Raises ValueError where there is none."""
        from attar.evaluation.planning import questions
        from attar.plan.comparison import Subject

        if self.model is not None:
            return questions.subject(self.model)
        return Subject.shape(str(self.shape), self.head)

    def hardware(self) -> Hardware:
        """Describe a GPU by its data sheet, or measure this machine. Raises ValueError for an unknown GPU model."""
        from attar.engine import deployment
        from attar.plan import gpus
        from attar.plan.comparison import Hardware

        if self.gpu is not None:
            return Hardware.of_gpu(gpus.gpu_spec(self.gpu), self.bandwidth)
        if self.device != "cpu":
            return Hardware.of_gpu(deployment.gpu_at_hand(self.device), self.bandwidth)
        return deployment.machine_at_hand(self.bandwidth)

    def engine(self) -> Settings:
        """Make the settings that `attar serve` would use. Raises ValueError for an unknown KV format or key."""
        from msgspec.structs import replace

        from attar.kv.schemes import check_name
        from attar.protocol.settings import Settings

        check_name(self.kv)
        adapters = tuple((str(number), str(folder)) for number, folder in enumerate(self.adapter or ()))
        return replace(
            Settings(
                "", "", kv=self.kv, context=self.context, memory=self.memory,
                threads=self.threads, adapters=adapters, tp=self.tp, pp=self.pp,
                sparse_attention=self.sparse_attention,
                kv_eviction=() if self.kv_eviction is None else (self.kv_eviction,),
            ),
            **self.settings(),
        )  # fmt: skip


@configured(PlanConfig)
def plan(config: PlanConfig) -> None:
    """Estimate memory, capacity and speed before loading a model.

    Each row is one precision of weights and KV cache, as `attar serve` would start with the same options. Speeds are
    upper bounds by memory bandwidth, and on a GPU by arithmetic. Memory of a GPU's driver and graphs is not counted:
    `serve` measures it. With --tp or --pp, --memory and --bandwidth are each GPU's. --memory is each CPU process's,
    where `serve` divides it. --images asks for requests with images, for a model with a vision tower.

    With --goal, the plan names the configuration that meets the limits, and ends with status 1 where none does. Each
    number has a mark: exact, measured, fitted or of a data sheet. MODEL may then be a bare config.json.

    Examples:
      attar plan ./out --memory 4GB --context 512 --users 8
      attar plan --shape llama-3.1-8b --gpu h100 --context 8192 --users 32
      attar plan ./model --goal "kl<=0.05,tpot<=60ms" --users 8 --context 4096
      attar plan ./model --goal "kl<=0.05" --measure 15m --text a.txt --apply out
    """
    with errors(config.as_json, RESUME if config.measure or config.apply else None):
        config.check()
        if config.by_goal:
            config.plan_by_goal()
            return
        from attar.engine import deployment
        from attar.plan import report
        from attar.plan.fit import Demand

        asked, subject = config.engine(), config.subject()
        settings = deployment.for_users(asked, config.users)
        if settings != asked:
            steps = f" --scheduler max-step-tokens={settings.max_step_tokens}"
            more = "" if settings.max_step_tokens == asked.max_step_tokens else steps
            tell(f"for {config.users} users at once, as with --max-running {settings.max_running}{more}")
        hardware = config.hardware()
        if hardware.bandwidth is None and hardware.gpu is None:
            tell("the kernels do not load, so how fast memory reads is not known: give --bandwidth")
        load, context = config.load(subject, settings), config.context
        if load is not None and context is not None:
            context += load.tokens
        made = deployment.plan(settings, subject, Demand(context, config.users), hardware, load)
        print(f"{report.to_text(made)}\n{settings.limits().told(settings.preset)}")
        emit(config.as_json, report.to_dict(made))


@dataclass(frozen=True, kw_only=True)
class LabConfig(options.OutputConfig):
    """Options of `lab`."""

    model: options.Model
    outputs: Annotated[
        list[str] | None, typer.Argument(metavar="OUT", help="Compressed folders or GGUF files, with their receipts.")
    ] = None
    kv: options.Kv = None
    text: Annotated[Path | None, option(
        "Data", "FILE", "Run MODEL over this text and sample its channels for SmoothQuant (.txt, .jsonl).",
    )] = None  # fmt: skip
    max_tokens: Annotated[int, option("Data", "N", "Tokens of --text to use at most.", min=2)] = 512
    no_measure: Annotated[bool, flag("Device", "Leave this machine's rates out.", "--no-measure")] = False
    page: Annotated[Path, option("Output", "FILE", "The HTML file to write.", "--page", "-o")] = Path("lab.html")


@configured(LabConfig)
def lab(config: LabConfig) -> None:
    """Write an HTML page of simulators for a model.

    It shows size, speed, paging, speculation and batching, with sliders, and what was measured on every curve. MODEL
    gives tensors and formats; each OUT adds its receipt. The page is one file, and loads nothing else. A server shows
    the same page at /lab, with its own state.

    Examples:
      attar lab ./model
      attar lab ./model ./out out.gguf -o lab.html
    """
    with errors(config.as_json), progress(config.quiet) as bar:
        from attar.kv.schemes import check_name
        from attar.lab.gather import Options, write

        check_name(config.kv)
        options = Options(config.page, config.kv or "bfloat16", not config.no_measure, config.text, config.max_tokens)
        written = write(config.model, config.outputs or (), options, bar)
        bar.close()
        print(f"{written['page']}: {written['bytes']:,} bytes; open it in a browser")
        emit(config.as_json, written)
