"""Formulas of the lab's simulators: sizes, step times, rounding, paging, speculation and batching.

The page repeats them in JavaScript under the same names (`page/formulas.js`), and tests hold both to 1e-9. No formula
lives in the page alone. All are pure functions of numbers and lists. Bytes are bytes, rates are a second, and times are
seconds. Arguments out of range are the caller's mistake: only what would give a wrong number is refused.

Sources: Williams et al. 2009 (roofline); Pope et al. 2022, arXiv:2211.05102 (inference arithmetic); Xiao et al. 2022,
arXiv:2211.10438 (SmoothQuant); Lin et al. 2023, arXiv:2306.00978 (AWQ); Kwon et al. 2023, arXiv:2309.06180 (paging);
Leviathan et al. 2023, arXiv:2211.17192 (speculation); Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax);
Yu et al. 2022 (Orca: iteration-level batching); Little 1961. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Numbers = Sequence[float]

# Sizes


def weight_bytes(weights: float, bits: float, group: float, side_bits: float) -> float:
    """Return the bytes of `weights` numbers of `bits` bits, with `side_bits` of scale and zero for each group. A group
    of 0 has no side data."""
    return weights * (bits + (side_bits / group if group else 0.0)) / 8


def kv_token_bytes(layers: float, kv_heads: float, head_dim: float, bits: float, side_bits: float) -> float:
    """Return the bytes of one token's keys and values in all layers; `side_bits` are the scale of a head's vector."""
    return 2 * layers * kv_heads * (head_dim * bits + side_bits) / 8


def cache_blocks(memory: float, taken: float, block_bytes: float) -> int:
    """Return the blocks that fit in what the `taken` bytes leave of the memory."""
    return max(0, math.floor((memory - taken) / block_bytes))


def users_that_fit(blocks: float, headroom: float, context: float, block: float) -> int:
    """Return the requests of `context` tokens that run at once without a preemption.

    Every request but the first leaves the fraction `headroom` of all blocks free, as the scheduler does.
    """
    each = math.ceil(context / block)
    beside = math.floor((blocks - math.ceil(headroom * blocks)) / each)
    return max(beside, min(1, math.floor(blocks / each)))


# Time of a step


def read_seconds(weights: float, sequences: float, kv_bytes: float, context: float, bandwidth: float) -> float:
    """Return the seconds to read all `weights` bytes once, and the cache of `context` tokens of each sequence."""
    return (weights + sequences * context * kv_bytes) / bandwidth


def product_seconds(rows: float, weights: float, rate: float) -> float:
    """Return the seconds of the products of `rows` rows with `weights` numbers, at `rate` operations a second."""
    return 2 * rows * weights / rate


def attention_seconds(rows: float, context: float, width: float, rate: float) -> float:
    """Return the seconds of attention of `rows` rows over `context` tokens; `width` = layers x heads x head size."""
    return 4 * rows * width * context / rate


def step_seconds(read: float, compute: float, overhead: float) -> float:
    """Return the modelled seconds of a step: reading plus computing, because kernels overlap the two badly."""
    return read + compute + overhead


def bound_seconds(read: float, compute: float) -> float:
    """Return the roofline bound of a step, which no kernel beats: the longer of reading and computing."""
    return max(read, compute)


def ridge_rows(rate: float, bits: float, bandwidth: float) -> float:
    """Return the rows from which products take longer than reading weights of `bits` bits, without a cache."""
    return rate * bits / (16 * bandwidth)


def intensity(rows: float, weights: float, bits: float, context: float, kv_bytes: float, width: float) -> float:
    """Return the operations for each byte read, in a step of `rows` sequences of `context` tokens."""
    operations = 2 * rows * weights + 4 * rows * width * context
    return operations / (weights * bits / 8 + rows * context * kv_bytes)


def intensity_limit(weights: float, context: float, kv_bytes: float, width: float) -> float:
    """Return the operations for each byte that no batch exceeds: each sequence brings its own cache."""
    return (2 * weights + 4 * width * context) / (context * kv_bytes)


def interpolated(at: float, xs: Numbers, ys: Numbers) -> float:
    """Return y at `at` on the line through measured points, whose `xs` rise. Outside, the nearest pair goes on.

    Raises ValueError without points.
    """
    if not xs:
        raise ValueError("there are no points to interpolate between")
    if len(xs) == 1:
        return ys[0]
    right = 1
    while right < len(xs) - 1 and xs[right] < at:
        right += 1
    slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + slope * (at - xs[right - 1])


# Rounding


def rounded(value: float) -> float:
    """Return the nearest whole number, and the even one of two that are equally near, as hardware rounds."""
    return float(round(value))


def grid(values: Numbers, bits: int) -> tuple[float, float]:
    """Return scale and zero point of the asymmetric grid of `bits` bits whose range holds all values, and zero."""
    low, high = min(0.0, min(values)), max(0.0, max(values))
    scale = (high - low) / (2**bits - 1)
    return (scale, rounded(-low / scale)) if scale else (1.0, 0.0)


def codes(values: Numbers, bits: int) -> list[float]:
    """Return the codes of values on their asymmetric grid."""
    scale, zero = grid(values, bits)
    return [min(max(rounded(value / scale) + zero, 0.0), 2.0**bits - 1) for value in values]


def stored(values: Numbers, bits: int) -> list[float]:
    """Return values as their codes give them back."""
    scale, zero = grid(values, bits)
    return [scale * (code - zero) for code in codes(values, bits)]


def symmetric(values: Numbers, bits: int) -> list[float]:
    """Return values rounded on the symmetric grid whose largest code is the largest magnitude."""
    top = 2 ** (bits - 1) - 1
    scale = max(abs(value) for value in values) / top
    return [scale * rounded(value / scale) for value in values] if scale else [0.0 for _ in values]


def awq_error(weights: Numbers, inputs: Numbers, alpha: float, bits: int) -> float:
    """Return the squared error of one output, channel by channel, where weights are rounded as w s with s = |x|^alpha
    and divided by s again. Inputs are magnitudes above 0."""
    scales = [math.pow(x, alpha) for x in inputs]
    back = stored([w * s for w, s in zip(weights, scales, strict=True)], bits)
    return sum(((b / s - w) * x) ** 2 for b, s, w, x in zip(back, scales, weights, inputs, strict=True))


# SmoothQuant


def smoothing(inputs: Numbers, weights: Numbers, alpha: float) -> list[float]:
    """Return each channel's divisor max|x|^alpha / max|w|^(1 - alpha); 1 where either maximum is 0."""
    pairs = zip(inputs, weights, strict=True)
    return [x**alpha / w ** (1 - alpha) if x > 0 and w > 0 else 1.0 for x, w in pairs]


