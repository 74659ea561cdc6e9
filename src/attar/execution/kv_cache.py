"""KV cache schemes of an engine, a bench or an evaluation: found by name, and calibrated where needed.

Calibration needs text that the model finds likely, and serving has none at hand. So the model writes it: texts that
begin with a token drawn at random. A quarter is random throughout, because a model may repeat itself, and a direction
that calibration has never seen would be rounded to nothing. The seed makes the bases, and with them every output, the
same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from attar.errors import UserError
from attar.execution.recorded_step import Decoding
from attar.kv import schemes
from attar.kv.eviction import Eviction
from attar.kv.kvquant_published import PublishedCode
from attar.kv.pages import Bases
from attar.kv.published import PUBLISHED, PublishedFormat
from attar.kv.schemes import LENGTH, RANDOM, WRITTEN, KvScheme
from attar.kv.sparse import SparseAttention
from attar.model import kv_basis, kvquant_calibration, sparse_layers
from attar.model.cache import BLOCK, KVCache
from attar.model.decoder import Decoder
from attar.model.parallel import SplitDecoder
from attar.model.sparse_layers import SparseLayers
from attar.progress import Progress

SEED = 11
FEW_WRITTEN, FEW_RANDOM, SHORT = 4, 1, 96  # texts from which sparse attention is calibrated, and their tokens


def bases(decoder: Decoder, scheme: KvScheme) -> list[Bases] | None:
    """Return the bases for caches of this model and scheme; None where the scheme is not calibrated."""
    return kv_basis.calibrate(decoder, sample(decoder), scheme) if scheme.calibrated else None


@dataclass(eq=False)
class MeasuredCache:
    """A factory of KV caches that a measurement runs texts through: in a scheme, or in a format as published.

    It takes a capacity and a batch. `codes` are of a published format, one a layer.
    """

    decoder: Decoder
    form: KvScheme | PublishedFormat
    bases: list[Bases] | None = None
    codes: list[PublishedCode] = field(default_factory=list)

    def __call__(self, capacity: int, batch: int = 1, /) -> KVCache:
        if isinstance(self.form, KvScheme):
            return self.decoder.cache(capacity, batch, self.form, self.bases)
        cache = KVCache(self.decoder.config, capacity, batch)
        for pages, code in zip(cache.layers, self.codes, strict=True):
            pages.published = code
        return cache

    @property
    def name(self) -> str:
        return self.form.name

    def bits(self, context: int) -> float:
        """Return the bits of a number in a sequence of `context` tokens, with KVQuant's outliers as they were met."""
        config = self.decoder.config
        if isinstance(self.form, KvScheme):
            return self.form.bits_per_value(config.head_dim, BLOCK, context)
        numbers = sum(code.numbers for code in self.codes)
        share = sum(code.outliers for code in self.codes) / numbers if numbers else None
        return self.form.bits_per_value(config.kv_heads, config.head_dim, context, share)

    @property
    def model_bytes(self) -> int:
        """Bytes of one layer that all sequences share: calibrated matrices or levels."""
        config, form = self.decoder.config, self.form
        if isinstance(form, KvScheme):
            return form.basis_bytes(config.kv_heads, config.head_dim)
        return form.model_bytes(config.kv_heads, config.head_dim)


def measured(decoder: Decoder, name: str) -> MeasuredCache:
    """Return the factory of caches of a scheme or a format as published. Raises ValueError as `resolve` and
    `calibrated`."""
    return calibrated(decoder, PUBLISHED.get(name) or resolve(decoder, name))


def calibrated(
    decoder: Decoder, form: KvScheme | PublishedFormat, texts: Callable[[], Tensor] | None = None
) -> MeasuredCache:
    """Return the factory of caches of a form, calibrated where it is on `texts()`, by default what `sample` returns.

    Raises ValueError for a published format elsewhere than on a CPU in one process, and for heads that it does not
    support.
    """
    ids = texts or partial(sample, decoder)
    if isinstance(form, KvScheme):
        return MeasuredCache(decoder, form, kv_basis.calibrate(decoder, ids(), form) if form.calibrated else None)
    if isinstance(decoder, SplitDecoder) or decoder.device.type != "cpu" or decoder.dtype != torch.float32:
        raise UserError("kv_unsupported", f"{form.name} is measured on a CPU in one process, in float32")
    form.check(decoder.config.head_dim)
    codes = [PublishedCode(form) for _ in range(decoder.config.layers)]
    if form.calibrated:
        codes = kvquant_calibration.measure(decoder, ids()).codes(form)
    return MeasuredCache(decoder, form, codes=codes)


