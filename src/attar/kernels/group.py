"""Exchanges between processes that hold one model: sums, pieces side by side, rows from one to another.

A thin layer over torch.distributed: gloo between CPUs, NCCL between GPUs. Groups are objects of their own and not the
process's one default group, which belongs to the program's author: a model in several processes can coexist with any
other use of torch.distributed. Nothing here pickles; torch's calls that send objects do, and are not used. Processes
find each other through a file in a folder of the user's own. gloo listens on loopback alone, and NCCL is asked to do
the same for its first handshake.

Every wait is bounded. The loss of a process ends it within moments, because the connection breaks (gloo) or because
`abort` is called (NCCL; gloo's does nothing). A process that is merely silent ends it after `WAIT`. gloo misses one in
a hundred of the processes killed within the first milliseconds after a rendezvous (its loop spins on a message that no
process takes). Waiting for such a process lasts `WAIT`, unless the program ends, as a server's engine does.

The folder of a rendezvous stays while any of its processes lives. A store that is closed checks for its file and then
opens it. If the file goes in between, torch retries for `MEET` and then ends the process (an exception out of a
destructor). A store made where no folder exists holds the interpreter's lock for minutes, hence the check before.
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
WAIT = timedelta(seconds=600)  # that one process may be behind another in a computation
LOOPBACK = "127.0.0.1"

dist: Any = torch.distributed  # its types leave out names used here


class Group:
    """`size` processes, of which this is number `rank`. `file` is a path shared by all of them and no other group.

    Raises RuntimeError where the others do not come within `MEET`, and in an exchange within `WAIT`, or where one of
    them has left it. Tensors are contiguous.
    """

    def __init__(self, file: Path, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.meet(file)

    def meet(self, file: Path) -> None:
        """Meet the others. After `leave` they meet again at a new path. Raises RuntimeError where the folder is
        gone."""
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
            gloo._timeout = MEET  # the time for the others to come; gloo ignores the store's
            self._made = dist.ProcessGroupGloo(store, rank, size, gloo)
            self._made._set_default_timeout(WAIT)

    def sum(self, x: Tensor) -> Tensor:
        """Add up x of all processes, in the memory of x; the result has the same bits in each."""
        self._made.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return x [...] of every process, in order, all of one shape, in the first process; None in the others."""
        options = dist.GatherOptions()
        options.rootRank = 0
        pieces = [] if self.rank else [torch.empty_like(x) for _ in range(self.size)]
        self._made.gather([pieces] if pieces else [], [x], options).wait()
        return pieces or None

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy x of the first process into the memory of x."""
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
        """End every exchange under way in this process, because another process is gone. Any thread may call it.
        Between CPUs this does nothing: connections to a lost process break by themselves."""
        _abort(self._made)

    def leave(self) -> None:
        """Leave the group out of step, while this thread waits in no exchange.

        Between CPUs the group's connections close here, so processes that wait for this one learn of it. Between GPUs
        this process's own exchanges end; the other processes' exchanges must be ended there. Nothing is exchanged until
        all `meet` again.
        """
        made, self._made = self._made, None
        _abort(made)


def _abort(made: Any) -> None:
    """Abort a group, if there is one. Its exchange may have failed already; then this call fails too, without
    effect."""
    if made is not None:
        with contextlib.suppress(RuntimeError):
            made.abort()
