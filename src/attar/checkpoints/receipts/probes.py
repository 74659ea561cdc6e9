"""Probes: a few prompts with the model's results for them, so that a copy can be checked on any machine.

A hash shows that the bytes are those that were written. A probe shows that the bytes, read and multiplied by this
machine's kernels, still make the same model. 8 prompts of 16 tokens run through it. At the last position, each block's
output is recorded as 16 random projections (signs drawn from a counter, so that no random generator's version matters)
and the logits as the 8 largest. A replay that differs names the first block that does. A projection onto random signs
keeps the norm of a difference on average (Johnson and Lindenstrauss 1984; Achlioptas 2003), so damage cannot hide in an
unprobed direction, unless all 16 projections miss it.

The difference between two sound machines is measured, not guessed, for each kernel path. Copies run next to the
prompts:

* *Shaken* copies: at each block their hidden states are moved by a few units in the last place, as another order of
  summation would. Products of unrounded activations pass the shaking on as it is: it is the floor of `EXACT`, for a
  block the largest up to it. Where a scheme rounds activations, it is the floor of `ROUNDED` instead.
* *Rounded* copies, where this machine has the native kernels: they run through the blocks in the native layout, with
  the kernels' coarsest rounding for rows which a scheme leaves alone. Their stream is rounded from the first block on,
  as in a replay, so differences add up in it as they do there. Their final distance from the prompts, which were not
  rounded, is the floor of `ROUNDED`. Finer rounding stays below it.

A replay may differ by `MARGIN` times the floor, but never needs to be closer than `LEAST`. Rounding amplifies the last
place to its own size in some block or other, because a value that crosses a border moves by a whole step. So the floor
of `ROUNDED` is the largest of all blocks. Recording the results of the rounded copies themselves would therefore not
make the replay sharper: shaken, they move from block 0 on by nearly as much as rounding moved them. So a replay on
rounded rows detects only damage beyond some percent of a hidden state: kernels that compute something else, shifted
codes, a tensor of flipped scales. It misses a single flipped scale; the exact path detects it. The native layout of a
weight does not depend on the rounding of rows, so a model that rounds them can be replayed on both paths (`unrounded`),
and is.

The blocks are walked once, one at a time, with all prompts: compression probes its output while it writes it. Where a
block rounds its inputs by a scale taken over a whole call, each prompt has a call of its own, as in a replay.

Legend: P prompts, L tokens of a prompt, C copies of the prompts, I hidden size, M projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.checkpoints.strict_io import CheckpointError
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid
from attar.kernels import dispatch
from attar.kernels.native.linear import PackedWeight
from attar.kernels.operands import Linear, Norm
from attar.kernels.triton.weights import TritonWeight
from attar.model import assembly
from attar.model import decoder as model
from attar.model.assembly import Weights
from attar.model.cache import ForwardBatch
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.layers import Block

PROMPTS = 8
LENGTH = 16
TOP = 8
PROJECTIONS = 16

SHAKE = 2.0**-21  # relative: 4 units in the last place of a float32
MARGIN: Mapping[str, float] = {"exact": 4.0, "int8_activations": 3.0, "cuda": 4.0}
"""Allowed difference of a replay, as a multiple of the floor. Sound replays on rounded rows were seen at up to 1.6."""
LEAST: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Smallest relative difference that counts, by the dtype that a replay computes in."""

LEAST_OF_FLOATS = 0.1
"""Smallest relative difference that counts where a scheme rounds rows to floats of 4 or 8 bits. A value that crosses a
border moves by a sixteenth of itself or more, which is visible. With so few borders, shaking crosses none or one by
chance, so it measures no floor."""

EXACT, ROUNDED, CUDA = "exact", "int8_activations", "cuda"
COARSEST: dispatch.Activations = "int8"

NO_FLOOR = "the receipt has no noise floor for the {} kernels, which could not run where it was made"

_SHAKEN, _ROUNDED = range(2)  # the copies of the prompts, in order
_TOKENS, _SIGNS, _SHAKES = range(3)  # purposes of streams of random words


