"""A model in several processes: the first one leads, the others follow its commands.

The first process is the program that asked for the model: an `LLM`, or the engine's process of a server. It schedules,
samples tokens and computes its own part (`model/split.py`). It starts the others (`worker.py`), which compute their
parts: they run the same `Runner` on the same steps, which they receive as data. Two kinds of data go between processes.
Numbers of the computation go by collectives (`kernels/group.py`). Everything else goes through the pipe that is a
worker's standard input: first its job, then one command after another, each a length of four bytes and a msgpack value.
Nothing is ever unpickled, and there is no port but gloo's own on loopback.

A worker's commands contain what it cannot know: the rows of each sequence in a step, their token ids, and the blocks
that a sequence has gained. It keeps a `Sequence` for each, which no scheduler handles.

**When a process dies.** A worker ends the moment the pipe does, whatever its leader died of. A leader learns of a dead
worker from the other pipe, the worker's standard output, through a thread that waits for its end. Every exchange under
way is then aborted. Waiting calls and later ones raise: an engine's step `WorkerLost`, other calls RuntimeError. A
server's engine ends as soon as that thread knows (`on_lost`), and its supervisor starts another. A worker that lives
but is stopped is lost too, once an exchange or a full pipe has waited for it too long.

A process that raises within a step leaves the others waiting for it in theirs. Where it has too little memory they
recover. Each reports the result of every step, exchanges under way are ended, and all meet again (`Rendezvous`). The
leader raises the exception that one process alone would, so the step is run again in halves and later ones in pieces of
that size. Any other exception, which fails one request in one process, is `WorkerLost` here. It is no `Exception`,
because an engine answers those by running the step again, sequence by sequence.

Between GPUs a worker recovers only where its host is through with the step, and the device alone waits: no other
process ends its exchanges. A host that has to read from the device within a step (`Decoder.by_token`) hangs there for
`WAIT`. So with such a model a leader that has too little memory raises `WorkerLost` at once; where a worker has too
little, any third process is waited for in vain, and so is one whose allocator happens to wait for the device.

An adapter is read by the leader first, which reports its errors, and then, by its folder, by the others, which end
where it has changed meanwhile.

Not done: CUDA graphs and recorded steps of several processes; steps launched before the tokens of the one before are
known; calibrated KV cache schemes; probes of a receipt, whose noise is that of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import shutil
import socket
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
from attar.errors import UserError
from attar.execution.model_runner import BlockCounts, InflightTokens, Runner, Wanted, waits
from attar.execution.parallel import commands
from attar.execution.parallel.commands import Command, Job, Pool, Reply, Run, encode
from attar.kernels import dispatch
from attar.kernels.group import WAIT, Group
from attar.kernels.operands import Routes
from attar.kv import schemes
from attar.kv.schemes import KvScheme
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.parallel import Groups, SplitDecoder
from attar.model.split import Share, split
from attar.progress import StageProgress
from attar.protocol import framing
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sequence import Status
from attar.scheduling.step_plan import StepPlan

START_SECONDS = 120.0  # that a worker may take before it begins to load
LOAD_SECONDS = 3600.0
UNREAD_SECONDS = WAIT.total_seconds()  # that a worker may leave a full pipe unread
END_SECONDS = 5.0
MOMENT = 0.5  # seconds between the end of a connection and that of the process behind it


class WorkerLost(BaseException):
    """A worker process is gone, or out of step, while an engine ran one: nothing can be computed now."""


def job_groups(job: Job) -> Groups:
    """Meet the other processes. Raises RuntimeError where they do not come."""
    share, device, (at_layers, at_stages) = job.share, torch.device(job.device), _meeting(job, 0)
    layers = Group(at_layers, share.place, share.tp, device) if share.tp > 1 else None
    stages = Group(at_stages, share.stage, share.pp, device) if share.pp > 1 else None
    return Groups(layers, stages)


def meet_again(job: Job, groups: Groups, time: int) -> None:
    """Meet the others again, out of a step that not all completed; `time` counts these rendezvous."""
    groups.leave()
    for group, file in zip((groups.layers, groups.stages), _meeting(job, time), strict=True):
        if group is not None:
            group.meet(file)


def _meeting(job: Job, time: int) -> tuple[Path, Path]:
    """Return the rendezvous files of the processes of the same layers, and of the same place in every stage."""
    share, folder = job.share, Path(job.folder)
    return folder / f"layers{share.stage}.{time}", folder / f"stages{share.place}.{time}"


def load(job: Job, groups: Groups, progress: StageProgress | None = None) -> SplitDecoder:
    """Load this process's part of the model. Raises ValueError like `shards.load`."""
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(job.threads)
    dtype: torch.dtype | None = None if job.dtype is None else getattr(torch, job.dtype)
    store = dispatch.store(job.activations, job.device, dtype) if job.native and dtype is not None else None
    return shards.load(Path(job.model), job.share, groups, dtype, progress, store)


