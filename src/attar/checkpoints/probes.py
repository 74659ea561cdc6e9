"""Probes: a few prompts with what the model made of them, so that a copy can be checked on any machine.

A hash tells that the bytes are those that were written; a probe tells that the bytes, read and multiplied by this
machine's kernels, still make the same model. 8 prompts of 16 tokens run through it; of the last position, each block's
output is noted as 16 random projections (signs drawn from a counter, so that no random generator's version matters) and
the logits as the 8 largest. A replay that differs names the first block that does. A projection onto random signs keeps
the norm of a difference on average (Johnson and Lindenstrauss 1984; Achlioptas 2003), so no damage can hide in a
direction that was not looked at, short of one in all 16 blind ones.

How much two sound machines differ is measured, not guessed. Next to the prompts run *shaken* copies of them: at each
block their hidden states are moved by a few units in the last place, as another order of summation would. What comes of
that is the noise floor. A replay may differ by `MARGIN` times the floor, but never needs to be closer than `LEAST`.
Products of unrounded activations pass the shaking on as it is, so a block's floor is the largest up to it. Rounded ones
amplify it to the size of the rounding itself (a value that crosses a border moves by a whole step), in some block or
other: their floor is the largest of all blocks, and their probes see only damage that exceeds it.

The blocks are walked once, one at a time, with all prompts: compression probes its output while it writes it. Where a
block rounds its inputs by a scale taken over a whole call, each prompt has a call of its own, as in a replay.

Legend: P prompts, L tokens of a prompt, I hidden size, M projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.checkpoints.safetensors import CheckpointError
from attar.formats.packed import PackedTensor
from attar.model.cache import Step
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.layers import Block

PROMPTS = 8
LENGTH = 16
TOP = 8
PROJECTIONS = 16

SHAKE = 2.0**-21  # relative: 4 units in the last place of a float32
MARGIN: Mapping[str, float] = {"exact": 4.0, "int8_activations": 3.0, "cuda": 4.0}
LEAST: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Smallest relative difference that counts, by the dtype that a replay computes in."""

EXACT, ROUNDED, CUDA = "exact", "int8_activations", "cuda"

_TOKENS, _SIGNS, _SHAKES = range(3)  # what a stream of random words is for


