"""SmoothQuant (Xiao et al. 2022): move activation outliers into the weights, where rounding hardly notices them.

Statistic: the largest |x| of every input channel over the calibration tokens (`AbsMax`). Solve, equation 4:

    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)

with the weight's maximum over all linears that read the same input. The scales are static and folded into what produces
x, so they cost nothing at run time; only the rounding of activations to 8 bits happens there, in one of the paper's
three ways (`parser.PRESETS`). Texts also print (max|x| / max|w|)^alpha, which agrees with the paper at alpha = 0.5
only. At 0.5 both sides end with the same maximum in every channel; larger alphas move more of the difficulty to the
weights.

The best alpha depends on how large a family's outliers are. `ALPHA` holds the authors' published choices; everything
else starts at the paper's 0.5. `search` finds one for each input group instead, by its linears' output error once
weights and activations are rounded; the loss of the whole model is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attar.compression.solvers.transforms import fold
from attar.errors import UserError
from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels.operands import Linear, Norm

ALPHA: Mapping[str, float] = {"llama": 0.85, "mistral": 0.8, "mixtral": 0.8}
"""Published alphas by family, the architecture's name up to `ForCausalLM`, in lower case."""

DEFAULT_ALPHA = 0.5
GRID = tuple(i / 20 for i in range(21))  # alphas that `search` tries
SEARCH_ROWS = 2048
SMALLEST = 1e-5  # smallest maximum and scale: smaller ones are replaced by it


def alpha_for(architecture: str) -> float:
    """Return the migration strength for a config.json architecture such as `LlamaForCausalLM`."""
    return ALPHA.get(architecture.removesuffix("ForCausalLM").lower(), DEFAULT_ALPHA)


class AbsMax:
    """The statistic: max|x| of each of I input channels over all rows seen so far, float32 [I]."""

    def __init__(self, columns: int) -> None:
        self.value = torch.zeros(columns)

    def add(self, x: Tensor) -> None:
        """Add rows x [N, I]. Raises ValueError on a NaN or an infinity."""
        largest = x.abs().amax(0).float()
        if not largest.isfinite().all():
            raise UserError(
                "not_finite", f"input channel {int((~largest.isfinite()).nonzero()[0])} holds a NaN or an infinity"
            )
        self.value = torch.maximum(self.value.to(x.device), largest)


def scales(act_max: Tensor, weights: Sequence[Tensor], alpha: float) -> Tensor:
    """Return the scale of each input channel by equation 4, float32 [I], from max|x| [I] and the weights [O, I] that
    read it. A channel that is zero in the calibration inputs or in every weight has nothing to balance: its scale is
    1."""
    weight_max = torch.stack([w.abs().amax(0).float() for w in weights]).amax(0)
    act_max = act_max.float()
    chosen = act_max.clamp(min=SMALLEST) ** alpha / weight_max.clamp(min=SMALLEST) ** (1 - alpha)
    return torch.where((act_max == 0) | (weight_max == 0), 1.0, chosen.clamp(min=SMALLEST))


def search(
    x: Tensor, act_max: Tensor, weights: Sequence[Tensor], schemes: Sequence[Scheme | None]
) -> tuple[float, tuple[float, ...]]:
    """Return the alpha of `GRID` with the least squared output error, and the errors of all. The error is of the
    products of rows x [N, I] with weights [O, I], both rounded by each weight's scheme (None: neither is). Fixed
    activation scales are for `act_max` [I], the largest |x| of all rows. The first of equal errors wins."""
    exact = [x @ weight.float().T for weight in weights]

    def error(alpha: float) -> float:
        divided_by, total = scales(act_max, weights, alpha), 0.0
        for weight, scheme, wanted in zip(weights, schemes, exact, strict=True):
            if scheme is None:
                continue
            rows, form = x / divided_by, scheme.activation
            if form is not None:
                fixed = None
                if scheme.static:
                    fixed = codec(form.kind).fixed_scale((act_max / divided_by).amax().reshape(1), form)
                rows = codec(form.kind).fake_quantize(rows, form, fixed)
            packed = codec(scheme.weight.kind).quantize((weight.float() * divided_by).to(weight.dtype), scheme)
            total += float((rows @ packed.dequantize().T - wanted).double().square().sum())
        return total

    errors = tuple(map(error, GRID))
    return GRID[errors.index(min(errors))], errors


def smooth(norm: Norm, linears: Sequence[Linear], act_max: Tensor, alpha: float) -> Tensor:
    """Fold the scales into the norm and into all the linears [O, I] that read its output; return the scales [I].
    `linears` must be all of them: one left out would see divided inputs. The function computed stays the same up to
    rounding; max|x| of the smoothed input is `act_max` over the returned scales. Raises ValueError where a linear is
    compressed already, or where the norm's dtype cannot hold its divided weight."""
    taken = fold.into_norm(norm, scales(act_max, [fold.dense_weight(linear) for linear in linears], alpha))
    fold.into_columns(linears, taken)
    return taken
