"""Training of SpinQuant's rotations for a whole model: gathers rows, and leaves the descent to the solver.

For the residual stream the rows are the outputs of norms, of every layer, and one matrix rotates them all. For heads
they are the inputs of o, and each layer has a matrix of its own. They are seen in the coordinates of the original
model, but for changes that are folded and scaled whatever the rotation. One block is in memory at a time. The cost of
an error in a row is relative to the output of its linears, |W|^2 / mean |W x|^2, so that layers with large weights do
not outweigh others. Weights have no rows among them: GPTQ compensates for their rounding afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attar.compression.memory import give_back
from attar.compression.recipe.methods import SpinQuant
from attar.compression.rotation.rotated import RotatedCheckpoint
from attar.compression.solvers.transforms import spinquant
from attar.compression.solvers.transforms.rotations import Rotation
from attar.compression.solvers.transforms.spinquant import Learned
from attar.errors import UserError
from attar.kernels.operands import Linear
from attar.model.assembly import build_block, build_embedding
from attar.model.cache import ForwardBatch
from attar.model.layers import MixtureOfExperts

TOKENS = 8192  # tokens that go through the model
ROWS_BYTES = 512 << 20  # bytes of the kept rows of the stream, float32
ROWS = 65536  # maximal number of these rows


def learn(source: RotatedCheckpoint, ids: Tensor, options: SpinQuant, folder: Path, key: str, seed: int) -> Learned:
    """Learn the rotations from token ids [S, L], and make `source` a view by them; return the result of the stream's.
    Learned matrices are kept in `folder` under `key` for a resumed run. Raises ValueError where a row is not finite."""
    turned = [source.stream, *(each for each in source.heads if each is not None)]
    kept = folder / f"rotations-{key}.f64"
    if kept.is_file() and kept.stat().st_size == 8 * (2 + sum(each.size**2 for each in turned)):
        numbers = torch.from_numpy(np.fromfile(kept, dtype="<f8"))
        found = Learned(numbers[: turned[0].size ** 2].view(turned[0].size, -1), *numbers[-2:].tolist())
        parts = numbers[:-2].split([each.size**2 for each in turned])
        matrices = [part.view(each.size, -1) for part, each in zip(parts, turned, strict=True)]
    else:
        found, matrices = _learned(source, ids, options, turned, seed)
        figures = torch.tensor([found.before, found.after], dtype=torch.float64)
        temporary = kept.with_suffix(".tmp")
        temporary.write_bytes(torch.cat([*(m.flatten() for m in matrices), figures]).numpy().astype("<f8").tobytes())
        temporary.replace(kept)
    for each, matrix in zip(turned, matrices, strict=True):
        each.matrix = matrix
    return found


def _learned(
    source: RotatedCheckpoint, ids: Tensor, options: SpinQuant, turned: Sequence[Rotation], seed: int
) -> tuple[Learned, list[Tensor]]:
    starts = [each.apply(torch.eye(each.size, dtype=torch.float64)) for each in turned]
    for each in turned:
        each.matrix = torch.eye(each.size, dtype=torch.float64)
    found = [
        spinquant.solve(rows, costs, start, steps=options.rotation_steps, batch=options.rotation_batch, seed=seed)
        for (rows, costs), start in zip(_rows(source, ids), starts, strict=True)
    ]
    return found[0], [each.matrix for each in found]


@torch.no_grad()
def _rows(source: RotatedCheckpoint, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return rows [N, I] and the cost [N] of an error in each, for every rotation: of the stream, then of heads by
    layer."""
    config = source.config
    sequences = max(1, min(len(ids), TOKENS // ids.shape[1]))
    ids = ids[[i * len(ids) // sequences for i in range(sequences)]]
    places = 2 * config.layers
    count = max(1, min(ids.numel(), ROWS // places, ROWS_BYTES // (4 * config.hidden * places)))
    chosen = torch.arange(count) * ids.numel() // count
    step = ForwardBatch((ids.shape[1],) * len(ids), ids.shape[1])
    hidden = build_embedding(config, source).forward(ids.flatten(), step.positions).float()
    stream, heads = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for layer in range(config.layers):
        block = build_block(config, source, layer)
        for linear in block.linears():
            linear.keep_dense = False
        seen: dict[str, Tensor] = {}

        def hook(linear: Linear, x: Tensor, seen: dict[str, Tensor] = seen) -> None:
            if not x.isfinite().all():
                raise UserError("not_finite", f"the input of {linear.name} holds a NaN or an infinity")
            if len(x) > int(chosen[-1]):  # others see only their routed rows
                seen[linear.name] = x[chosen].clone()

        hidden = block.run(hidden, step, hook)
        # The readers of the block's two norms, last a linear that sees all rows.
        readers, mlp = tuple(linear for each in block.feed_forwards() for linear in each.up), block.feed_forward
        readers += (mlp.router,) if isinstance(mlp, MixtureOfExperts) else ()
        for linears in (block.attention.qkv, readers):
            rows = seen[linears[-1].name]
            stream.append((rows, torch.full((len(rows),), _cost(rows, linears))))
        if source.heads[layer] is not None:
            rows = seen[block.attention.output.name]
            heads.append((rows, torch.ones(len(rows))))
        give_back()
    return [(torch.cat([rows for rows, _ in stream]), torch.cat([costs for _, costs in stream])), *heads]


def _cost(rows: Tensor, linears: tuple[Linear, ...]) -> float:
    """Return |W|^2 over the mean of |W x|^2, for all weights of the linears together."""
    size = out = 0.0
    for linear in linears:
        assert isinstance(linear.weight, Tensor)
        weight = linear.weight.float()
        size += float(weight.square().sum())
        out += float((rows @ weight.T).square().sum(1).mean())
    return size / out if out else 0.0