def resolve(decoder: Decoder, name: str | None) -> KvScheme:
    """Return the scheme of a name, by default the lossless one. Raises ValueError for an unknown name, and as
    `check`."""
    scheme = decoder.lossless if name is None else schemes.scheme(name)
    check(decoder, scheme)
    return scheme


def check(decoder: Decoder, scheme: KvScheme) -> None:
    """Raise ValueError where the model's heads do not fit the scheme, and where several processes would have to
    calibrate it."""
    if scheme.calibrated and isinstance(decoder, SplitDecoder):
        raise UserError(
            "kv_unsupported",
            f"{scheme.name} is calibrated, which several processes do not do yet: --kv int8 or fp8 would do",
        )
    scheme.check(decoder.config.head_dim, BLOCK)


def check_trees(decoder: Decoder, scheme: KvScheme) -> None:
    """Raise ValueError where trees of drafts cannot be run: elsewhere than on a CPU in one process, and where a scheme
    keeps unfinished blocks apart, one for each sequence."""
    if isinstance(decoder, SplitDecoder) or decoder.device.type != "cpu":
        raise UserError("option_conflict", "trees of drafts run on CPUs in one process: elsewhere drafts are chains")
    if scheme.recent:
        names = ", ".join(each.name for each in schemes.SCHEMES.values() if not each.recent)
        raise UserError("option_conflict", f"--kv {scheme.name} takes chains of drafts; trees take {names}")


def check_eviction(decoder: Decoder, scheme: KvScheme, eviction: Eviction, context: int) -> None:
    """Raise ValueError where KV eviction does not go with a model, its device and processes, or a cache's scheme."""
    processes = decoder.split.share.count if isinstance(decoder, SplitDecoder) else 1
    eviction.check(scheme, decoder.device.type, processes)
    config = decoder.config
    eviction.check_model(config.windows, config.learned_positions, config.angles_grow, context)


def sparse_layers_of(decoder: Decoder, settings: SparseAttention, progress: Progress | None = None) -> SparseLayers:
    """Find which layers of a model read few keys, on a short sample: a function of the model and the seed alone.

    `progress` shows the stage `key statistics`. Raises ValueError where sparse attention does not go with the model.
    """
    processes = decoder.split.share.count if isinstance(decoder, SplitDecoder) else 1
    settings.check(decoder.lossless, decoder.device.type, processes)
    sparse_layers.check(decoder.config)
    parts = SHORT + decoder.config.layers  # tokens that the model writes, then layers

    def told(done: int) -> None:
        if progress is not None:
            progress("key statistics", done, parts)

    ids = sample(decoder, FEW_WRITTEN, FEW_RANDOM, length=SHORT, told=told)
    return SparseLayers(settings, sparse_layers.calibrate(decoder, ids, lambda done, _: told(SHORT + done)))


@torch.inference_mode()
def sample(
    decoder: Decoder,
    written: int = WRITTEN,
    random: int = RANDOM,
    seed: int = SEED,
    length: int = LENGTH,
    told: Callable[[int], None] | None = None,
) -> Tensor:
    """Return token ids [written + random, L], of `length` tokens or as many as the model's context allows. They are
    written with an int8 KV cache: a quarter of the memory, and equally likely text. `told` is called with the number of
    tokens that each has."""
    length, vocabulary = min(length, decoder.config.context), decoder.config.vocab_size
    numbers = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, vocabulary, (random, length), generator=numbers)
    ids = torch.empty((written + random, length), dtype=torch.int64)
    ids[:written, 0], ids[written:] = torch.randint(0, vocabulary, (written,), generator=numbers), noise
    decoding = Decoding(decoder, decoder.cache(length, written, schemes.SCHEMES["int8"]), length)
    # Into an existing tensor: one kept from each step would lie between the steps' logits in the heap, and each of
    # those would need new memory.
    for at in range(1, length):
        chances = decoding.step(ids[:written, at - 1].tolist()).float().softmax(-1)
        ids[:written, at] = torch.multinomial(chances, 1, generator=numbers)[:, 0]
        if told is not None:
            told(at + 1)
    return ids
