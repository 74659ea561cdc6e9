"""GPTQ whose errors are fed back across rows as well as across columns: rounding in the metric of the loss.

YAQA (Tseng et al. 2025). To second order an error E of a weight [O, I] changes the loss by half of its quadratic form
in the Fisher matrix, which is taken for the Kronecker product of two: tr(Ho E H E^T). H, of the inputs, is GPTQ's. Ho,
of the outputs, says how the loss couples the rows: the mean of g g^T over tokens, g being the gradient of the loss at
the linear's output, each token weighted by |x|^2 (`loss_weights`). With labels sampled from the model that loss
is the KL divergence from it. GPTQ is the case Ho = 1, in which rows cannot compensate for one another.

With Ho = Vo Do Vo^T and H = V D V^T, both V unit upper triangular, the form is the sum over rows i and columns k of
Do_i D_k (Vo^T E V)_ik^2: so the code of (i, k) is the nearest to

    w_ik + sum over the rest of the rows before and columns before of Vo_ji E_jl V_lk

It depends on elements above and to the left. So the tiles on one antidiagonal are rounded together, and of these all
elements on one antidiagonal. What earlier tiles contribute is two matrix products. Codes do not depend on tiles.

Afterwards the rows are polished in turn (`polish`): with all other rows fixed, row i is best aimed at its weight less
sum over j of Ho_ij E_j / Ho_ii, by the input Hessian alone. Rows far apart are polished together; if together they do
harm, they are put back and tried in halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attar.compression.recipe.methods import Gptq
from attar.compression.solvers.rounding import gptq
from attar.compression.solvers.rounding.ggml_levels import Ggml
from attar.compression.solvers.rounding.gptq import GptqResult, Prepared
from attar.compression.solvers.rounding.levels import Uniform
from attar.compression.solvers.rounding.polish import descend
from attar.errors import UserError
from attar.formats.scheme import Scheme

TILE = 128  # rows and columns of a tile: speed, not results
TOGETHER = 64  # rows polished at a time
FEWEST = 4  # fewest rows polished together where more do harm


def solve(
    weight: Tensor,
    inputs: Prepared,
    outputs: Prepared,
    scheme: Scheme,
    options: Gptq = Gptq(),  # noqa: B008
    *,
    importance: Tensor | None = None,
) -> GptqResult:
    """Compress a weight [O, I] of any float dtype, by the Hessians of its inputs and of its outputs. Both are damped
    already, for the sweep; the options' `damping` and `output_damping` are for the `polish` sweeps afterwards.
    `importance` is as in `gptq.begin`. Damages and energy are tr(Ho E H E^T). Raises ValueError as `gptq.solve`."""
    original, levels = gptq.begin(weight, inputs, scheme, options.scale_search, importance=importance)
    if not isinstance(levels, Uniform | Ggml):
        raise UserError(
            "scheme_unsupported", f"rows of {scheme.name} cannot make up for one another here: leave `couple` off"
        )
    codes = torch.empty(weight.shape[::-1], dtype=levels.code_dtype, device=weight.device)  # [I, O]
    down, across = outputs.sweep, inputs.sweep
    rounded = torch.cat([levels.rounded(original[rows], rows) for rows in gptq.slices(len(weight), TILE)])
    rtn_damage = _damage(original - rounded, outputs.hessian, inputs.hessian)  # before `_polish` fits the levels anew
    del rounded
    work = original[down][:, across]  # rows and columns in the order of the sweep
    error, reach = torch.zeros_like(work), torch.zeros_like(work)  # E, and Vo^T E
    for tiles in _antidiagonals(*work.shape):
        front = _Tiles(tiles, work.dtype, work.device)
        for number, (rows, columns) in enumerate(tiles):
            pull = inputs.rows(columns.start, columns.stop)  # [c, stop]: row k, column l holds V_lk
            push = outputs.rows(rows.start, rows.stop)  # [b, stop]: row i, column j holds Vo_ji
            above = push[:, : rows.start] @ error[: rows.start, columns]
            left = reach[rows, : columns.start] @ pull[:, : columns.start].T
            own = push[:, rows.start :], pull[:, columns.start :]
            front.set(number, work[rows, columns], (above, left), *own, (down[rows], across[columns]))
        chosen, found = front.round(levels), front.error
        for number, (rows, columns) in enumerate(tiles):
            tile = number, slice(0, rows.stop - rows.start), slice(0, columns.stop - columns.start)
            codes[across[columns, None], down[rows]] = chosen[tile].T.to(codes.dtype)
            error[rows, columns], reach[rows, columns] = found[tile], front.reach[tile]
    if options.polish:
        _polish(codes, levels, original, inputs.hessian, outputs.hessian, options)
    packed = levels.pack(codes)
    damage = _damage(original - packed.dequantize(original.dtype), outputs.hessian, inputs.hessian)
    return GptqResult(packed, damage, rtn_damage, _damage(original, outputs.hessian, inputs.hessian))


def _antidiagonals(height: int, width: int) -> Iterator[list[tuple[slice, slice]]]:
    """Yield the tiles of [height, width], as rows and columns, by antidiagonals: none needs another of its own."""
    down, across = list(gptq.slices(height, TILE)), list(gptq.slices(width, TILE))
    for step in range(len(down) + len(across) - 1):
        yield [(down[i], across[step - i]) for i in range(len(down)) if 0 <= step - i < len(across)]


class _Tiles:
    """Tiles [T, b, c] of the sweep, whose codes are chosen antidiagonal by antidiagonal, those of all tiles together.
    Tiles at the edges are filled up with zeros, which are not rounded."""

    def __init__(self, tiles: Sequence[tuple[slice, slice]], dtype: torch.dtype, device: torch.device) -> None:
        height, width = (max(side.stop - side.start for side in sides) for sides in zip(*tiles, strict=True))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros((len(tiles), *shape), dtype=dtype, device=device)

        self.weight, self.above, self.base, self.reach = (zeros(height, width) for _ in range(4))
        self.push = zeros(height, height)  # contributions within the tile
        # By columns from the last to the first, so that those of an antidiagonal are in the order of its rows.
        self.pull, self.error_t = zeros(width, width), zeros(width, height)
        self.down, self.across = (
            torch.zeros((len(tiles), n), dtype=torch.long, device=device) for n in (height, width)
        )
        self.ends = torch.tensor([[side.stop - side.start for side in sides] for sides in tiles], device=device)

    @property
    def error(self) -> Tensor:
        return self.error_t.flip(1).mT

    def set(
        self, number: int, weight: Tensor, others: tuple[Tensor, Tensor], push: Tensor, pull: Tensor,
        order: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Fill in a tile [b, c], with what the tiles above and left of it contribute. `order` indexes its rows and
        columns in the weight."""
        (height, width), (above, left) = weight.shape, others
        self.weight[number, :height, :width] = weight
        self.above[number, :height, :width] = above
        self.base[number, :height, :width] = weight + above + left
        self.push[number, :height, :height] = push.tril(-1)
        self.pull[number, -width:, :width] = pull.tril(-1).flip(0)
        self.down[number, :height], self.across[number, :width] = order

    def round(self, levels: Uniform | Ggml) -> Tensor:
        """Return the codes [T, b, c]."""
        height, width = self.weight.shape[1:]
        codes = torch.empty_like(self.weight)
        rows, whole = torch.arange(height, device=codes.device), bool((self.ends == self.ends[0]).all())
        for step in range(height + width - 1):
            first, end = max(0, step - width + 1), min(step + 1, height)
            i, at = rows[first:end], slice(width - 1 - step + first, width - 1 - step + end)
            k = step - i
            from_above = (self.push[:, first:end] * self.error_t[:, at]).sum(-1)  # [T, n]
            from_left = (self.reach[:, first:end] * self.pull[:, at]).sum(-1)
            wanted = self.base[:, i, k] + from_above + from_left
            code, value = levels.nearest_at(self.down[:, i].ravel(), self.across[:, k].ravel(), wanted.ravel())
            wrong = self.weight[:, i, k] - value.view(wanted.shape)
            taken = wrong + self.above[:, i, k] + from_above
            if not whole:  # else an error of what is not there would reach into the tile
                inside = (i < self.ends[:, :1]) & (k < self.ends[:, 1:])
                wrong, taken = wrong * inside, taken * inside
            codes[:, i, k], self.reach[:, i, k] = code.view(wanted.shape), taken
            self.error_t[:, at].diagonal(first, 1, 2).copy_(wrong)
        return codes


