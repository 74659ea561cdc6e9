"""One process's part of a model: how it meets the other processes, and loads its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from attar.checkpoints.sources import shards
from attar.execution.parallel.commands import Job
from attar.kernels import dispatch
from attar.kernels.group import Group
from attar.model.parallel import Groups, SplitDecoder
from attar.progress import StageProgress


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
