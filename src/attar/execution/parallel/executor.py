"""A model in several processes: the first one leads, the others follow what it says.

The first process is whoever asked for the model: an `LLM`, or the engine's process of a server. It schedules, chooses
tokens and computes its own part (`model/split.py`). The others are started by it (`worker.py`) and compute theirs: they
run the same `Runner` on the same steps, which they are told as data. Between processes go two kinds of things. Numbers
of the computation go by collectives (`kernels/group.py`). Everything else goes through the pipe that is a worker's
standard input: first its job, then one command after another, each a length of four bytes and a msgpack value. Nothing
is ever unpickled, and there is no port but gloo's own on loopback.

Of a step a worker is told what it cannot know: which rows of which sequences run, their token ids, and the blocks that
a sequence has gained. It keeps a `Sequence` for each, which nobody schedules.

**When something dies.** A worker ends the moment the pipe does, whatever its leader died of. A leader learns of a dead
worker from the other pipe, the worker's standard output, through a thread that waits for its end: then every exchange
under way is aborted, and what waits raises, as does whatever is called next: an engine's step `Lost`, other calls
RuntimeError. A server's engine ends as soon as that thread knows (`on_lost`), and its supervisor starts another.
A worker that lives but is stopped is lost too, where an exchange or a full pipe has waited for it too long.

A process that raises within a step has left the others behind in theirs, waiting for it. Where it has too little
memory they come back: each says of every step what became of it, exchanges that are under way are ended, all meet anew
(`Meet`), and the leader raises what one process alone would, so that the step is run again in halves and later ones in
pieces of that size. Whatever else raises, and fails one request in one process, is `Lost` here. That is no `Exception`,
because an engine answers those by running the step again, sequence by sequence.

Between GPUs a worker comes back only where its host is through with the step, and the device alone waits: nobody ends
its exchanges but itself. A host that has to look at the device within a step (`Decoder.by_token`) hangs there for
`WAIT`. So with such a model a leader that has too little memory says `Lost` at once; where a worker has, any third
process is waited for in vain, and so is one whose allocator happens to wait for the device.

An adapter is read by the leader first, which finds what is wrong with it, and then, by its folder, by the others, which
end where it has changed meanwhile.

Not done: CUDA graphs and recorded steps of several processes, steps that are launched before the tokens of the one
before are known, key-value schemes that are calibrated, and probes of a receipt, whose noise is that of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from attar import machine
from attar.checkpoints.sources import shards
from attar.execution.cuda_graphs import Record
from attar.execution.model_runner import Coming, Runner, Wanted, waits
from attar.execution.parallel.commands import (
    Adapt,
    Call,
    Command,
    End,
    Job,
    Leave,
    Logits,
    Meet,
    Piece,
    Pool,
    Room,
    Run,
    Said,
    frame,
)
from attar.kernels import ops
from attar.kernels.group import WAIT, Group
from attar.kernels.operands import Routes
from attar.kernels.ops import Store
from attar.kv.pages import Bases
from attar.kv.schemes import KvScheme
from attar.model.cache import KVCache, Step
from attar.model.decoder import Decoder
from attar.model.parallel import Groups, SplitDecoder
from attar.model.split import Share, split
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sequence import Status
from attar.scheduling.step_plan import StepPlan

START_SECONDS = 120.0  # that a worker may take before it begins to load
LOAD_SECONDS = 3600.0
UNREAD_SECONDS = WAIT.total_seconds()  # that a worker may leave a full pipe unread
END_SECONDS = 5.0
MOMENT = 0.5  # seconds between the end of a connection and that of the process behind it

Progress = Callable[[int, int], None]


class Lost(BaseException):
    """A process of the team was found gone, or out of step, while an engine ran one: nothing can be computed now."""


def job_groups(job: Job) -> Groups:
    """Meet the others. Raises RuntimeError where they do not come."""
    share, device, (at_layers, at_stages) = job.share, torch.device(job.device), _meeting(job, 0)
    layers = stages = None
    if share.tp > 1:
        layers = Group(at_layers, share.place, share.tp, device)
    if share.pp > 1:
        stages = Group(at_stages, share.stage, share.pp, device)
    return Groups(layers, stages)


def meet_again(job: Job, groups: Groups, time: int) -> None:
    """Meet the others for this many-th time, out of a step that not all of them could do."""
    groups.leave()
    for group, file in zip((groups.layers, groups.stages), _meeting(job, time), strict=True):
        if group is not None:
            group.meet(file)


def _meeting(job: Job, time: int) -> tuple[Path, Path]:
    """Where those of the same layers find each other, and those of the same place in every stage."""
    share, folder = job.share, Path(job.folder)
    return folder / f"layers{share.stage}.{time}", folder / f"stages{share.place}.{time}"


def load(job: Job, groups: Groups, progress: Progress | None = None) -> SplitDecoder:
    """The part of the model that is this process's. Raises ValueError as `sources.load`."""
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(job.threads)
    dtype: torch.dtype | None = None if job.dtype is None else getattr(torch, job.dtype)
    store: Store | None = None
    if job.native and dtype is not None:
        store = ops.store(job.activations, job.device, dtype)
    return shards.load(Path(job.model), job.share, groups, dtype, progress, store)


