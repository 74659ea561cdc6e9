"""A decoder of a published shape with random weights, made on the device in seconds, its products, its steps, and what
`plan/` says a step takes at least."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gpu.timing import DEVICE, HALF, copies
from torch import Tensor

from attar.formats.codecs import progressive
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme, multiplied_in
from attar.kernels import dispatch
from attar.kernels.operands import Linear, Prepared
from attar.kernels.triton import weights
from attar.kv.schemes import SCHEMES
from attar.model import assembly
from attar.model.cache import ForwardBatch
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.shapes import shape
from attar.plan.costs import Matrix, Storage
from attar.plan.roofline import Rates, Roofline


class RandomWeights:
    """Numbers of the size that trained ones have, so that no arithmetic overflows; the output matrix is dense."""

    dtype = HALF

    def __init__(self, config: ModelConfig, scheme: str) -> None:
        self.config = config
        self.scheme = None if scheme == "bf16" else Scheme.parse(scheme)

    def has(self, name: str) -> bool:
        names = self.config.names
        return name != f"{names.head}.weight" and not name.endswith(".bias")

    def tensor(self, name: str) -> Tensor:
        size = self.config.head_dim if "q_norm" in name or "k_norm" in name else self.config.hidden
        return torch.ones(size, dtype=self.dtype, device=DEVICE)

    def matrix(self, name: str) -> Tensor:
        return dense((self.config.vocab_size, self.config.hidden))

    def linear(self, name: str) -> Linear:
        config, names = self.config, self.config.names
        if name == names.head:
            return Linear(name, self.matrix(name))
        q, kv, wide = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate
        sizes = {names.output: (config.hidden, q), names.down: (config.hidden, wide)}
        sizes |= dict(zip(names.qkv, ((q, config.hidden), (kv, config.hidden), (kv, config.hidden)), strict=True))
        sizes |= dict.fromkeys(names.gate_up, (wide, config.hidden))
        size = sizes[name.split(".", len(names.layer.split(".")))[-1]]
        return Linear(name, dense(size) if self.scheme is None else packed(size, self.scheme))


def dense(size: tuple[int, int]) -> Tensor:
    return torch.empty(size, dtype=HALF, device=DEVICE).normal_(0, size[1] ** -0.5)


LARGEST = {"fp8-block": 448, "progressive": 127}  # number that is multiplied, by the kind of a form


def packed(size: tuple[int, int], scheme: Scheme) -> PackedTensor:
    """A weight of random codes, on the device."""
    scheme = scheme.with_scale_dtype("float16" if scheme.activation is None else "float32")
    parts = {}
    for name, part in scheme.parts(size).items():
        dtype = getattr(torch, part.dtype)
        if name == "shape":
            parts[name] = torch.tensor(size)
        elif name == "scale":
            largest = scheme.weight.qmax if isinstance(scheme.weight, Grid) else LARGEST[scheme.weight.kind]
            step = 2.0 / (largest * size[1] ** 0.5)
            parts[name] = torch.full(part.shape, step, dtype=dtype, device=DEVICE)
        elif name in ("factor", "offset"):  # of progressive levels, whose codes have to be int8: -128 to 112
            level = 16 if name == "factor" else 16 * progressive.MIDDLE
            parts[name] = torch.full(part.shape, level, dtype=dtype, device=DEVICE)
        elif dtype == torch.float8_e4m3fn:
            parts[name] = (torch.randn(part.shape, device=DEVICE) * 100).clamp(-448, 448).to(dtype)
        else:
            raw = torch.randint(-128, 128, (part.bytes,), dtype=torch.int8, device=DEVICE)
            parts[name] = raw.view(dtype).view(part.shape)
    return PackedTensor(scheme, size, parts)


def products(name: str) -> dict[str, tuple[int, int]]:
    """The products of a block of a shape, as they are multiplied: [O, I]."""
    config = shape(name)
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    return {
        "qkv": (heads, config.hidden),
        "output": (config.hidden, config.heads * config.head_dim),
        "gate and up": (2 * config.intermediate, config.hidden),
        "down": (config.hidden, config.intermediate),
    }


def prepared(scheme: str, size: tuple[int, int]) -> list[Linear]:
    """As many weights of that size as are cold together."""
    first = Linear("l", packed(size, Scheme.parse(scheme)))
    weights.prepare(first, HALF)
    assert isinstance(first.weight, weights.TritonWeight)
    made = [first]
    for _ in range(copies(first.weight.read_bytes) - 1):
        made.append(Linear("l", packed(size, Scheme.parse(scheme))))
        weights.prepare(made[-1], HALF)
    return made


def decoder(name: str, scheme: str) -> Decoder:
    config = shape(name)
    return assembly.build(config, RandomWeights(config, scheme), None, dispatch.store(device=DEVICE, dtype=HALF))


def read_bytes(made: Decoder) -> int:
    """Bytes of weights that a step reads."""
    linears = [made.head, *(linear for block in made.blocks for linear in block.linears())]
    return sum(each.weight.read_bytes for each in linears if isinstance(each.weight, Prepared))


def multiplications(made: Decoder) -> int:
    """Of a token, by the blocks' weights."""
    return sum(each.shape[0] * each.shape[1] for block in made.blocks for each in block.linears())


def roof(made: Decoder, scheme: str, batch: int, context: int, rates: Mapping[str, float]) -> float:
    """Seconds that a decode step of `batch` sequences takes at least, by the arithmetic of `plan/` and a card's rates:
    for the bytes that it reads, keys and values in 16 bits, or for its products and attention."""

    def size(each: Matrix, scheme: Scheme | None) -> int:
        return 2 * each.rows * each.columns if scheme is None else scheme.bytes((each.rows, each.columns))

    limits = Rates(rates["copy"], lambda each: rates[multiplied_in(each)], size)
    storage = Storage.named("dense" if scheme == "bf16" else scheme)
    return max(Roofline(made.config, storage, SCHEMES["bfloat16"], limits).least([(context, 1, True)] * batch))


def step(made: Decoder, batch: int, filled: int, rows: int) -> tuple[Tensor, ForwardBatch]:
    """Token ids and the step that appends `rows` of them to each of `batch` sequences of `filled` tokens."""
    cache = made.cache(filled + rows, batch)
    for pages in cache.layers:
        pages.keys.normal_()
        pages.values.normal_()
    cache.filled = [filled] * batch
    ids = torch.randint(0, made.config.vocab_size, (batch * rows,), device=DEVICE)
    return ids, ForwardBatch((rows,) * batch, filled + rows, cache)
