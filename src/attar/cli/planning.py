"""The command `plan`: memory, number of users and speed, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attar.cli.commands import configured, option
from attar.cli.options import Json, Memory, OptionalModel, Pp, SparseAttention, Threads, Tp, parse_size
from attar.cli.scheduling import SchedulerOptions
from attar.cli.terminal import emit, errors, require, tell
from attar.errors import Code, UserError

if TYPE_CHECKING:
    from attar.plan.comparison import Hardware, Subject
    from attar.protocol.settings import Settings


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
    as_json: Json = False

    def check(self) -> None:
        """Raise ValueError for options that contradict each other, and for a device that is not available."""
        if (self.model is None) == (self.shape is None):
            code: Code = "option_missing" if self.model is None else "option_conflict"
            raise UserError(code, "name a model or a --shape, one of the two")
        if self.model is not None and self.head is not None:
            raise UserError("option_unused", "--head is of a shape: a model's LM head is as it is stored")
        if self.gpu is not None and self.device != "cpu":
            raise UserError("option_conflict", "name a --device or a --gpu, one of the two")
        require(self.device)

    def subject(self) -> Subject:
        """Find the model, by name or shape. Raises ValueError where there is none."""
        from attar.engine import deployment
        from attar.plan.comparison import Subject

        if self.model is not None:
            return deployment.checkpoint(self.model)
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
            ),
            **self.settings(),
        )  # fmt: skip


@configured(PlanConfig)
def plan(config: PlanConfig) -> None:
    """Estimate memory, capacity and speed before loading a model.

    Each row is one precision of weights and KV cache, as `attar serve` would start with the same options. Speeds are
    upper bounds by memory bandwidth, and on a GPU by arithmetic. Memory of a GPU's driver and graphs is not counted:
    `serve` measures it. With --tp or --pp, --memory and --bandwidth are each GPU's. --memory is each CPU process's,
    where `serve` divides it.

    Examples:
      attar plan ./out --memory 4GB --context 512 --users 8
      attar plan --shape llama-3.1-8b --gpu h100 --context 8192 --users 32
    """
    with errors(config.as_json):
        from attar.engine import deployment
        from attar.plan import report
        from attar.plan.fit import Demand

        config.check()
        asked, subject = config.engine(), config.subject()
        settings = deployment.for_users(asked, config.users)
        if settings != asked:
            steps = f" --scheduler max-step-tokens={settings.max_step_tokens}"
            more = "" if settings.max_step_tokens == asked.max_step_tokens else steps
            tell(f"for {config.users} users at once, as with --max-running {settings.max_running}{more}")
        hardware = config.hardware()
        if hardware.bandwidth is None and hardware.gpu is None:
            tell("the kernels do not load, so how fast memory reads is not known: give --bandwidth")
        made = deployment.plan(settings, subject, Demand(config.context, config.users), hardware)
        print(f"{report.to_text(made)}\n{settings.limits().told(settings.preset)}")
        emit(config.as_json, report.to_dict(made))