def _polish(
    codes: Tensor, levels: Uniform | Ggml, target: Tensor, inputs: Tensor, outputs: Tensor, options: Gptq
) -> None:
    """Improve codes [I, O] and levels in place, towards `target` [O, I], given H [I, I] and Ho [O, O]. tr(Ho' E H' E^T)
    never rises, both damped."""
    ridge, coupling = options.damping * inputs.diagonal().mean(), outputs.clone()
    coupling.diagonal().add_(options.output_damping * outputs.diagonal().mean())
    apart = max(1, len(target) // TOGETHER)
    error = levels.pack(codes).dequantize(target.dtype) - target
    for _ in range(options.polish):
        turns = [slice(at, None, apart) for at in range(apart)]
        while turns:
            rows = turns.pop(0)
            own = coupling[rows, rows]
            push = coupling[rows] @ error  # [b, I]
            wanted = target[rows] + error[rows] - push / own.diagonal()[:, None]
            kept, part = codes[:, rows].clone(), levels.part(rows)
            before = part.copy()
            found = descend(codes[:, rows], part, wanted, inputs, 1, options.damping).T + wanted - target[rows]
            move = found - error[rows]
            pulled = move @ inputs + ridge * move
            if float((pulled * (2 * push + own @ move)).sum(dtype=torch.float64)) <= 0:
                error[rows] = found
            else:
                codes[:, rows] = kept
                part.restore(before)
                if len(own) >= 2 * FEWEST:
                    turns += [slice(start, None, 2 * rows.step) for start in (rows.start, rows.start + rows.step)]


def _damage(error: Tensor, outputs: Tensor, inputs: Tensor) -> float:
    """Return tr(Ho E H E^T) of E [O, I], summed in float64."""
    total = 0.0
    for columns in gptq.slices(len(inputs), TILE):
        total += float(((error @ inputs[:, columns]) * (outputs @ error[:, columns])).sum(dtype=torch.float64))
    return total
