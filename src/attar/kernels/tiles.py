"""Products in bfloat16, on processors whose tiles (AMX) make them several times as fast as float32.

They are for runs of calibration text, as models are run: never for what is stored or reported as exact. Hessians stay
float32. In one run on a model of 135 M parameters the KL was 0.170 with such runs and without, 0.171 with the factors
of Hessians rounded alone, and 0.182 with both; intervals overlap. Elsewhere float32 stays, because bfloat16 without
tiles is hardly faster.
"""

from __future__ import annotations

import torch

from attar import env
from attar.kernels.native import extension

LEAST = 1 << 18  # numbers of a matrix from which a product on tiles pays


def faster(device: torch.device | str = "cpu") -> bool:
    """Return whether bfloat16 products on the device are several times as fast as float32. `ATTAR_KERNELS=ref` and a
    lower level by `ATTAR_CPU` say no."""
    if torch.device(device).type != "cpu" or not extension.loaded() or env.get().kernels == "ref":
        return False
    return extension.cpu_level() == "amx" and bool(torch.backends.mkldnn.is_available())
