"""Weighted k-means of numbers, for many rows at once: it places each row's table of values.

In one dimension the cells of sorted values are intervals, and the best ones can be found: the best k cells up to a
position are the best k - 1 up to some earlier position and one more (dynamic programming, Wang and Song 2011). Over all
positions of a row of 4096 that would take too long, so it runs over the ends of a few bins for each centre. Bins are as
dense as the third root of the row's own density, like the cells themselves in the limit of many (Panter and Dite 1951).
A lone outlier thus gets a bin to itself. Lloyd's algorithm then moves the boundaries to where they belong between bins.
Lloyd's algorithm alone stops at the first local optimum, twice the error where tails are heavy.

Everything works on running sums of counts and of weighted values. There is no randomness and no restart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BINS = 8  # for each centre
STEPS = 12  # of Lloyd's algorithm
ROWS = 128  # at once: the dynamic program's table is 17 MB for 16 centres


def centres(x: Tensor, count: Tensor, number: int) -> Tensor:
    """Return `number` centres of each row of x [R, I] under weights `count` [R, I]: float64, ascending. A row whose
    weights are all zero counts all values alike."""
    parts = zip(x.split(ROWS), count.split(ROWS), strict=True)
    return torch.cat([_centres(some.double(), counts.double(), number) for some, counts in parts])


def _centres(x: Tensor, count: Tensor, number: int) -> Tensor:
    x, order = x.sort(1)
    count = count.gather(1, order)
    count = torch.where(count.sum(1, keepdim=True) > 0, count, 1.0)
    sums = torch.stack([pad(each.cumsum(1), (1, 0)) for each in (count, count * x)])  # [2, R, I + 1]
    cells, found = _best_cells(x, count, sums, number), x[:, :1].expand(-1, number)
    for _ in range(STEPS):
        inside, total = sums.gather(2, cells.expand(2, -1, -1)).diff(dim=2)
        found = torch.where(inside > 0, total / inside, found).cummax(1).values
        cells = pad(pad(torch.searchsorted(x, (found[:, :-1] + found[:, 1:]) / 2), (1, 0)), (0, 1), value=x.shape[1])
    return found


def _best_cells(x: Tensor, count: Tensor, sums: Tensor, number: int) -> Tensor:
    """Return the ends of the best cells that are whole bins, as positions in the sorted rows: [R, number + 1]."""
    rows, columns = x.shape
    bins = BINS * number
    # Each bin gets an equal share of the summed third root of the density: width * (count / width)^(1/3).
    wanted = (x.diff(dim=1).square() * count[:, 1:]).pow(1 / 3).cumsum(1)
    shares = torch.arange(1, bins, device=x.device).double() / bins
    places = torch.searchsorted(wanted, wanted[:, -1:] * shares) + 1 if columns > 1 else x.new_ones((rows, bins - 1))
    places = pad(pad(places.long(), (1, 0)), (0, 1), value=columns)
    counts, totals = (each - each[:, :1] for each in sums.gather(2, places.expand(2, -1, -1)))
    totals = totals - counts * (totals[:, -1:] / counts[:, -1:])  # about the mean, for precision
    # Reduction of the squared error by a cell from one position to another: the square of its sum over its count.
    gain = (totals[:, None, :] - totals[:, :, None]).square_()
    inside = counts[:, None, :] - counts[:, :, None]
    gain = torch.where(inside > 0, gain / inside, 0.0)
    gain.masked_fill_(torch.ones_like(gain[0], dtype=torch.bool).tril(-1), -torch.inf)
    best, came_from = gain[:, 0], []
    for _ in range(number - 1):
        best, where = (best[:, :, None] + gain).max(1)
        came_from.append(where)
    cuts = [torch.full((rows, 1), bins, device=x.device)]
    for where in reversed(came_from):
        cuts.append(where.gather(1, cuts[-1]))
    cuts.append(torch.zeros_like(cuts[0]))
    return places.gather(1, torch.cat(cuts[::-1], 1))