# The leader's side


class Crew:
    """The workers' processes, and what became of them. It knows no model: it ends the processes when that is gone."""

    def __init__(self, folder: Path, jobs: Sequence[Job]) -> None:
        self.folder, self.lost, self.ending = folder, "", False
        self.groups: Groups | None = None
        self.met = 0
        """How often all have met anew."""
        self.heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """What the workers say of steps; None where there will be no more."""
        self.on_lost: Callable[[str], None] | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self.free: int | None = None
        """Bytes of the fullest of the workers' GPUs, when they started; None on CPUs."""
        command = [sys.executable, "-m", "attar.execution.parallel.worker"]
        try:
            for job in jobs:
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
                self.children.append(child)
                assert child.stdin is not None
                os.set_blocking(child.stdin.fileno(), False)  # of this end alone
                self.write(child, frame(job))
        except BaseException:
            self.end()
            raise

    def write(self, child: subprocess.Popen[bytes], data: bytes) -> None:
        """To a worker, which reads when it has done what it was told before. Raises RuntimeError where it reads nothing
        for longer than it may be behind; it has a part of a command then, so nobody can speak with it any more."""
        assert child.stdin is not None
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # it is dead: whoever waits for it learns so
            while view:
                if not _ready(child.stdin.fileno(), select.POLLOUT, UNREAD_SECONDS):
                    self.lose(f"process {self.children.index(child) + 1} of the model reads nothing any more")
                    raise RuntimeError(self.lost)
                view = view[child.stdin.write(view) or 0 :]

    def wait_for(self, what: str, seconds: float) -> None:
        """Until every worker has said so. Raises ValueError with the words of one that cannot, RuntimeError where one
        ended, or says nothing for so long."""
        limit = time.monotonic() + seconds
        for number, child in enumerate(self.children, 1):
            said = _read_said(child, limit)
            if said is None:
                raise RuntimeError(f"process {number} of the model ended before it had {what}")
            if said.what != what:
                raise ValueError(said.text)
            if said.free is not None:
                self.free = said.free if self.free is None else min(self.free, said.free)

    def watch(self) -> None:
        """Hear what the workers say, until one of them ends."""
        children = {child.stdout.fileno(): child for child in self.children if child.stdout is not None}
        said: Said | None = None
        poll = select.poll()
        for fd in children:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if self.ending:  # which closes the pipes: their numbers may be those of other files soon
                    self.heard.put(None)
                    return
                with contextlib.suppress(RuntimeError):
                    said = _read_said(children[fd], time.monotonic() + MOMENT)
                if said is None:
                    if not self.ending:
                        number = self.children.index(children[fd]) + 1
                        self.lose(self.ended(END_SECONDS) or f"process {number} of the model speaks no more")
                    self.heard.put(None)
                    return
                if said.what not in ("ran", "met"):
                    self.abort()  # this process may wait for it
                self.heard.put(said.what)
                said = None

    def verdicts(self) -> set[str]:
        """What all workers say of the step or meeting they were told last. Raises RuntimeError where one is gone."""
        found = set()
        for _ in self.children:
            try:
                said = self.heard.get(timeout=UNREAD_SECONDS)
            except queue.Empty:
                self.lose("a process of the model says nothing of a step")
                said = None
            if said is None:
                raise RuntimeError(self.lost)
            found.add(said)
        return found

    def abort(self) -> None:
        """End the exchanges that this process is in."""
        if self.groups is not None:
            self.groups.abort()

    def ended(self, seconds: float = MOMENT) -> str:
        """Which worker has ended, or does in the next moment; nothing where none has."""
        limit = time.monotonic() + seconds
        while True:
            for number, child in enumerate(self.children, 1):
                if (status := child.poll()) is not None:
                    return f"process {number} of the model ended with status {status}"
            if time.monotonic() > limit:
                return ""
            time.sleep(MOMENT / 50)

    def lose(self, why: str) -> None:
        self.lost = self.lost or why  # the folder stays until `end`: see `kernels/group.py`
        if self.on_lost is not None:
            self.on_lost(why)
        self.abort()

    def end(self) -> None:
        """See that all have ended."""
        if self.ending:
            return
        self.ending = True
        for child in self.children:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(frame(End()))  # one that does not read is not waited for
            child.stdin.close()
        limit = time.monotonic() + END_SECONDS
        for child in self.children:
            try:
                child.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _ready(fd: int, event: int, seconds: float) -> bool:
    """Whether it can be read from, or written to, in time. Not by `select`, which takes no descriptor beyond 1023."""
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(1000 * seconds))