# The leader's side


class WorkerGroup:
    """The workers' processes and their state. It knows no model: it ends the processes when that is gone."""

    def __init__(self, folder: Path, jobs: Sequence[Job]) -> None:
        self.folder, self.lost, self.ending = folder, "", False
        self.groups: Groups | None = None
        self.met = 0  # number of repeated rendezvous
        self.heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Replies of the workers about steps; None where there will be no more."""
        self.on_lost: Callable[[str], None] | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self.free: int | None = None  # bytes of the fullest of the workers' GPUs, when they started; None on CPUs
        command = [sys.executable, "-m", "attar.execution.parallel.worker"]
        try:
            for job in jobs:
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
                self.children.append(child)
                assert child.stdin is not None
                os.set_blocking(child.stdin.fileno(), False)  # of this end alone
                self.write(child, encode(job))
        except BaseException:
            self.end()
            raise

    def write(self, child: subprocess.Popen[bytes], data: bytes) -> None:
        """Write to a worker, which reads after its earlier commands are done.

        Raises RuntimeError where it reads nothing for longer than it may be behind. It then has a part of a command, so
        no more can be sent.
        """
        assert child.stdin is not None
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # it is dead: waiting for it will show that
            while view:
                if not polled(child.stdin.fileno(), select.POLLOUT, UNREAD_SECONDS):
                    self.lose(f"process {self.children.index(child) + 1} of the model reads nothing any more")
                    raise RuntimeError(self.lost)
                view = view[child.stdin.write(view) or 0 :]

    def wait_for(self, what: str, seconds: float) -> None:
        """Wait until every worker has replied `what`. Raises ValueError with the text of one that cannot, RuntimeError
        where one ended, or gives no reply for so long."""
        limit = time.monotonic() + seconds
        for number, child in enumerate(self.children, 1):
            said = _read_said(child, limit)
            if said is None:
                raise RuntimeError(f"process {number} of the model ended before it had {what}")
            if said.what != what:
                raise UserError(said.code, said.text)
            if said.free is not None:
                self.free = said.free if self.free is None else min(self.free, said.free)

    def watch(self) -> None:
        """Read the workers' replies, until one of them ends."""
        children = {child.stdout.fileno(): child for child in self.children if child.stdout is not None}
        poll = select.poll()
        for fd in children:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                said: Reply | None = None
                with contextlib.suppress(RuntimeError):
                    if not self.ending:  # which closes the pipes: their numbers may soon be those of other files
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

    def verdicts(self) -> set[str]:
        """Return all workers' replies to the last step or rendezvous. Raises RuntimeError where one is gone."""
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
        """Return which worker has ended, or does within `seconds`; "" where none has."""
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
        """End all workers."""
        if self.ending:
            return
        self.ending = True
        for child in self.children:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(encode(commands.End()))  # one that does not read is not waited for
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


def polled(fd: int | socket.socket, event: int, seconds: float) -> bool:
    """Return whether `fd` can be read from, or written to, in time, or its other end is closed: with `event` 0 that
    alone. `select` is no choice: it stops at descriptor 1023."""
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(1000 * seconds))


def _read_said(child: subprocess.Popen[bytes], limit: float) -> Reply | None:
    """Read one message of a worker, None where it ended instead. Raises RuntimeError where it comes too late."""
    assert child.stdout is not None
    fd, data = child.stdout.fileno(), b""
    while wanted := framing.missing(data, commands.MAX_FRAME):
        if not polled(fd, select.POLLIN, max(0.0, limit - time.monotonic())):
            raise RuntimeError("the processes of the model did not start in time")
        more = os.read(fd, wanted)
        if not more:
            return None
        data += more
    return msgspec.msgpack.decode(data[framing.HEAD :], type=Reply)


