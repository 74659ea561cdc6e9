"""A process that computes its part of a model on its leader's commands (`executor.py`).

It has no settings, no socket and no scheduler: a job and then commands come through its standard input, and numbers by
collectives. Its replies, that it has started and loaded its part and the result of each step, go out on its standard
output; while that pipe is open, its leader knows that it lives. When its input ends it ends too, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

import msgspec
import torch

from attar import machine
from attar.checkpoints.adapters import lora
from attar.errors import Code, UserError, code_of
from attar.execution.model_runner import BlockCounts, Runner, Wanted
from attar.execution.parallel import commands, part
from attar.execution.parallel.commands import MAX_FRAME, Call, Command, Job, Logits, Rendezvous, Reply, Run, encode
from attar.kernels.operands import Routes
from attar.kv import schemes
from attar.model.cache import ForwardBatch, KVCache, sent
from attar.model.parallel import SplitDecoder
from attar.protocol.framing import read
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import Copy, ScheduledTokens, StepPlan

ALARM_SECONDS = 10.0


class Worker:
    """Executes commands with its part of the model."""

    def __init__(self, decoder: SplitDecoder, job: Job) -> None:
        self.decoder, self.job = decoder, job
        self.runner: Runner | None = None
        self.sequences: dict[int, Sequence] = {}
        self.rooms: dict[int, KVCache] = {}

    @torch.inference_mode()
    def obey(self, command: Command) -> None:
        match command:
            case Run():
                self._run(command)
            case Call():
                self._call(command)
            case Logits():
                self._logits(command)
            case commands.Adapt():
                if command.number:
                    lora.install(self.decoder, command.number, Path(command.folder), Path(self.job.model))
                else:
                    lora.attach(self.decoder, Path(command.folder), Path(self.job.model))
            case commands.Pool():
                self.runner = None  # the old one's memory goes first
                self.sequences.clear()
                scheme = schemes.scheme(command.kv)
                counts = BlockCounts(command.blocks, command.sliding)
                self.runner = Runner(self.decoder, counts, command.context, scheme, command.sequences)
            case Rendezvous():
                assert self.runner is not None
                self.decoder.groups.leave()  # first: an exchange that no process ends would be waited for below
                self.runner.release()  # a rendezvous takes memory of a GPU
                part.meet_again(self.job, self.decoder.groups, command.time)
            case commands.Room():
                scheme, device = schemes.scheme(command.kv), str(self.decoder.device)
                self.rooms[command.number] = KVCache(
                    self.decoder.config, command.capacity, command.batch, scheme, device, command.block
                )
            case commands.Shutdown():
                del self.rooms[command.number]

    def _run(self, command: Run) -> None:
        assert self.runner is not None
        for number in command.gone:
            self.sequences.pop(number).status = Status.ENDED
        chunks, wanted = [], {}
        for piece in command.pieces:
            if (sequence := self.sequences.get(piece.sequence)) is None:
                sequence = self.sequences[piece.sequence] = Sequence(
                    id=str(piece.sequence), prompt_ids=[0] * piece.prompt, max_tokens=0, adapter=piece.adapter
                )
            sequence.horizon = piece.horizon
            del sequence.tokens[piece.start :]  # earlier tokens were run, or are another's and unread
            sequence.tokens.extend([0] * (piece.start - len(sequence.tokens)))
            sequence.tokens.extend(piece.tokens)
            sequence.blocks[piece.kept :] = piece.blocks
            sequence.slid, sequence.sliding = piece.slid, [0] * piece.slid + piece.sliding
            chunks.append(ScheduledTokens(sequence, piece.start, len(piece.tokens), piece.samples))
            if piece.wants_logits or piece.wants_hidden:
                logits, hidden = (_unread if wants else None for wants in (piece.wants_logits, piece.wants_hidden))
                wanted[sequence.id] = Wanted(logits, hidden)
        nobody = Sequence(id="copy", prompt_ids=[0], max_tokens=0)
        copies, sliding = ([Copy(*copy, nobody) for copy in told] for told in (command.copies, command.sliding_copies))
        self.runner.run(StepPlan(chunks, copies, sliding_copies=sliding), wanted)

    def _call(self, command: Call) -> None:
        cache = None if command.room is None else self.rooms[command.room]
        if cache is not None:
            cache.filled = list(command.filled)
        device = self.decoder.device
        rows = None if command.rows is None else torch.tensor(command.rows, dtype=torch.int64)
        ids = torch.tensor(command.ids, dtype=torch.int64, device=device)
        self.decoder.run(ids, ForwardBatch(command.lengths, command.horizon, cache, command.adapters, device), rows)

    def _logits(self, command: Logits) -> None:
        decoder, together = self.decoder, self.decoder.groups.layers
        if decoder.split.vocabulary is not None and together is not None:
            hidden = torch.empty((command.rows, decoder.config.hidden), dtype=decoder.dtype, device=decoder.device)
            routes = Routes(torch.tensor(command.adapters), partial(sent, decoder.device)) if command.adapters else None
            decoder.products(together.broadcast(hidden), routes=routes)


def _unread(chunk: ScheduledTokens, first: int, numbers: torch.Tensor) -> None:
    """Ignore numbers that the leader reads; they are computed here too for its sake. Nothing here waits for them."""


def _end_with(fd: int, folder: str) -> None:
    """End this process once no process can write to `fd`, and remove the folder that its leader may have left
    behind."""
    poll = select.poll()
    poll.register(fd, 0)  # hanging up is reported unasked
    poll.poll()
    # Torch may wait for the others with the interpreter's lock held, and then nothing below would ever run: an alarm
    # without a handler ends the process even then.
    signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS)
    machine.remove_folder(Path(folder))  # this process may be about to write to it, to meet the others
    os._exit(1)


def free(device: str) -> int | None:
    """Return the free bytes of a GPU's memory; None on CPUs. Raises ValueError where the GPU does not answer."""
    if device == "cpu":
        return None
    try:
        return int(torch.cuda.mem_get_info(device)[0])
    except RuntimeError as error:
        raise UserError("device_unavailable", f"{device} cannot be used: {error}") from None