def _read_said(child: subprocess.Popen[bytes], limit: float) -> Said | None:
    """One message of a worker, None where it ended instead. Raises RuntimeError where it comes too late."""
    assert child.stdout is not None
    fd, data = child.stdout.fileno(), b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
        if not _ready(fd, select.POLLIN, max(0.0, limit - time.monotonic())):
            raise RuntimeError("the processes of the model did not start in time")
        wanted = 4 - len(data) if len(data) < 4 else 4 + int.from_bytes(data[:4], "little") - len(data)
        more = os.read(fd, wanted)
        if not more:
            return None
        data += more
    return msgspec.msgpack.decode(data[4:], type=Said)


class Team:
    """A model in `tp * pp` processes, of which this is the first; `decoder` is its part, and speaks for all of them.

    On `cuda` each process has a GPU of its own. On CPUs they share the cores: that is for checking, not for speed.
    Raises ValueError where the model cannot be shared so, before any process is started, or cannot be loaded, and
    RuntimeError where a process is lost meanwhile.
    """

    def __init__(
        self,
        path: Path,
        tp: int,
        pp: int,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = torch.float32,
        activations: str = "int8g128",
        native: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        first = Share(0, tp, pp)
        check(path, first, device, native and dtype == torch.float32)
        each = max(1, (threads or machine.cores()) // first.count)
        folder = Path(tempfile.mkdtemp(prefix="attar-"))  # of this user alone
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        jobs = [
            Job(
                str(path), share.rank, tp, pp, device if device == "cpu" else f"{device}:{share.rank}", name,
                activations, native, each, str(folder),
            )
            for share in first.every()
        ]  # fmt: skip
        self._job = jobs[0]
        self.crew = crew = Crew(folder, jobs[1:])
        try:
            crew.wait_for("started", START_SECONDS)
            crew.groups = job_groups(jobs[0])
            self.decoder = load(jobs[0], crew.groups, progress)
            crew.wait_for("loaded", LOAD_SECONDS)
        except BaseException:
            crew.end()
            raise
        self.close = weakref.finalize(self.decoder, crew.end)
        """Ends the processes, as does the end of whoever holds the decoder."""
        threading.Thread(target=crew.watch, name="team-watch", daemon=True).start()
        self.decoder.lead = Caller(crew)

    def runner(
        self,
        decoder: Decoder,
        blocks: int,
        context: int,
        scheme: KvScheme | None = None,
        sequences: int = 1,
        bases: Sequence[Bases] | None = None,
        record: Record | None = None,
    ) -> TeamRunner:
        """A `Runner` of all processes, for an engine. The one before is no more."""
        assert decoder is self.decoder
        assert bases is None, "calibrated schemes are refused"
        assert record is None, "steps of several processes are not recorded"
        return TeamRunner(self.crew, self._job, self.decoder, blocks, context, scheme, sequences)


def check(path: Path, first: Share, device: str, native: bool) -> None:
    """Raises ValueError where the model cannot be shared so, or there are not the devices, from headers alone. On a CPU
    `native` kernels run a GGUF file's blocks, which are cut between them as `plan` does."""
    if not torch.distributed.is_available():
        raise ValueError("this build of torch has no torch.distributed: --tp and --pp need it")
    if device != "cpu":
        ops.require(device)
        if ":" in device:
            raise ValueError(f"processes take the GPUs in order: device is cuda, not {device}")
        if (found := torch.cuda.device_count()) < first.count:
            raise ValueError(f"--tp {first.tp} with --pp {first.pp} needs {first.count} GPUs: this machine has {found}")
    checkpoint = shards.open_checkpoint(path, blocks=native and device == "cpu")
    for share in first.every():
        split(checkpoint.config, share, shards.schemes(checkpoint, checkpoint.config))


def tell(crew: Crew, command: Command) -> None:
    """Raises RuntimeError where somebody is gone."""
    if crew.ending or crew.lost:
        raise RuntimeError(crew.lost or "the processes of the model were ended")
    data = frame(command)
    for child in crew.children:
        crew.write(child, data)


class Caller:
    """Tells of calls of the decoder itself, outside of an engine's steps."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.stepping = crew, False
        self._numbers = itertools.count()
        self._rooms: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
        self._left: list[int] = []

    def call(self, ids: Tensor, step: Step, rows: Tensor | None) -> None:
        cache, room = step.cache, None
        while self._left:
            tell(self.crew, Leave(self._left.pop()))
        if cache is not None:
            room = self._rooms.get(cache)
            if room is None:
                room = self._rooms[cache] = next(self._numbers)
                tell(self.crew, Room(room, cache.capacity, len(cache.filled), cache.scheme.name, cache.block))
                weakref.finalize(cache, self._left.append, room)
        filled = [] if cache is None else list(cache.filled)
        picked = None if rows is None else rows.tolist()
        tell(self.crew, Call(room, filled, step.lengths, step.horizon, ids.tolist(), picked, step.adapters))

    def logits(self, rows: int, routes: Routes | None) -> bool:
        if self.stepping:
            return False
        tell(self.crew, Logits(rows, [] if routes is None else routes.numbers.tolist()))
        return True

    def adapt(self, number: int, folder: str) -> None:
        tell(self.crew, Adapt(number, folder))


class TeamRunner(Runner):
    """A `Runner` whose steps all processes run."""

    def __init__(
        self,
        crew: Crew,
        job: Job,
        decoder: SplitDecoder,
        blocks: int,
        context: int,
        scheme: KvScheme | None,
        sequences: int,
    ) -> None:
        self.crew, self.job = crew, job
        self._known: dict[Tokens, tuple[int, list[int]]] = {}  # a sequence's number, and the blocks it was told with
        self._numbers = itertools.count()
        tell(crew, Pool(blocks, context, (scheme or decoder.lossless).name, sequences))
        super().__init__(decoder, blocks, context, scheme, sequences)
        self.waits = "several processes compute a step together"

    def run(self, plan: StepPlan, wanted: dict[str, Wanted] | None = None, coming: Coming | None = None) -> Tensor:
        """As `Runner.run`, also torch.OutOfMemoryError where any process has too little memory. Raises Lost where a
        process is gone, and for whatever else is raised within the step."""
        assert coming is None, "tokens are told by the host"
        assert isinstance(self.decoder, SplitDecoder)
        assert isinstance(self.decoder.lead, Caller)
        self.decoder.lead.stepping = True
        try:
            tell(self.crew, self._told(plan, wanted or {}))
            found = self._own(plan, wanted)
            if isinstance(found, torch.OutOfMemoryError) and waits(self.decoder) is not None:
                raise RuntimeError("too little memory, and the others wait within the step") from found
            verdicts = self.crew.verdicts()
            if "short" in verdicts or isinstance(found, torch.OutOfMemoryError):
                del found  # and what was computed until it was raised
                try:
                    self._meet()
                except torch.OutOfMemoryError as error:
                    raise RuntimeError("too little memory to meet again") from error
                raise torch.OutOfMemoryError("a process of the model has too little memory for the step")
            if isinstance(found, Exception):
                raise found
            if verdicts != {"ran"}:
                raise RuntimeError("a process of the model has broken a step off")
            return found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not self.crew.lost:
                self.crew.lose(self.crew.ended() or f"a step raised {type(error).__name__}: {error}")
            raise Lost(self.crew.lost) from error
        except BaseException:  # Ctrl-C, say: what the others answer to this step would be taken for that of the next
            self.crew.lose("a step was broken off")
            raise
        finally:
            self.decoder.lead.stepping = False

    def _own(self, plan: StepPlan, wanted: dict[str, Wanted] | None) -> Tensor | Exception:
        """This process's part, or what it raised."""
        try:
            return super().run(plan, wanted)
        except Exception as error:
            assert self.crew.groups is not None
            self.crew.groups.leave()  # others may wait for this one
            return error

    def _meet(self) -> None:
        """Out of a step that not all could do: to where it began. Raises RuntimeError where somebody is gone."""
        assert self.crew.groups is not None
        self.release()
        self.crew.met += 1
        machine.private_folder(self.crew.folder)  # without it torch waits for 300 s, and nothing can stop it
        tell(self.crew, Meet(self.crew.met))
        meet_again(self.job, self.crew.groups, self.crew.met)
        # Somebody who left again at once, out of a step that is short too, would reset connections that others are
        # still making: gloo fails in them, or ends the process.
        if (verdicts := self.crew.verdicts()) != {"met"}:
            raise RuntimeError(f"the processes of the model did not meet again: {verdicts}")

    def _told(self, plan: StepPlan, wanted: Mapping[str, Wanted]) -> Run:
        done = (Status.PREEMPTED, Status.ENDED)
        gone = [self._known.pop(each)[0] for each in list(self._known) if each.status in done]
        pieces = []
        for sequence, start, rows, samples in plan.chunks:
            if sequence not in self._known:
                self._known[sequence] = next(self._numbers), []
            number, blocks = self._known[sequence]
            kept = len(blocks)
            if sequence.blocks[:kept] != blocks:  # few commits swap blocks for the prefix tree's
                kept = next(i for i, (a, b) in enumerate(zip(sequence.blocks, blocks, strict=False)) if a != b)
            new = sequence.blocks[kept:]
            blocks[kept:] = new
            want = wanted.get(sequence.id, Wanted())
            pieces.append(
                Piece(
                    number, start, samples, list(sequence.tokens[start : start + rows]), kept, new,
                    sequence.prompt, sequence.max_tokens, sequence.adapter,
                    want.logits is not None, want.hidden is not None,
                )
            )  # fmt: skip
        return Run(pieces, [(copy.source, copy.target, copy.slots) for copy in plan.copies], gone)