def _words(purpose: int, key: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`count` random words of stream (purpose, key): Philox (Salmon et al. 2011), whose words numpy fixes."""
    stream = np.random.Philox(key=np.array([key, purpose], dtype=np.uint64), counter=0)
    return np.asarray(stream.random_raw(count), dtype=np.uint64)


def _signs(purpose: int, key: int, rows: int, columns: int) -> Tensor:
    """+1 and -1, float64 [rows, columns], one random bit each."""
    words = _words(purpose, key, -(-rows * columns // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), count=rows * columns, bitorder="little")
    return torch.from_numpy(bits.reshape(rows, columns).astype(np.float64) * 2 - 1)


def prompts(config: ModelConfig, seed: int) -> Tensor:
    """Token ids drawn uniformly from the vocabulary, int64 [P, L]."""
    words = _words(_TOKENS, seed, PROMPTS * LENGTH) >> np.uint64(32)
    ids = (words * np.uint64(config.vocab_size)) >> np.uint64(32)
    return torch.from_numpy(ids.astype(np.int64).reshape(PROMPTS, LENGTH))


def project(layer: int, hidden: Tensor) -> Tensor:
    """Hidden states [P, I] behind block `layer` onto its random signs, over sqrt(I): float64 [P, M]."""
    size = hidden.shape[-1]
    return hidden.double() @ _signs(_SIGNS, layer, PROJECTIONS, size).T / math.sqrt(size)


def rounds_activations(block: Block) -> bool:
    """Whether any linear of the block rounds its input to a grid."""
    weights = (each.weight for each in block.linears())
    return any(isinstance(w, PackedTensor) and w.scheme.activation is not None for w in weights)


def _scales_over_calls(block: Block) -> bool:
    """Whether any linear of the block takes the scale of its input from all rows of the call."""
    weights = (each.weight for each in block.linears() if each.activation_scale is None)
    grids = (w.scheme.activation for w in weights if isinstance(w, PackedTensor))
    return any(grid is not None and grid.granularity == "tensor" for grid in grids)


def _difference(found: Tensor, stored: Tensor) -> float:
    """The largest difference of a row [.., M] relative to the stored row's norm; infinite where it is not finite."""
    if not found.isfinite().all():
        return math.inf
    return float(((found - stored).norm(dim=-1) / stored.norm(dim=-1).clamp_min(1e-30)).max())


def _digits(values: Tensor, digits: int = 9) -> list[Any]:
    """Nested lists of floats with as many digits as float32 needs to read back the same."""
    if values.ndim == 0:
        return float(f"{float(values):.{digits}g}")  # type: ignore[return-value]
    return [_digits(value, digits) for value in values]


class ProbeRun:
    """The probes of a model whose blocks come one by one.

    `ids` [2 P, L] are the prompts and, after them, the same prompts once more, to be shaken. The caller carries their
    hidden states [2 P * L, I] from block to block (and over a restart): `run` takes them through a block, `observe`
    notes its output. What `observe` returns is JSON; all of it, in order, goes to `finish` with the logits.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.prompts = prompts(config, seed)
        self.ids = self.prompts.repeat(2, 1)

    def run(self, layer: int, block: Block, rows: Tensor) -> Tensor:
        """Block `layer` over the rows [2 P * L, I] that enter it, the second half moved by `SHAKE` of each value."""
        calm, shaken = rows.chunk(2)
        signs = _signs(_SHAKES, layer, *shaken.shape)
        rows = torch.cat((calm, (shaken.double() * (1 + SHAKE * signs)).to(rows.dtype)))
        together = 1 if _scales_over_calls(block) else len(rows) // LENGTH
        step = Step((LENGTH,) * together, LENGTH)
        return torch.cat([block.run(some, step) for some in rows.split(together * LENGTH)])

    def observe(self, layer: int, block: Block, rows: Tensor) -> dict[str, Any]:
        """What is kept of block `layer`, given its output rows [2 P * L, I].

        Raises ValueError naming the block where they are not finite.
        """
        if not rows.isfinite().all():
            name = self.config.names.layer.format(i=layer)
            raise ValueError(f"the output of {name} holds a NaN or an infinity on the probe prompts")
        calm, shaken = project(layer, rows.view(2 * PROMPTS, LENGTH, -1)[:, -1]).chunk(2)
        return {
            "projections": _digits(calm),
            "noise": _digits(torch.tensor(_difference(shaken, calm)), 3),
            "rounded": rounds_activations(block),
        }

    def finish(self, observed: Sequence[Mapping[str, Any]], logits: Tensor) -> dict[str, Any]:
        """The probes as they stand in a receipt, from all blocks' observations and the last rows' logits [2 P, V]."""
        assert len(observed) == self.config.layers
        calm, shaken = logits.double().chunk(2)
        top = calm.topk(min(TOP, self.config.vocab_size), -1)
        noise = {
            "layers": [seen["noise"] for seen in observed],
            "head": _digits(torch.tensor(_difference(shaken.gather(1, top.indices), top.values)), 3),
        }
        rounded = any(seen["rounded"] for seen in observed)
        items = [
            {
                "tokens": self.prompts[p].tolist(),
                "top": [[i, _digits(x)] for i, x in zip(top.indices[p].tolist(), top.values[p], strict=True)],
                "layers": [seen["projections"][p] for seen in observed],
            }
            for p in range(PROMPTS)
        ]
        # A path that this model does not have, or that this machine cannot run, has no floor.
        paths = {EXACT: None if rounded else noise, ROUNDED: noise if rounded else None, CUDA: None}
        return {"prompts": items, "noise": paths}


@torch.inference_mode()
def make_probes(decoder: Decoder, seed: int) -> dict[str, Any]:
    """Probes of a whole decoder that computes in float32. Reads its blocks once, in order."""
    assert decoder.dtype == torch.float32
    run = ProbeRun(decoder.config, seed)
    rows = decoder.embedding.forward(run.ids.flatten(), torch.arange(LENGTH).repeat(len(run.ids)))
    observed = []
    for layer, block in enumerate(decoder.blocks):
        rows = run.run(layer, block, rows)
        observed.append(run.observe(layer, block, rows))
    return run.finish(observed, decoder.logits(rows[LENGTH - 1 :: LENGTH]))


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt: `tokens`, the largest logits at its end, and each block's projections, [layers, M]."""

    tokens: tuple[int, ...]
    top: tuple[tuple[int, float], ...]
    layers: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise floor of a kernel path: relative differences behind each block and at the logits."""

    layers: tuple[float, ...]
    head: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a replay first differs by more than it may, and by how much."""

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
            raise CheckpointError(f"{where}: the probes are damaged ({error!r})") from None
        sizes = {len(x.layers) for x in (*probes.prompts, *probes.noise.values()) if x is not None}
        whole = all(p.tokens and p.top and all(len(x) == PROJECTIONS for x in p.layers) for p in probes.prompts)
        if len(sizes) != 1 or not probes.prompts or not whole:
            raise CheckpointError(f"{where}: the probes are damaged (their sizes do not fit together)")
        return probes

    def replay(self, decoder: Decoder, count: int | None = None) -> Divergence | None:
        """Run the first `count` prompts (None: all) through a decoder; None where all is within the tolerance.

        Raises CheckpointError where the probes are of a model of another shape, or measured no such kernel path.
        """
        config = decoder.config
        largest = max(i for p in self.prompts for i in (*p.tokens, *(t for t, _ in p.top)))
        if len(self.prompts[0].layers) != config.layers or largest >= config.vocab_size:
            raise CheckpointError("the receipt's probes are of a model with other layers or another vocabulary")
        path = ROUNDED if any(rounds_activations(block) for block in decoder.blocks) else EXACT
        noise = self.noise.get(path)
        if noise is None:
            raise CheckpointError(f"the receipt has no noise floor for the {path} kernels that this model runs on")
        found: list[tuple[int, Divergence]] = []
        for probe in self.prompts[:count]:
            seen = _differences(decoder, probe, path, noise)
            found += [(place, each) for place, each in seen if each.difference > each.allowed][:1]
        return min(found, key=lambda each: each[0])[1] if found else None


def _differences(decoder: Decoder, probe: Probe, path: str, noise: Noise) -> Iterator[tuple[int, Divergence]]:
    """Each block's difference in order, then the logits', with its place."""
    config, last = decoder.config, len(probe.tokens) - 1
    seen: list[Tensor] = []
    step = Step((len(probe.tokens),), len(probe.tokens))
    rows = torch.tensor([last])
    logits = decoder.forward(
        torch.tensor(probe.tokens), step, rows, lambda layer, hidden: seen.append(project(layer, hidden[rows]))
    )
    least = LEAST[decoder.dtype]
    margin = MARGIN[path] * (least / LEAST[torch.float32] if path == EXACT else 1)
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
