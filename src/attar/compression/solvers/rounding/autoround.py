"""AutoRound (Cheng et al. 2023): learn rounding directions and clipping from the error of a block's output.

Rounding to nearest decides for every weight alone. Here all weights of a block are rounded together,

    W' = s (clamp(round(W / s + z + V), qmin, qmax) - z),

where V in [-1/2, 1/2] moves a weight over the border to the next code, and s and z follow from the ends of its group's
range, each times a factor in [1/2, 3/2]. V and the factors are found by descent on the squared error of the block's
output: rounding passes gradients through unchanged. Only the sign of such gradients is informative, so each step moves
every number by the rate against it (signSGD). The rate falls linearly to zero. With a rate of 1 over the number of
steps, V can get half a code away and back within one run.

Ranges begin at those with the least error of rounding (`scale_search`), as GPTQ's do, not at the extremes. Scales are
rounded to the dtype they are stored in before codes are chosen, so what is measured is what is stored. The error is
checked now and then on the same rows, plain rounding's included, and the best iterate is kept: the authors keep the one
with the least loss on the rows it was trained with, a comparison between different rows.

This module never runs a block: what surrounds the weights is the caller's, which passes `loss`. Only integer grids;
a float8 grid is refused. Not done: the top-k filter of tokens, and activation ranges that learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attar.compression.recipe.methods import ScaleSearch
from attar.errors import UserError
from attar.formats import affine, observers
from attar.formats.affine import by_scale
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme

LOW, HIGH = 0.5, 1.5  # limits of the factors
CHECKS = 8  # how often the iterate is compared with the best so far


class Rounding:
    """A weight [O, I] and its learned rounding: V [O, I], and a factor for each end of each range [O, G] (or [1]).
    Raises ValueError on a NaN or an infinity, where the group size does not divide I, and off the integer grids."""

    def __init__(self, weight: Tensor, scheme: Scheme, scale_search: ScaleSearch = "mse") -> None:
        grid = scheme.grid
        if grid.kind != "int":
            raise UserError("scheme_unsupported", f"autoround learns codes of integers, not {scheme.name}")
        self.scheme, self.grid = scheme, grid
        self.scale_dtype: torch.dtype = getattr(torch, scheme.scale_dtype)
        self.weight = weight.to(torch.float32, copy=True)
        if scale_search == "mse":
            self.low, self.high = observers.mse_range(self.weight, grid, self.scale_dtype)
        else:
            self.low, self.high = affine.min_max(self.weight, grid)
        self.shift = torch.zeros_like(self.weight).requires_grad_()
        self.bottom = torch.ones_like(self.low).requires_grad_()
        self.top = torch.ones_like(self.high).requires_grad_()

    @property
    def learned(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.shift, self.bottom, self.top

    def value(self) -> Tensor:
        """Return W' [O, I], float32, with the gradient of the learned numbers."""
        codes, scale, zero = self._parts()
        return ((codes if zero is None else codes - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2)

    @torch.no_grad()
    def packed(self) -> PackedTensor:
        """Return W' in its stored form."""
        codes, scale, zero = self._parts()
        whole = (self.weight.shape[0], self.weight.shape[1])
        stored = None if zero is None else zero.to(torch.int8)
        return affine.encode(codes.flatten(-2).to(torch.int8), scale.to(self.scale_dtype), stored, self.scheme, whole)

    def step(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        """Move the learned numbers against the signs of their gradients; None where the loss does not depend on
        them."""
        limits = ((-0.5, 0.5), (LOW, HIGH), (LOW, HIGH))
        with torch.no_grad():
            for number, gradient, (low, high) in zip(self.learned, gradients, limits, strict=True):
                if gradient is not None:
                    number.sub_(gradient.sign_(), alpha=rate).clamp_(low, high)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes as floats [O, G, I/G], scale and zero point [O, G] (or [1]) as stored, in float32."""
        grid, groups = self.grid, self.low.shape[-1]
        low, high = (self.low * self.bottom).clamp(max=0), (self.high * self.top).clamp(min=0)
        wide = torch.maximum(-low, high) * 2 if grid.symmetric else high - low
        exact = wide / (grid.qmax - grid.qmin)
        stored = exact.detach().to(self.scale_dtype).float()
        stored = stored.masked_fill(stored == 0, torch.finfo(self.scale_dtype).eps)
        scale = stored + (exact - exact.detach())
        zero = None
        if not grid.symmetric:
            zero = _rounded((grid.qmin - low / exact).nan_to_num(0.0).clamp(grid.qmin, grid.qmax))
        scaled = by_scale(self.weight, groups) / scale.unsqueeze(-1) + by_scale(self.shift, groups)
        if zero is not None:
            scaled = scaled + zero.unsqueeze(-1)
        return _rounded(scaled).clamp(grid.qmin, grid.qmax), scale, zero


def _rounded(x: Tensor) -> Tensor:
    """Round half to even, with the gradient of x."""
    return x.detach().round() + (x - x.detach())


def search(
    roundings: Sequence[Rounding],
    loss: Callable[[list[Tensor], int], Tensor],
    check: Callable[[list[Tensor]], float],
    *,
    steps: int = 200,
) -> tuple[float, float]:
    """Learn the roundings of all weights of a block together; return the values of `check` before and after.
    `loss(weights, step)` is the mean squared error of the block's output with the weights W' in place, on the rows of
    that step, with its graph recorded. `check(weights)` is the same on fixed rows, without a graph. Neither may keep
    the weights. Raises ValueError where an error is not finite."""
    numbers = [number for each in roundings for number in each.learned]

    def checked() -> float:
        with torch.no_grad():
            error = check([each.value() for each in roundings])
        if not error < float("inf"):
            raise UserError("not_finite", f"the block's output error is {error}: its inputs overflow")
        return error

    first = least = checked()
    best = [number.detach().clone() for number in numbers]
    for step in range(steps):
        gradients = torch.autograd.grad(loss([each.value() for each in roundings], step), numbers, allow_unused=True)
        for at, each in enumerate(roundings):
            each.step(gradients[3 * at : 3 * at + 3], (1 - step / steps) / steps)
        if (step + 1) * CHECKS // steps > step * CHECKS // steps:
            error = checked()
            if error < least:
                least, best = error, [number.detach().clone() for number in numbers]
    with torch.no_grad():
        for number, value in zip(numbers, best, strict=True):
            number.copy_(value)
    return first, least