class ParallelExecutor:
    """A model in `tp * pp` processes, of which this is the first; `decoder` is its part, and leads all of them.

    On `cuda` each process has a GPU of its own. On CPUs they share the cores: that is for checking, not for speed.
    Raises ValueError where the model cannot be split in this way, before any process is started, or cannot be loaded,
    and RuntimeError where a process is lost meanwhile.
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
        progress: StageProgress | None = None,
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
        self.workers = workers = WorkerGroup(folder, jobs[1:])
        try:
            workers.wait_for("started", START_SECONDS)
            workers.groups = job_groups(jobs[0])
            self.decoder = load(jobs[0], workers.groups, progress)
            workers.wait_for("loaded", LOAD_SECONDS)
        except BaseException:
            workers.end()
            raise
        self.close = weakref.finalize(self.decoder, workers.end)
        """Ends the processes, like the end of the decoder's owner."""
        threading.Thread(target=workers.watch, name="worker-watch", daemon=True).start()
        self.decoder.lead = Caller(workers)

    def runner(
        self, decoder: Decoder, blocks: int | BlockCounts, context: int, scheme: KvScheme, sequences: int, bases: None,
        record: None, drafts: int = 0,
    ) -> ParallelRunner:  # fmt: skip
        """Return a `Runner` of all processes, for an engine. It replaces the one before."""
        assert decoder is self.decoder
        assert bases is None, "calibrated schemes are refused"
        assert record is None, "steps of several processes are not recorded"
        del drafts  # of which a recording would need to know
        counts = blocks if isinstance(blocks, BlockCounts) else BlockCounts(blocks)
        pool = Pool(counts.blocks, context, scheme.name, sequences, counts.sliding)
        return ParallelRunner(self.workers, self._job, self.decoder, pool)


def check(path: Path, first: Share, device: str, native: bool) -> None:
    """Raise ValueError where the model cannot be split in this way, or devices are missing, from headers alone. On a
    CPU `native` kernels run a GGUF file's blocks, which `split` cuts between them."""
    if not torch.distributed.is_available():
        raise UserError("parallel_unsupported", "this build of torch has no torch.distributed: --tp and --pp need it")
    if device != "cpu":
        dispatch.require(device)
        if ":" in device:
            raise UserError("option_conflict", f"processes take the GPUs in order: device is cuda, not {device}")
        if (found := torch.cuda.device_count()) < first.count:
            raise UserError(
                "device_unavailable",
                f"--tp {first.tp} with --pp {first.pp} needs {first.count} GPUs: this machine has {found}",
            )
    checkpoint = shards.open_checkpoint(path, blocks=native and device == "cpu")
    for share in first.every():
        split(checkpoint.config, share, shards.schemes(checkpoint, checkpoint.config))


def tell(workers: WorkerGroup, command: Command) -> None:
    """Send a command to all workers. Raises RuntimeError where a worker is gone."""
    if workers.ending or workers.lost:
        raise RuntimeError(workers.lost or "the processes of the model were ended")
    data = encode(command)
    for child in workers.children:
        workers.write(child, data)


