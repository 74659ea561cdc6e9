"""Scheduler options, shared by `serve`, `plan` and `tritonserver export`.

Most users set a preset and the number of sequences; the other settings are keys of `--scheduler KEY=VALUE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from attar.cli.commands import option
from attar.cli.options import KvFraction, MaxTokensInCache
from attar.errors import Code, UserError


@dataclass(frozen=True)
class Key:
    """One setting of `--scheduler`: how its value is read, what kind of value it takes, and what it does."""

    parse: Callable[[str], Any]
    kind: str
    meaning: str


KEYS = {
    "policy": Key(
        str, "name",
        "When new sequences join: at every step (continuous), once the running batch ends (static), the same after "
        "max-delay or max-running waiting sequences (dynamic), or one at a time (none).",
    ),
    "max-step-tokens": Key(int, "number", "Tokens of a step. Small: even gaps between tokens. Large: cheaper prompts."),
    "max-waiting": Key(
        int, "number",
        "Waiting sequences; excess requests get 429. With several API keys, half of the queue is reserved in equal "
        "parts, and with m waiting keys each may hold at most 1/m.",
    ),
    "max-delay": Key(float, "number of seconds", "How long the policy dynamic waits for a batch to fill."),
    "max-preemptions": Key(
        int, "number", "Preemptions of a sequence; 0: reserve a sequence's full KV cache before starting it."
    ),
}  # fmt: skip


def show_keys(given: list[str] | None) -> list[str] | None:
    """Print the keys of `--scheduler` with defaults and meanings where `help` is given, and exit."""
    if "help" in (given or ()):
        import textwrap

        from attar.protocol.scheduler_config import SchedulerConfig

        for name, key in KEYS.items():
            default = getattr(SchedulerConfig(), name.replace("-", "_"))
            print(textwrap.fill(f"{name:<16} {key.meaning}  [default: {default}]", 78, subsequent_indent=" " * 17))
        raise typer.Exit
    return given


def parse_scheduler(given: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE pairs into fields of the engine's settings. Raises ValueError naming the keys."""
    from attar.model.fields import nearest

    found: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or name not in KEYS:
            known = ", ".join(KEYS)
            code: Code = "name_unknown" if equals else "option_malformed"
            raise UserError(code, f"--scheduler {pair!r} is not KEY=VALUE with one of {known}{nearest(name, KEYS)}")
        try:
            parsed = KEYS[name].parse(value)
        except ValueError:
            raise UserError("option_malformed", f"--scheduler {name}: {value!r} is not a {KEYS[name].kind}") from None
        if found.setdefault(name.replace("-", "_"), parsed) != parsed:
            raise UserError("option_conflict", f"--scheduler {name} is given twice, with different values")
    return found


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """The options of the scheduler and of the size of its cache."""

    preset: Annotated[
        str | None, option("Scheduler", "NAME", "Settings for a purpose: latency, throughput or long-context.")
    ] = None
    max_running: Annotated[
        int | None, option("Scheduler", "N", "Sequences that run together.", min=1, default="32 without a preset")
    ] = None
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Another setting of the scheduler; `--scheduler help` lists them.",
            rich_help_panel="Scheduler", callback=show_keys, is_eager=True,
        ),
    ] = None  # fmt: skip
    max_tokens_in_cache: MaxTokensInCache = None
    kv_fraction: KvFraction = None

    def settings(self) -> dict[str, Any]:
        """Return the options as fields of the engine's settings."""
        given = {"preset": self.preset, "max_running": self.max_running, **parse_scheduler(self.scheduler or ())}
        return given | {"max_cached_tokens": self.max_tokens_in_cache, "kv_fraction": self.kv_fraction}
