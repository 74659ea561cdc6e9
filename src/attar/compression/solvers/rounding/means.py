"""The statistic of methods that weigh columns: the mean of |x|^p of each input channel, over rows that come in pieces.

With p = 1 AWQ scales by it; with p = 2 it is the diagonal of the Hessian of a linear's squared error, up to a factor:
Wanda's norms and the importances of GGUF files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError

ROWS_AT_ONCE = 512


class ColumnMean:
    """The mean |x|^power, 1 or 2, of each of I input channels over all rows seen so far, summed in float64. `reader`
    names the reader of the rows, for the error that none came."""

    def __init__(self, columns: int, power: int, reader: str = "these linears") -> None:
        assert power in (1, 2)
        self.power, self.reader, self.tokens = power, reader, 0
        self.total = torch.zeros(columns, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Add rows x [N, I]. Raises ValueError on a NaN, an infinity, or a value that overflows when squared."""
        total = torch.zeros_like(self.total, device=x.device)
        for part in x.split(ROWS_AT_ONCE):  # a sum in float64 begins with a copy in float64
            total += (part.float().square() if self.power == 2 else part.abs()).sum(0, dtype=torch.float64)
        if not total.isfinite().all():
            raise UserError(
                "not_finite", f"input channel {int((~total.isfinite()).nonzero()[0])} holds a NaN or an infinity"
            )
        self.total = self.total.to(x.device) + total
        self.tokens += len(x)

    @property
    def value(self) -> Tensor:
        """Return the mean, float32 [I]. Raises ValueError where no row was seen."""
        if self.tokens == 0:
            raise UserError(
                "linear_without_tokens", f"no calibration token reached {self.reader}: give more calibration text"
            )
        return (self.total / self.tokens).float()