def difficulty(maxima: Numbers) -> float:
    """Return the largest maximum over the median one, the lower of two middles: how far channels stand out."""
    median = sorted(maxima)[(len(maxima) - 1) // 2]
    return max(maxima) / median if median else 0.0


def smoothed_error(
    rows: Sequence[Numbers], weights: Sequence[Numbers], scales: Numbers, bits: int, weight_bits: int
) -> float:
    """Return the relative squared error of x W^T, where rows x / s and weights w s are both rounded, each row alone.

    `rows` [N, I] are inputs and `weights` [O, I]; `scales` [I] are the divisors s. 0 where all outputs are 0.
    """
    x = [symmetric([value / s for value, s in zip(row, scales, strict=True)], bits) for row in rows]
    w = [symmetric([value * s for value, s in zip(row, scales, strict=True)], weight_bits) for row in weights]
    error = total = 0.0
    for row, near_row in zip(rows, x, strict=True):
        for weight, near_weight in zip(weights, w, strict=True):
            exact = sum(a * b for a, b in zip(row, weight, strict=True))
            error += (sum(a * b for a, b in zip(near_row, near_weight, strict=True)) - exact) ** 2
            total += exact**2
    return error / total if total else 0.0


# Paging


def contiguous_waste(used: float, longest: float) -> float:
    """Return the unused fraction of a request's memory, where each request reserves `longest` tokens."""
    return 1 - used / longest


def buddy_waste(used: float) -> float:
    """Return the unused fraction where memory comes in powers of two."""
    return 1 - used / math.ldexp(1, math.ceil(math.log2(used)))


def paged_waste(used: float, block: float) -> float:
    """Return the unused fraction of a request's blocks: the tail of the last one."""
    taken = math.ceil(used / block) * block
    return (taken - used) / taken


def mean_tail(block: float) -> float:
    """Return the unused tokens of a last block on average, where all lengths are as likely."""
    return (block - 1) / 2


def shared_blocks(prefix: float, sequences: float, block: float) -> int:
    """Return the blocks that sequences with a common prefix of `prefix` tokens save by sharing its whole blocks."""
    return int((sequences - 1) * math.floor(prefix / block))


# Speculation


def acceptance(rate: float, drafts: int) -> list[float]:
    """Return an acceptance for each position, all equal: a fit, because real ones fall with the position."""
    return [rate] * drafts


def emitted_tokens(accepted: Numbers) -> float:
    """Return the expected tokens of one target pass, of drafts accepted with these probabilities given all before.

    The pass emits one token more than it accepts, so accepted drafts are this minus one.
    """
    total = reach = 1.0
    for each in accepted:
        reach *= each
        total += reach
    return total


def chain(accepted: Numbers) -> list[float]:
    """Return the probability that exactly 0, 1, ... and all drafts are accepted; the sum is 1."""
    found, reach = [], 1.0
    for each in accepted:
        found.append(reach * (1 - each))
        reach *= each
    return [*found, reach]


def speculation_gain(emitted: float, target: float, draft: float, verify: float, drafts: float) -> float:
    """Return tokens a second with speculation over those without.

    target: seconds of a step of one row a sequence; draft: of one draft; verify: of a step with all rows of drafts.
    """
    return emitted * target / (drafts * draft + verify)


# Batching


def static_utilisation(batch: int, lengths: str) -> float:
    """Return the mean output over the longest of a batch, for `uniform` or `exponential` lengths: the busy part of a
    static batch's slots. Raises ValueError for another distribution."""
    if lengths == "uniform":
        return (batch + 1) / (2 * batch)
    if lengths == "exponential":
        return 1 / sum(1 / each for each in range(1, batch + 1))
    raise ValueError(f"lengths are uniform or exponential, not {lengths!r}")


def quantile_lengths(count: int, mean: float, lengths: str, most: float) -> list[float]:
    """Return lengths of a `fixed`, `uniform` or `exponential` distribution at spread quantiles, at most `most`.

    They are the same each time, and look random: quantiles are fractions of multiples of the golden ratio.
    """
    found = []
    for number in range(count):
        u = math.fmod(number * 0.618034 + 0.31, 1.0)
        value = mean if lengths == "fixed" else 2 * mean * u if lengths == "uniform" else -math.log(1 - u) * mean
        found.append(max(1.0, min(most, rounded(value))))
    return found


def quantile_arrivals(count: int, gap: float) -> list[float]:
    """Return rising times whose gaps are exponential with mean `gap`, at spread quantiles; the first is 0."""
    found, at = [], 0.0
    for number in range(count):
        if number:
            at -= math.log(1 - math.fmod(number * 0.754878 + 0.17, 1.0)) * gap
        found.append(at)
    return found


def running(rate: float, seconds: float) -> float:
    """Return the requests that run on average, by Little's law, from arrivals a second and each one's time."""
    return rate * seconds


def percentile(values: Numbers, fraction: float) -> float:
    """Return a percentile, linear between the two nearest values."""
    ordered = sorted(values)
    at = fraction * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def starts(arrivals: Numbers, lengths: Numbers, slots: int, policy: str, delay: float) -> list[float]:
    """Return the time at which each request gets a slot, where a request of length n holds it for n units.

    Policies are those of the scheduler: `none` runs one at a time; `static` starts all that wait, up to `slots`, once
    none runs; `dynamic` waits for that until `slots` wait or the first has waited for `delay`; `continuous` fills a
    slot as soon as it is free. Arrivals rise. Raises ValueError for another policy.
    """
    if policy not in ("none", "static", "dynamic", "continuous"):
        raise ValueError(f"policies are none, static, dynamic and continuous, not {policy!r}")
    size = 1 if policy == "none" else slots
    found: list[float] = []
    free = [0.0] * size
    while len(found) < len(arrivals):
        at = len(found)
        if policy in ("none", "continuous"):
            free.sort()
            found.append(max(arrivals[at], free[0]))
            free[0] = found[at] + lengths[at]
            continue
        now = max(arrivals[at], max(free))
        if policy == "dynamic":
            full = arrivals[at + size - 1] if at + size <= len(arrivals) else math.inf
            now = max(now, min(full, arrivals[at] + delay))
        batch = [each for each in range(at, min(at + size, len(arrivals))) if arrivals[each] <= now]
        found += [now] * len(batch)
        free = [now + max(lengths[each] for each in batch)]
    return found


# Attention


def online_softmax(scores: Numbers, tile: int) -> list[list[float]]:
    """Return, for each tile of a row of scores, the running maximum m, the sum l of exp(score - m), and the factor that
    rescales what was summed before. The weight of a score is exp(score - m) / l with the last m and l."""
    found, most, total = [], -math.inf, 0.0
    for at in range(0, len(scores), tile):
        part = scores[at : at + tile]
        new = max(most, max(part))
        factor = math.exp(most - new)
        total = total * factor + sum(math.exp(each - new) for each in part)
        most = new
        found.append([most, total, factor])
    return found
