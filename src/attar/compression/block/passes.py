"""A recipe on one block, in order: transforms, fixed activation scales, and the rounding.

The solvers know tensors; `transforms` and `roundings` know blocks; `groups` says which linears belong together. Every
linear ends with a `Record` of its rounding error, beside that of plain rounding without transforms.
"""

from __future__ import annotations

from attar.checkpoints.strict_io import CheckpointError
from attar.compression.block import hessians, roundings, transforms
from attar.compression.block.record import Record
from attar.compression.block.work import BlockWork
from attar.compression.solvers.transforms import fold
from attar.errors import UserError, code_of
from attar.formats.packing import row_slices


class Unsolved(UserError):
    """A recipe cannot be applied to a block, which is discovered only when the block is reached."""


def run(work: BlockWork) -> list[Record]:
    """Run the recipe: pack the block's linears, fold its norms, and return a record for each linear. Raises ValueError
    naming the linear where a value is not finite, and Unsolved where a solver gives up."""
    compressed = [pair for _, members in work.groups() for pair in members]
    pruned = [linear for _, members in work.pruned() for linear, _ in members]
    for linear in pruned or [linear for linear, _ in compressed]:
        weight = fold.dense_weight(linear)
        if not all(weight[rows].isfinite().all() for rows in row_slices(*linear.shape)):
            raise UserError("not_finite", f"{linear.name}.weight holds a NaN or an infinity")
    work.guide = hessians.heeded(work.guide)
    try:
        before = work.recipe.passes[:-1]
        if before and not pruned:  # pruning itself compares with zeroing the smallest
            work.rtn_errors = roundings.rtn_errors(work)
        for each in before:
            transforms.run(work, each)
        if any(scheme.static for _, scheme in compressed):
            roundings.fix_activation_scales(work)
        return roundings.run(work)
    except CheckpointError:  # a disk error, whatever the recipe
        raise
    except ValueError as error:
        raise Unsolved(code_of(error), str(error)) from error
