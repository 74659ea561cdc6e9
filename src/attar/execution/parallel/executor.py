"""A model in several processes: the first one leads, the others follow its commands.

The first process is the program that asked for the model: an `LLM`, or the engine's process of a server. It schedules,
samples tokens and computes its own part (`model/split.py`). It starts the others (`worker.py`), which compute their
parts: they run the same `Runner` on the same steps, which they receive as data. Two kinds of data go between processes.
Numbers of the computation go by collectives (`kernels/group.py`). Everything else goes through pipes, as messages
(`worker_group.py`). Nothing is ever unpickled, and there is no port but gloo's own on loopback.

A worker's commands contain what it cannot know: the rows of each sequence in a step, their token ids, and the blocks
that a sequence has gained. It keeps a `Sequence` for each, which no scheduler handles.

**When a process dies.** A worker ends with its leader, whatever that died of, and the leader soon learns of a dead
worker. Every exchange under way is then aborted. Waiting calls and later ones raise: an engine's step `WorkerLost`,
other calls RuntimeError. A server's engine ends as soon as it is known (`on_lost`), and its supervisor starts another.

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

import itertools
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from attar import machine
from attar.checkpoints.sources import shards
from attar.errors import UserError
from attar.execution.model_runner import BlockCounts, Runner, Wanted, waits
from attar.execution.parallel import commands
from attar.execution.parallel.commands import Job, Pool, Run
from attar.execution.parallel.part import job_groups, load, meet_again
from attar.execution.parallel.worker_group import WorkerGroup
from attar.execution.step_inputs import InflightTokens
from attar.kernels import dispatch
from attar.kernels.operands import Routes
from attar.kv import schemes
from attar.kv.schemes import KvScheme
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.parallel import SplitDecoder
from attar.model.split import Share, split
from attar.progress import StageProgress
from attar.scheduling.sequence import Sequence as Tokens
from attar.scheduling.sequence import Status
from attar.scheduling.step_plan import StepPlan

START_SECONDS = 120.0  # that a worker may take before it begins to load
LOAD_SECONDS = 3600.0


class WorkerLost(BaseException):
    """A worker process is gone, or out of step, while an engine ran one: nothing can be computed now."""


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
            self.workers.tell(commands.Shutdown(self._left.pop()))
        if cache is not None:
            room = self._rooms.get(cache)
            if room is None:
                room = self._rooms[cache] = next(self._numbers)
                sizes = (cache.capacity, len(cache.filled), cache.scheme.name, cache.block)
                self.workers.tell(commands.Room(room, *sizes))
                weakref.finalize(cache, self._left.append, room)
        filled = [] if cache is None else list(cache.filled)
        picked = None if rows is None else rows.tolist()
        self.workers.tell(commands.Call(room, filled, step.lengths, step.horizon, ids.tolist(), picked, step.adapters))

    def logits(self, rows: int, routes: Routes | None) -> bool:
        if self.stepping:
            return False
        self.workers.tell(commands.Logits(rows, [] if routes is None else routes.numbers.tolist()))
        return True

    def adapt(self, number: int, folder: str) -> None:
        self.workers.tell(commands.Adapt(number, folder))


class ParallelRunner(Runner):
    """A `Runner` whose steps all processes run."""

    def __init__(self, workers: WorkerGroup, job: Job, decoder: SplitDecoder, pool: Pool) -> None:
        self.workers, self.job = workers, job
        self._known: dict[Tokens, tuple[int, list[int]]] = {}  # a sequence's number, and the blocks sent so far
        self._numbers = itertools.count()
        workers.tell(pool)
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
            self.workers.tell(self._told(plan, wanted or {}))
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
        self.workers.tell(commands.Rendezvous(self.workers.met))
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
