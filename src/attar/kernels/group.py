"""What processes that hold one model exchange: sums, pieces side by side, rows from one to another.

A thin face of torch.distributed: gloo between CPUs, NCCL between GPUs. Groups are made as objects of their own and not
as the process's one default group, which belongs to whoever wrote the program: a model in several processes can stand
beside anything else that uses torch.distributed. Nothing here pickles: torch's calls that send objects do, and are not
used. Processes find each other through a file in a folder of the user's own, and gloo listens on loopback alone; NCCL
is asked to do the same for its first handshake.

Every wait is bounded: a process that is gone ends it within moments, because the connection breaks (gloo) or because
somebody calls `abort` (NCCL, for gloo's does nothing), and one that is merely silent after `WAIT`. Of processes killed
within the first milliseconds after a meeting gloo misses one in a hundred (its loop turns about a message that nobody
will take): whoever waits for such a one waits for `WAIT`, unless, as a server's engine does, the program ends.

The folder of a meeting stays while anybody who met there lives. A store that is closed looks whether its file is there
and then opens it: where it goes in between, torch tries for `MEET` and then ends the process (an exception out of a
destructor). One that is made where no folder is holds the interpreter's lock for minutes, hence the look before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

MEET = timedelta(seconds=60)  # for all processes to come
WAIT = timedelta(seconds=600)  # that one may be behind another in a computation
LOOPBACK = "127.0.0.1"

dist: Any = torch.distributed  # whose types leave out what is used here


class Group:
    """`size` processes, of which this is number `rank`. `file` is a path that all of them name, and no other group.

    Raises RuntimeError where the others do not come within `MEET`, and in an exchange within `WAIT`, or where one of
    them has left it. Tensors are contiguous.
    """

    def __init__(self, file: Path, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.meet(file)

    def meet(self, file: Path) -> None:
        """Meet the others; after `leave` once more, at a path that is new."""
        rank, size, device = self.rank, self.size, self.device
        if not file.parent.is_dir():
            raise RuntimeError("the folder in which processes meet is gone")
        store = dist.FileStore(str(file), size)
        store.set_timeout(MEET)
        if device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = WAIT
            self._made: Any = dist.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            gloo._timeout = MEET  # which the others have to come; gloo does not ask the store's
            self._made = dist.ProcessGroupGloo(store, rank, size, gloo)
            self._made._set_default_timeout(WAIT)

    def sum(self, x: Tensor) -> Tensor:
        """x of all processes, added up, in the memory of x; the same bits in each."""
        self._made.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """x [...] of every process, in order, all of one shape, in the first; None in the others."""
        options = dist.GatherOptions()
        options.rootRank = 0
        pieces = [] if self.rank else [torch.empty_like(x) for _ in range(self.size)]
        self._made.gather([pieces] if pieces else [], [x], options).wait()
        return pieces or None

    def broadcast(self, x: Tensor) -> Tensor:
        """x of the first process, in the memory of x."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._made.broadcast([x], options).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        self._made.send([x], to, 0).wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        x = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._made.recv([x], source, 0).wait()
        return x

    def abort(self) -> None:
        """End every exchange that is under way, in this process: somebody is gone. From any thread. Between CPUs this
        does nothing, since connections to somebody who is gone break by themselves."""
        _abort(self._made)

    def leave(self) -> None:
        """Out of step, and in no exchange that this thread waits for: between CPUs whoever waits for this process
        learns of it, since its connections close with the group that is dropped here; between GPUs this process's own
        exchanges end, and somebody has to end those of the others. Nothing is exchanged until all `meet` again."""
        made, self._made = self._made, None
        _abort(made)


def _abort(made: Any) -> None:
    """Of a group, or of none any more. What it was in may have failed already, and then this does too."""
    if made is not None:
        with contextlib.suppress(RuntimeError):
            made.abort()