def _words(purpose: int, key: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return `count` random words of stream (purpose, key): Philox (Salmon et al. 2011), whose words numpy fixes."""
    stream = np.random.Philox(key=np.array([key, purpose], dtype=np.uint64), counter=0)
    return np.asarray(stream.random_raw(count), dtype=np.uint64)


def _signs(purpose: int, key: int, rows: int, columns: int) -> Tensor:
    """Return random signs, +1 and -1, float64 [rows, columns], one random bit each."""
    words = _words(purpose, key, -(-rows * columns // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), count=rows * columns, bitorder="little")
    return torch.from_numpy(bits.reshape(rows, columns).astype(np.float64) * 2 - 1)


def prompts(config: ModelConfig, seed: int) -> Tensor:
    """Return token ids drawn uniformly from the vocabulary, int64 [P, L]."""
    words = _words(_TOKENS, seed, PROMPTS * LENGTH) >> np.uint64(32)
    ids = (words * np.uint64(config.vocab_size)) >> np.uint64(32)
    return torch.from_numpy(ids.astype(np.int64).reshape(PROMPTS, LENGTH))


def project(layer: int, hidden: Tensor) -> Tensor:
    """Project hidden states [P, I] after block `layer` onto its random signs, over sqrt(I): float64 [P, M]."""
    size = hidden.shape[-1]
    return hidden.double() @ _signs(_SIGNS, layer, PROJECTIONS, size).T / math.sqrt(size)


def rounds_activations(linears: Iterable[Linear]) -> bool:
    """Return whether any of the linears rounds its input to a grid, by its scheme or by the kernels that it is prepared
    for."""
    weights = (each.weight for each in linears)
    return any(w.rounds if isinstance(w, PackedWeight | TritonWeight) else _by_scheme(w) for w in weights)


def _by_scheme(weight: object) -> bool:
    """Return whether a weight's scheme rounds its inputs, whatever kernels multiply by it."""
    return isinstance(weight, PackedTensor) and weight.scheme.activation is not None


def _rounds_to_floats(decoder: Decoder) -> bool:
    weights = (linear.weight for block in decoder.blocks for linear in block.linears())
    schemes = (each.scheme for each in weights if isinstance(each, PackedTensor | PackedWeight))
    grids = (scheme.activation for scheme in schemes if scheme is not None and scheme.activation is not None)
    return any(not isinstance(grid, Grid) or grid.kind != "int" for grid in grids)


def kernel_path(decoder: Decoder) -> str:
    """Return the kernel path that the decoder runs on, among those with noise floors of their own."""
    linears = (linear for block in decoder.blocks for linear in block.linears())
    return ROUNDED if rounds_activations((*linears, decoder.head)) else EXACT


@contextmanager
def unrounded(decoder: Decoder) -> Iterator[None]:
    """Run the decoder's prepared weights on unrounded rows within the context, unless a scheme says otherwise."""
    linears = [linear for block in decoder.blocks for linear in block.linears()]
    changed: list[tuple[Linear, PackedWeight]] = []
    for each in (*linears, decoder.head):
        weight = each.weight
        if isinstance(weight, PackedWeight) and weight.scheme is not None and weight.scheme.activation is None:
            changed.append((each, weight))
            each.weight = PackedWeight(weight.matrix, weight.scheme, False, 0, weight.dtype)
    try:
        yield
    finally:
        for each, weight in changed:
            each.weight = weight


def _scales_over_calls(block: Block) -> bool:
    """Return whether any linear of the block takes the scale of its input from all rows of the call."""
    weights = (each.weight for each in block.linears() if each.activation_scale is None)
    grids = (w.scheme.activation for w in weights if isinstance(w, PackedTensor))
    return any(isinstance(grid, Grid) and grid.granularity == "tensor" for grid in grids)


def _difference(found: Tensor, stored: Tensor) -> float:
    """Return the largest difference of a row [.., M] relative to the stored row's norm; infinite where it is not
    finite."""
    if not found.isfinite().all():
        return math.inf
    return float(((found - stored).norm(dim=-1) / stored.norm(dim=-1).clamp_min(1e-30)).max())


def _digits(values: Tensor, digits: int = 9) -> list[Any]:
    """Return nested lists of floats with as many digits as float32 needs to read back the same."""
    if values.ndim == 0:
        return float(f"{float(values):.{digits}g}")  # type: ignore[return-value]
    return [_digits(value, digits) for value in values]


class ProbeRun:
    """Probes of a model whose blocks come one by one.

    `ids` [C P, L] are the prompts and, after them, their copies: to be shaken and, where there are native kernels, to
    be rounded. The caller carries their hidden states [C P * L, I] through `run`, block by block (and over a restart).
    The record that `run` makes of a block is JSON; all records, in order, go to `finish` with the result of `logits`.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.prompts = prompts(config, seed)
        self.native = dispatch.store(COARSEST) is not None
        self.ids = self.prompts.repeat(3 if self.native else 2, 1)
        self._rounds_logits = False

    def run(self, layer: int, block: Block, rows: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Run block `layer` over its input rows [C P * L, I]. Return (output rows, the record of the block).

        This must be the last use of the block: its weights end up in the layout of the native kernels. Raises
        ValueError naming the block where the output is not finite.
        """
        calm, shaken, *rounded = rows.split(PROMPTS * LENGTH)
        signs = _signs(_SHAKES, layer, *shaken.shape)
        shaken = (shaken.double() * (1 + SHAKE * signs)).to(rows.dtype)
        by_scheme = rounds_activations(block.linears())
        outputs = [_through(block, torch.cat((calm, shaken)), 1 if _scales_over_calls(block) else 2 * PROMPTS)]
        if rounded:
            _lay_out(block)
            outputs.append(_through(block, rounded[0], 1))  # one by one, for the memory: the bits are the same
        rows = torch.cat(outputs)
        if not rows.isfinite().all():
            name = self.config.names.layer.format(i=layer)
            raise UserError("not_finite", f"the output of {name} holds a NaN or an infinity on the probe prompts")
        calm, *copies = project(layer, rows.view(len(self.ids), LENGTH, -1)[:, -1]).split(PROMPTS)
        return rows, {
            "projections": _digits(calm),
            "noise": [_digits(torch.tensor(_difference(each, calm)), 3) for each in copies],
            "by_scheme": by_scheme,
            "by_kernels": self.native and rounds_activations(block.linears()),
        }

    def logits(self, norm: Norm, head: Linear, last: Tensor) -> Tensor:
        """Return the logits [C P, O] of the last rows [C P, I] by the LM head, or by O of its rows, `head`.

        A packed head ends up in the layout of the native kernels, which compute the rounded copies' logits.
        """
        if not self.native or not isinstance(head.weight, PackedTensor):
            return model.logits(self.config, norm, head, last)
        exact = model.logits(self.config, norm, head, last[:-PROMPTS])
        head.dense = None
        store = dispatch.store(COARSEST)
        assert store is not None
        store.take(head)
        self._rounds_logits = rounds_activations((head,))
        return torch.cat((exact, model.logits(self.config, norm, head, last[-PROMPTS:])))

    def finish(self, observed: Sequence[Mapping[str, Any]], logits: Tensor) -> dict[str, Any]:
        """Return the probes in the form of a receipt, from the records of `run` and the last rows' logits [C P, V]."""
        assert len(observed) == self.config.layers
        calm, *copies = logits.double().split(PROMPTS)
        top = calm.topk(min(TOP, self.config.vocab_size), -1)
        heads = [_digits(torch.tensor(_difference(each.gather(1, top.indices), top.values)), 3) for each in copies]
        by_scheme, by_kernels = (any(seen[key] for seen in observed) for key in ("by_scheme", "by_kernels"))
        by_kernels = by_kernels or self._rounds_logits

        def floor(*of: int) -> dict[str, Any] | None:
            """Return the largest difference of the copies `of`; None for none."""
            if not of:
                return None
            return {
                "layers": [max(seen["noise"][i] for i in of) for seen in observed],
                "head": max(heads[i] for i in of),
            }

        items = [
            {
                "tokens": self.prompts[p].tolist(),
                "top": [[i, _digits(x)] for i, x in zip(top.indices[p].tolist(), top.values[p], strict=True)],
                "layers": [seen["projections"][p] for seen in observed],
            }
            for p in range(PROMPTS)
        ]
        # A path that this model does not have, or that this machine cannot run, has no floor.
        rounded = ((_SHAKEN,) if by_scheme else ()) + ((_ROUNDED,) if by_kernels else ())
        paths = {EXACT: None if by_scheme else floor(_SHAKEN), ROUNDED: floor(*rounded), CUDA: None}
        return {"prompts": items, "noise": paths}


@torch.inference_mode()
def measure_probes(config: ModelConfig, weights: Weights, seed: int) -> dict[str, Any]:
    """Return the probes of a finished model with these weights, one block after another in memory.

    Raises ValueError naming the block whose output is not finite.
    """
    run = ProbeRun(config, seed)
    embedding, head = assembly.build_ends(config, weights)
    head.keep_dense = False
    count, length = run.ids.shape
    rows = embedding.forward(run.ids.reshape(-1), ForwardBatch((length,) * count, length).positions).float()
    seen = []
    for layer in range(config.layers):
        block = assembly.build_block(config, weights, layer)
        for linear in block.linears():
            linear.keep_dense = False
        rows, noted = run.run(layer, block, rows)
        seen.append(noted)
    last = rows.view(count, length, -1)[:, -1]
    return run.finish(seen, run.logits(assembly.build_final_norm(config, weights), head, last))


def _through(block: Block, rows: Tensor, together: int) -> Tensor:
    """Run the block over the rows [n L, I] of n prompts, `together` prompts at a time."""
    step = ForwardBatch((LENGTH,) * together, LENGTH)
    return torch.cat([block.run(some, step) for some in rows.split(together * LENGTH)])


def _lay_out(block: Block) -> None:
    """Move the block's weights into a store of its own, which is freed with the block."""
    store = dispatch.store(COARSEST)
    assert store is not None
    assembly.lay_out(block, store)


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt: `tokens`, the largest logits at its end, and each block's projections, [layers, M]."""

    tokens: tuple[int, ...]
    top: tuple[tuple[int, float], ...]
    layers: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise floor of a kernel path: relative differences after each block and at the logits."""

    layers: tuple[float, ...]
    head: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a replay differs by more than allowed, and the difference."""

    where: str
    difference: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.where} differs by {self.difference:.2g} of its size, where {self.allowed:.2g} is noise"


