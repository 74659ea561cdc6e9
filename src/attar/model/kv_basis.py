"""KV cache calibration: the coordinates in which a model's keys and values are best rounded, per layer and head.

This is transform coding. The cost of a key's error is its effect on scores: with queries of second moment S, e costs
e^T S e. So keys are first turned to where errors count alike, y = S^1/2 k, and then to the axes of their own covariance
there, along which they are uncorrelated (Karhunen and Loeve). Variances of a trained model's keys differ a thousandfold
along those, and a bit is worth most where variance is greatest: `kv.schemes.divide` distributes the bits, by buckets of
8 coordinates. Values are treated alike, with the output projection's effect on their errors in the place of S.

Tokens have scales of their own, so the relevant covariance is that of their directions. It is found by three rounds of
dividing each token by its length in the coordinates of the round before (Tyler's estimate of shape). Without it a few
common tokens decide, and rare ones, on which a model's answers depend, are rounded worst.

Keys turn with their position, and calibration texts are short. So each is placed at random in the context. Where angles
depend on the length of a text they stay at its beginning.

Texts go through a block one by one. Besides all texts' hidden states, and one layer's keys and values, only the memory
of a step of one text is needed (`plan.costs.calibration_bytes` counts it).

A centre is subtracted, for values and for keys: softmax is invariant to its constant contribution to all scores of a
query. With soft-capped scores it is not: there keys keep theirs. In trained models most heads attend to a text's first
token (Xiao et al. 2024, arXiv 2309.17453), whose value is near zero and whose key is like no other's. So the errors of
that value are not averaged out, and that key reaches beyond all levels. Values are therefore centred at the first
token's, and keys too where its key lies apart from all others; elsewhere keys are centred at their mean.

For KVQuant's schemes (`kv/kvquant.py`) the same texts give each channel's mean and spread and a layer's levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.codecs import kmeans
from attar.kernels import ops
from attar.kv import kvquant
from attar.kv.bit_planes import Basis
from attar.kv.kvquant import Channels
from attar.kv.pages import Bases, Rotation
from attar.kv.schemes import BUCKET, UNIT, KvScheme, Layout, divide
from attar.model.cache import BLOCK, ForwardBatch
from attar.model.decoder import Decoder
from attar.model.layers import Attention
from attar.model.rope import table

SMALL = 0.5  # share of the mean size of values, below which a first token's is near zero
FAR = 1.5  # squared distance over the largest, above which a first token's key lies apart
ROUNDS = 3
RIDGE = 1e-3  # share of the mean cost of errors, added along each axis: no direction may be free
TINY = 1e-12  # share of the largest eigenvalue, below which rounding left nothing of the smallest
SOME = 1 << 18  # numbers that levels are found from
FLOOR = 1e-3  # share of the greatest variance: a direction never seen varies at least so much


@torch.inference_mode()
def calibrate(decoder: Decoder, ids: Tensor, scheme: KvScheme, seed: int = 0) -> list[Bases]:
    """Return bases of every layer from token ids [S, L] that the model finds likely.

    Raises ValueError where a text is longer than the model's context, where the scheme does not support its heads, and
    on a NaN or an infinity in keys, values or weights.
    """
    config = decoder.config
    sequences, length = ids.shape
    if not 1 < length <= config.context:
        raise UserError("context_exceeded", f"calibration texts have 2 to {config.context} tokens, not {length}")
    scheme.check(config.head_dim, BLOCK)
    numbers = torch.Generator().manual_seed(seed)
    first = torch.randint(0, config.context - length + 1, (sequences, 1), generator=numbers)
    placed = (first + torch.arange(length)).int()
    placed[:, 0] = 0  # where the first token of a text stands
    step = ForwardBatch((length,), length)
    hidden = [decoder.embedding.forward(text, step.positions) for text in ids]
    groups, size = config.kv_heads, config.head_dim
    found = []
    for block in decoder.blocks:
        one = block.attention
        keys, values = (torch.empty((sequences, length - 1, groups, size)) for _ in range(2))
        # Means over texts, of the first token.
        first_key, first_value, first_size = (torch.zeros((groups, size)[:n]) for n in (2, 2, 1))
        moment = torch.zeros((groups, size, size), dtype=torch.float64)
        for i, rows in enumerate(hidden):
            rotation = None if one.rope is None else step.rotation(one.rope)
            if one.rope is not None and not one.rope.grows:
                rotation = Rotation(*table(one.rope, config.context), placed[i])
            q, k, v = one.heads(ops.norm(rows, None, block.attention_norm)[1], rotation)
            keys[i], values[i] = k[1:], v[1:]  # a first token's keys are like no other's
            first_key += k[0] / sequences
            first_value += v[0] / sequences
            first_size += v[0].norm(dim=-1) / sequences
            queries = q[1:].double().unflatten(1, (groups, -1)).movedim(1, 0).flatten(1, 2)  # [G, L * H / G, D]
            moment += queries.transpose(1, 2) @ queries
            hidden[i] = block.run(rows, step)
        k, v, of_values = keys.flatten(0, 1), values.flatten(0, 1), _output_moment(one)
        centred = one.form.soft_cap is None
        if scheme.layout == Layout.KVQUANT:
            both = channels(k, moment, scheme, centred), channels(v, of_values, scheme, True, scaled=True)
            found.append(Bases(*both))
            continue
        units = scheme.units(size)
        far = apart(first_key, k, moment)[:, None]
        of_keys = torch.where(far, first_key, k.mean(0)) if centred else torch.zeros(groups, size)
        small = first_size < SMALL * v.norm(dim=-1).mean(0)
        middle = torch.where(far | small[:, None], first_value, v.mean(0))
        found.append(Bases(basis(k, moment, units, of_keys), basis(v, of_values, units, middle)))
    return found


def _output_moment(attention: Attention) -> Tensor:
    """Return the cost of errors of mixed values, [G, D, D]: the moment of the output projection's rows over each
    group's heads."""
    form = attention.form
    width, each = form.heads * form.head_dim, form.heads // form.kv_heads * form.head_dim
    bias, found = ops.linear(torch.zeros(1, width), (attention.output,)), []
    for g in range(form.kv_heads):
        rows = torch.zeros(each, width)
        rows[:, g * each : (g + 1) * each] = torch.eye(each)
        apart = (ops.linear(rows, (attention.output,)) - bias).double().unflatten(0, (-1, form.head_dim))
        found.append((apart @ apart.transpose(1, 2)).sum(0))  # of [H / G, D, I]
    return torch.stack(found)