def main() -> int:
    """Run the worker. Exit status 2: its part cannot be loaded; 1: the leader went away."""
    for each in (signal.SIGINT, signal.SIGTERM):  # they reach whole groups of processes; the leader decides the end
        signal.signal(each, signal.SIG_IGN)
    out = os.dup(1)
    os.dup2(2, 1)  # libraries' output is not for the leader
    first = read(sys.stdin.buffer, MAX_FRAME)
    if first is None:
        return 1
    job = msgspec.msgpack.decode(first, type=Job)
    threading.Thread(target=_end_with, args=(0, job.folder), name="lifeline", daemon=True).start()

    def say(what: str, text: str = "", free: int | None = None, code: Code = "worker_failed") -> None:
        with contextlib.suppress(BrokenPipeError):  # the lifeline ends a process without a leader
            os.write(out, encode(Reply(what, text, free, code)))

    try:
        say("started", free=free(job.device))
        worker = Worker(part.load(job, part.job_groups(job)), job)
    except (ValueError, OSError) as error:
        say("failed", str(error), code=code_of(error))
        return 2
    say("loaded")
    gc.freeze()
    decoder = msgspec.msgpack.Decoder(Command)
    while (body := read(sys.stdin.buffer, MAX_FRAME)) is not None:
        command = decoder.decode(body)
        if isinstance(command, commands.End):
            return 0
        verdict = "ran"
        try:
            worker.obey(command)
        except RuntimeError as error:
            traceback.print_exc()
            if not isinstance(command, Run):
                return 1
            verdict = "short" if isinstance(error, torch.OutOfMemoryError) else "broken"
            worker.decoder.groups.leave()  # the others may wait for this one, or will
        if isinstance(command, Run):
            say(verdict)
        elif isinstance(command, Rendezvous):
            say("met")
    return 1


if __name__ == "__main__":
    sys.exit(main())
