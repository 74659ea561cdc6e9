"""Capabilities of the CPU kernels, told from schemes alone. Torch-free, so that a plan can ask what will run.

`None` means that a kernel takes the weight; otherwise a readable reason why the reference does the work.
"""

from __future__ import annotations

from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp4, Lookup, Outliers, Progressive
from attar.kernels.native.layouts import layout_of


def weight_against(scheme: Scheme) -> str | None:
    """Return why no CPU kernel multiplies by such a weight, or None."""
    grid, rounding = scheme.weight, scheme.activation
    if isinstance(grid, Progressive):
        return None if rounding is not None else "weights of two levels meet rows of int8 alone"
    if isinstance(grid, Lookup):
        return None
    layout = layout_of(scheme)
    if layout is None:
        return f"{grid.name} weights have no CPU kernel yet"
    if rounding is None:
        return None
    if isinstance(rounding, Fp4 | Outliers):
        return None
    if not isinstance(rounding, Grid):
        return f"activations in {rounding.name} have no CPU kernel yet"
    if rounding.kind == "int" and (rounding.bits != 8 or not rounding.symmetric):
        return "integer activations other than symmetric int8 have no CPU kernel yet"
    if rounding.kind == "int" and not layout.whole:
        return f"rows of int8 do not go with {grid.name} weights in the CPU kernels"
    if rounding.granularity == "tensor" and not scheme.static:
        return "one activation scale for all rows of a call would tie them to each other"
    return None
