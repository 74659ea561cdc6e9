"""Output that all commands share, for a person at a terminal, a pipe, or a script.

Results go to stdout, everything else to stderr. With `--json` the last line of stdout is one JSON object: after an
error, {"error": sentence, "code": code}, whose codes are in `errors.py`. Exit status 0 is success, 1 a check that
failed, 2 bad usage or input, 130 Ctrl-C, 141 a closed stdout (as other tools under `| head`). An error that a user can
mend is one sentence; any other error is a bug, and keeps its traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import typer

from attar.errors import Code, UserError, code_of
from attar.text.answers.events import AnswerEvent, ReasoningDelta, TextDelta

CHECK_FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
LEAST = 10**6  # the least bytes that a number without a unit may mean
RECIPES = "recipes"  # the stage that contains others
RESUMED = ("blocks", RECIPES)
NO_RECEIPT = "this model has no receipt, so its outputs are not checked; attar writes one when it compresses a model"

ASK = """
import sys
from attar.errors import code_of
from attar.kernels import dispatch
try:
    dispatch.require(sys.argv[1])
except ValueError as error:
    print(code_of(error), error)
"""

Result = TypeVar("Result")


def emit(as_json: bool, value: dict[str, Any]) -> None:
    """Print the JSON object, in ASCII, so that neither the locale nor an exotic line separator can break it."""
    if as_json:
        print(json.dumps(value, allow_nan=False), flush=True)


def print_pieces(stream: Generator[str, None, Result]) -> Result:
    """Print a text as it is generated, and a line break behind it; returns the generator's return value."""
    try:
        while True:
            print(next(stream), end="", flush=True)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        print()


def dimmed(stream: Generator[AnswerEvent, None, Result]) -> Generator[str, None, Result]:
    """Yield the text of an answer's events with its reasoning dim; where stdout is no terminal, the reasoning goes to
    stderr. Returns the generator's return value."""
    terminal, reasoning = sys.stdout.isatty(), False
    while True:
        try:
            event = next(stream)
        except StopIteration as end:
            result: Result = end.value
            return result
        text = f"\033[2m{event.text}\033[22m" if isinstance(event, ReasoningDelta) else ""
        if isinstance(event, TextDelta):
            text = "\n\n" + event.text if reasoning and terminal else event.text
        elif isinstance(event, ReasoningDelta) and not terminal:
            text = ""
            print(event.text, end="", file=sys.stderr, flush=True)
        reasoning = isinstance(event, ReasoningDelta)
        if text:
            yield text


def read_stdin() -> str:
    """Read a prompt from stdin, less one line break at its end, which shells add."""
    if sys.stdin.isatty():
        tell("reading the prompt from stdin; Ctrl-D ends it")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError("text_not_utf8", f"stdin is not UTF-8 text: byte {error.start} does not decode") from None
    return text.removesuffix("\n").removesuffix("\r")