@dataclass(frozen=True, slots=True)
class Probes:
    prompts: tuple[Probe, ...]
    noise: Mapping[str, Noise | None]

    @staticmethod
    def parse(value: Any, where: str) -> Probes:
        """Read the JSON that `ProbeRun.finish` made. Raises CheckpointError beginning with `where` for any other."""
        try:
            probes = Probes(
                tuple(
                    Probe(
                        tuple(_integer(i) for i in item["tokens"]),
                        tuple((_integer(i), _number(x)) for i, x in item["top"]),
                        tuple(tuple(_number(x) for x in layer) for layer in item["layers"]),
                    )
                    for item in value["prompts"]
                ),
                {
                    path: None if n is None else Noise(tuple(map(_number, n["layers"])), _number(n["head"]))
                    for path, n in value["noise"].items()
                },
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError("receipt_invalid", f"{where}: the probes are damaged ({error!r})") from None
        sizes = {len(x.layers) for x in (*probes.prompts, *probes.noise.values()) if x is not None}
        whole = all(p.tokens and p.top and all(len(x) == PROJECTIONS for x in p.layers) for p in probes.prompts)
        if len(sizes) != 1 or not probes.prompts or not whole:
            raise CheckpointError(
                "receipt_invalid", f"{where}: the probes are damaged (their sizes do not fit together)"
            )
        return probes

    def replay(self, decoder: Decoder, count: int | None = None) -> Divergence | None:
        """Run the first `count` prompts (None: all) through a decoder; None where all is within the tolerance.

        Raises CheckpointError where the probes are of a model of another shape, or measured no such kernel path.
        """
        config = decoder.config
        largest = max(i for p in self.prompts for i in (*p.tokens, *(t for t, _ in p.top)))
        if len(self.prompts[0].layers) != config.layers or largest >= config.vocab_size:
            raise CheckpointError(
                "receipt_invalid", "the receipt's probes are of a model with other layers or another vocabulary"
            )
        path = kernel_path(decoder)
        noise = self.noise.get(path)
        if noise is None:
            raise CheckpointError("device_unsupported", NO_FLOOR.format(path))
        found: list[tuple[int, Divergence]] = []
        for probe in self.prompts[:count]:
            seen = _differences(decoder, probe, path, noise)
            found += [(place, each) for place, each in seen if each.difference > each.allowed][:1]
        return min(found, key=lambda each: each[0])[1] if found else None


def _differences(decoder: Decoder, probe: Probe, path: str, noise: Noise) -> Iterator[tuple[int, Divergence]]:
    """Yield each block's difference in order, then the logits', with its position."""
    config, last = decoder.config, len(probe.tokens) - 1
    seen: list[Tensor] = []
    step = ForwardBatch((last + 1,), last + 1, decoder.cache(last + 1))  # with a cache: its kernels are replayed too
    rows = torch.tensor([last], device=decoder.device)
    logits = decoder.forward(
        torch.tensor(probe.tokens, device=decoder.device),
        step,
        rows,
        lambda layer, hidden: seen.append(project(layer, hidden[rows].cpu())),
    ).cpu()
    least = max(LEAST[decoder.dtype], LEAST_OF_FLOATS if _rounds_to_floats(decoder) else 0.0)
    margin = MARGIN[path] * (LEAST[decoder.dtype] / LEAST[torch.float32] if path == EXACT else 1)
    floor = 0.0 if path == EXACT else max(*noise.layers, noise.head)
    for layer, (projection, stored, level) in enumerate(zip(seen, probe.layers, noise.layers, strict=True)):
        floor = max(floor, level)
        difference = _difference(projection, torch.tensor([stored], dtype=torch.float64))
        yield layer, Divergence(config.names.layer.format(i=layer), difference, max(margin * floor, least))
    ids, values = zip(*probe.top, strict=True)
    difference = _difference(logits[:, list(ids)].double(), torch.tensor([values], dtype=torch.float64))
    yield config.layers, Divergence(config.names.head, difference, max(margin * max(floor, noise.head), least))


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a token id")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