class Caller:
    """A sender of calls of the decoder itself, outside of an engine's steps."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers, self.stepping = workers, False
        self._numbers = itertools.count()
        self._rooms: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
        self._left: list[int] = []

    def call(self, ids: Tensor, step: ForwardBatch, rows: Tensor | None) -> None:
        cache, room = step.cache, None
        while self._left:
            tell(self.workers, commands.Shutdown(self._left.pop()))
        if cache is not None:
            room = self._rooms.get(cache)
            if room is None:
                room = self._rooms[cache] = next(self._numbers)
                sizes = (cache.capacity, len(cache.filled), cache.scheme.name, cache.block)
                tell(self.workers, commands.Room(room, *sizes))
                weakref.finalize(cache, self._left.append, room)
        filled = [] if cache is None else list(cache.filled)
        picked = None if rows is None else rows.tolist()
        tell(self.workers, commands.Call(room, filled, step.lengths, step.horizon, ids.tolist(), picked, step.adapters))

    def logits(self, rows: int, routes: Routes | None) -> bool:
        if self.stepping:
            return False
        tell(self.workers, commands.Logits(rows, [] if routes is None else routes.numbers.tolist()))
        return True

    def adapt(self, number: int, folder: str) -> None:
        tell(self.workers, commands.Adapt(number, folder))


class ParallelRunner(Runner):
    """A `Runner` whose steps all processes run."""

    def __init__(self, workers: WorkerGroup, job: Job, decoder: SplitDecoder, pool: Pool) -> None:
        self.workers, self.job = workers, job
        self._known: dict[Tokens, tuple[int, list[int]]] = {}  # a sequence's number, and the blocks sent so far
        self._numbers = itertools.count()
        tell(workers, pool)
        counts = BlockCounts(pool.blocks, pool.sliding)
        super().__init__(decoder, counts, pool.context, schemes.scheme(pool.kv), pool.sequences)
        self.waits = "several processes compute a step together"

    def run(
        self, plan: StepPlan, wanted: dict[str, Wanted] | None = None, inflight_tokens: InflightTokens | None = None
    ) -> Tensor:
        """Run the step like `Runner.run`, in all processes.

        Raises torch.OutOfMemoryError where any process has too little memory, and Lost where a process is gone and for
        any other exception within the step.
        """
        assert inflight_tokens is None, "tokens are told by the host"
        assert isinstance(self.decoder, SplitDecoder)
        assert isinstance(self.decoder.lead, Caller)
        self.decoder.lead.stepping = True
        try:
            tell(self.workers, self._told(plan, wanted or {}))
            found = self._own(plan, wanted)
            if isinstance(found, torch.OutOfMemoryError) and waits(self.decoder) is not None:
                raise RuntimeError("too little memory, and the others wait within the step") from found
            verdicts = self.workers.verdicts()
            if "short" in verdicts or isinstance(found, torch.OutOfMemoryError):
                del found  # and its partial results
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
            if not self.workers.lost:
                self.workers.lose(self.workers.ended() or f"a step raised {type(error).__name__}: {error}")
            raise WorkerLost(self.workers.lost) from error
        except BaseException:  # Ctrl-C, say: the others' replies to this step would be taken for those of the next
            self.workers.lose("a step was broken off")
            raise
        finally:
            self.decoder.lead.stepping = False

    def _own(self, plan: StepPlan, wanted: dict[str, Wanted] | None) -> Tensor | Exception:
        """Return the result of this process's part, or the exception that it raised."""
        try:
            return super().run(plan, wanted)
        except Exception as error:
            assert self.workers.groups is not None
            self.workers.groups.leave()  # others may wait for this one
            return error

    def _meet(self) -> None:
        """Return to the beginning of a step that not all completed. Raises RuntimeError where a process is gone."""
        assert self.workers.groups is not None
        self.release()
        self.workers.met += 1
        machine.private_folder(self.workers.folder)  # without it torch waits for 300 s, and nothing can stop it
        tell(self.workers, commands.Rendezvous(self.workers.met))
        meet_again(self.job, self.workers.groups, self.workers.met)
        # A process that left again at once, out of a step that is short too, would reset connections that others are
        # still making: gloo fails in them, or ends the process.
        if (verdicts := self.workers.verdicts()) != {"met"}:
            raise RuntimeError(f"the processes of the model did not meet again: {verdicts}")

    def _told(self, plan: StepPlan, wanted: Mapping[str, Wanted]) -> Run:
        done = (Status.PREEMPTED, Status.ENDED)
        gone = [self._known.pop(each)[0] for each in list(self._known) if each.status in done]
        pieces = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
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
                commands.Piece(
                    number, chunk.start, chunk.samples, chunk.ids, kept, new,
                    sequence.prompt, sequence.horizon, sequence.adapter,
                    want.logits is not None, want.hidden is not None,
                    sequence.slid, sequence.sliding[sequence.slid :],
                )
            )  # fmt: skip
        copies, sliding = (
            [(copy.source, copy.target, copy.slots) for copy in told] for told in (plan.copies, plan.sliding_copies)
        )
        return Run(pieces, copies, gone, sliding)