def parse_bytes(text: str) -> int:
    """Parse a size such as 512MiB, 5GB or 1e9 to bytes. Raises ValueError naming the units, also for a number so small
    that a unit was forgotten."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip("BbKkMmGgIi ")
    unit = text[len(number) :].strip().upper()
    try:
        size = float(number) * units[unit]
    except (ValueError, KeyError):
        raise UserError("option_malformed", f"{text!r} is not a size: write it like 512MiB, 2GiB or 5GB") from None
    if not 0 <= size < 2**63:
        raise UserError("option_out_of_range", f"{text!r} is not a size a machine could have")
    if not unit and 0 < size < LEAST:
        message = f"{text!r} is a number of bytes: write the unit as well, such as {number.strip()}GB"
        raise UserError("option_malformed", message)
    return int(size)


@contextmanager
def errors(as_json: bool, after_interrupt: str | None = None) -> Iterator[None]:
    """Turn errors that a user can mend into a sentence on stderr, {"error": sentence, "code": code} with --json, and an
    exit status.

    `after_interrupt` says what a user can do after Ctrl-C, where there is something.
    """

    def end(sentence: str, code: Code, status: int) -> NoReturn:
        emit(as_json, {"error": sentence, "code": code})
        fail(sentence, status)

    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        end("interrupted" + (f": {after_interrupt}" if after_interrupt else ""), "interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered output is discarded
        raise typer.Exit(PIPE_CLOSED) from None
    except (ValueError, OSError) as error:
        from attar.checkpoints.strict_io import VerificationError

        end(_sentence(error), code_of(error), CHECK_FAILED if isinstance(error, VerificationError) else BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for running out of memory on a CPU.
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        sentence = "out of memory: close other programs, or take a smaller model, batch or --calib-memory"
        end(sentence, "memory_insufficient", BAD_INPUT)


def _sentence(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return ("" if error.filename is None else f"{error.filename}: ") + error.strerror.lower()
    return " ".join(str(error).split("\n"))


def tell(sentence: str) -> None:
    print(f"attar: {sentence}", file=sys.stderr)


def require(device: str) -> None:
    """Raise ValueError where `device` cannot compute, before anything is read, fetched or started. torch is imported
    only to ask for a GPU."""
    if device != "cpu":
        from attar.kernels import dispatch

        dispatch.require(device)


def require_apart(device: str) -> None:
    """Check `device` as `require` does, in another process: torch and an opened GPU would hold memory in this one, and
    a server lives long. It takes as long as torch takes to load."""
    if device != "cpu":
        asked = subprocess.run([sys.executable, "-c", ASK, device], stdout=subprocess.PIPE, text=True, check=False)
        if asked.returncode:  # it has printed why on stderr, unless a signal ended it
            message = f"cannot compute on {device}: the process that was to try ended with {asked.returncode}"
            raise UserError("device_unavailable", message)
        if asked.stdout:
            code, _, sentence = asked.stdout.strip().partition(" ")
            raise UserError(cast(Code, code), f"{sentence}; --device cpu needs none, whatever --triton-config says")


def tell_shared(device: str, tp: int, pp: int) -> None:
    """Print what several processes on a CPU are good for."""
    if device == "cpu" and tp * pp > 1:
        tell(f"{tp * pp} processes share this machine's cores: that is for checks, and no faster than one")


def tell_doubt(adapter: Path | None, base: Path) -> None:
    """Warn where an adapter may not fit its base."""
    from attar.checkpoints.adapters import lora

    if adapter is not None and (sentence := lora.doubt(adapter, base)) is not None:
        tell(sentence)


def fail(sentence: str, status: int) -> NoReturn:
    sys.stdout.flush()  # keeps the order of both outputs
    tell(sentence)
    raise typer.Exit(status)


class Progress:
    """Named stages and the time left, on stderr: bars on a terminal, elsewhere a line every half minute."""

    LINE_SECONDS = 30.0

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._stage = ""
        self._start = (0.0, 0)  # of the stage: time, and the amount done by then
        self._seen: set[str] = set()
        self._recipe = ""  # the one being tried, of several
        self._told = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._quiet:
            return
        if stage in RESUMED and stage not in self._seen and done:
            tell(f"going on where an earlier run stopped: {done} of {total} {stage} were done")
        self._seen.add(stage)
        if stage == RECIPES:
            self._recipe = f"recipe {done + 1} of {total}, " if done < total else ""
        if sys.stderr.isatty():
            self._draw(stage, done, total)
        else:
            self._log(stage, done, total)

    def _draw(self, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            from rich import progress
            from rich.console import Console

            self._bars = progress.Progress(
                progress.TextColumn("{task.description:<14}"), progress.BarColumn(), progress.TaskProgressColumn(),
                progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn(),
                console=Console(stderr=True), transient=True, redirect_stdout=False,
                speed_estimate_period=1e9,  # a block may take minutes: average over the whole stage
            )  # fmt: skip
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        task = self._tasks[stage]
        if done < self._bars.tasks[task].completed:
            self._bars.reset(task, total=total)  # the stage restarts, for another model
        self._bars.update(task, completed=done, total=total)

    def _log(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or done < self._start[1]:
            self._stage, self._start = stage, (now, done)
        if now - self._told < self.LINE_SECONDS:
            return
        self._told = now
        since, before = self._start
        left = f", {(now - since) / (done - before) * (total - done):.0f} s left" if done > before else ""
        of = "" if stage == RECIPES else self._recipe
        print(f"{of}{stage}: {done} of {total}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars, self._tasks = None, {}


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    bar = Progress(quiet)
    try:
        yield bar
    finally:
        bar.close()