def apart(first: Tensor, x: Tensor, moment: Tensor) -> Tensor:
    """Return for which heads [G] the keys `first` [G, D] lie much farther from the mean of keys x [N, G, D] than all
    of these, by scores of queries with the second moment `moment` [G, D, D]."""
    mean = x.double().mean(0)

    def far(keys: Tensor) -> Tensor:
        gone = keys.double() - mean
        return torch.einsum("...gd,gde,...ge->...g", gone, moment, gone)

    return far(first) > FAR * far(x).amax(0)


def basis(x: Tensor, moment: Tensor, units: int, centres: Tensor) -> Basis:
    """Return the basis of one layer's keys or values x [N, G, D], with `units` bits for the buckets together.

    `moment` [G, D, D], float64, is the cost of their errors; `centres` [G, D] are subtracted. Raises ValueError on a
    NaN or an infinity.
    """
    size = x.shape[2]
    _refuse_broken(x, moment)
    into, back, means, weights, bits = [], [], [], [], []
    for g in range(x.shape[1]):
        own = x[:, g].double()
        mean, counts = centres[g].double(), moment[g]
        if not counts.trace() > 0:  # nothing reads this head: any coordinates do
            counts = torch.eye(size, dtype=own.dtype)
        values, axes = torch.linalg.eigh(counts + RIDGE * counts.trace() / size * torch.eye(size))
        values = values.clamp(min=float(values[-1]) * TINY)
        root = axes * values.sqrt()
        to, fro = root @ axes.T, (axes / values.sqrt()) @ axes.T
        y = (own - mean) @ to
        variance, turn = torch.ones(size, dtype=own.dtype), torch.eye(size, dtype=own.dtype)
        for _ in range(ROUNDS):
            length = (y @ turn / variance.sqrt()).square().mean(1, keepdim=True)
            even = y / length.clamp(min=1e-30).sqrt()
            covariance = even.T @ even / len(even)
            if not covariance.trace() > 0:  # a head whose numbers are all alike, such as one that was zeroed
                break
            variance, turn = torch.linalg.eigh(covariance)
            variance, turn = variance.flip(0), turn.flip(1)
            variance = variance.clamp(min=FLOOR * float(variance[0])) / variance.mean()
        dealt = divide(variance.view(-1, BUCKET).mean(1).tolist(), units)
        factor = variance.sqrt() / UNIT
        into.append(to @ turn / factor)
        back.append((turn.T @ fro) * factor[:, None])
        means.append(mean)
        weights.append(factor.square())
        bits.append(tuple(dealt))
    one, other, middle, counts = (torch.stack(each).float().contiguous() for each in (into, back, means, weights))
    return Basis(one, other, middle, counts, tuple(bits))


def channels(x: Tensor, moment: Tensor, scheme: KvScheme, centred: bool, scaled: bool = False) -> Channels:
    """Return channel-wise coordinates and levels of one layer's keys or values x [N, G, D], outliers apart.

    `moment` [G, D, D] is the cost of their errors; values have a scale of each token (`scaled`). Raises ValueError on a
    NaN or an infinity.
    """
    _refuse_broken(x, moment)
    x = x.double()
    mean = x.mean(0) if centred else torch.zeros_like(x[0])
    spread = torch.ones_like(mean)
    if not scaled:
        spread = (x - mean).square().mean(0).sqrt()
        spread = torch.where(spread > 0, spread, 1.0)
    y = (x - mean) / spread
    kept = kvquant.inliers(y, scheme.outliers(x.shape[2]))
    counts = moment.diagonal(dim1=1, dim2=2) * spread.square() * kept
    if scaled:
        size = kvquant.sizes(y, kept)[..., None]
        y, counts = y / torch.where(size > 0, size, 1.0), counts * size.square()
    some = slice(None, None, -(-y.numel() // SOME))
    levels = kmeans.centres(y.flatten()[None, some], counts.flatten()[None, some], 1 << round(scheme.bits))
    return Channels(mean.float(), spread.float(), levels[0].float(), scaled)


def _refuse_broken(x: Tensor, moment: Tensor) -> None:
    if not (x.isfinite().all() and moment.isfinite().all()):
        raise UserError(
            "not_finite", "keys, values or weights hold a NaN or an infinity: caches that are calibrated cannot be had"
        )
