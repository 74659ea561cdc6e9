"""`measure`: decoders and token ids in, a `Report` out. `compress` writes it into receipts and `eval` prints it.

The report includes its protocol, because perplexities compare only under one protocol. Windows are at most 2048 tokens
by default, whatever context the model supports. Attention's cost grows with the square of the length, and so figures of
different models are at least cut alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from attar.errors import UserError
from attar.metrics import greedy
from attar.metrics.bootstrap import Interval, mean
from attar.metrics.perplexity import Window, plan_windows
from attar.metrics.protocols import ImageProtocol, Protocol
from attar.metrics.streaming import Measurement, NewCache, decoder_logits, stream
from attar.model.decoder import Decoder
from attar.progress import StageProgress
from attar.text.tokenizer import Tokenizer

CONTEXT = 2048

SHOWN = (
    "ppl", "bits_per_byte", "ppl_base", "ppl_ratio", "ln_ppl_change", "kl_mean", "kl_p50", "kl_p99", "kl_p999",
    "kl_max", "top1", "ear", "greedy",
)  # fmt: skip
"""Names of a report's figures, in display order."""

_LABELS = {
    "ppl": "perplexity",
    "bits_per_byte": "bits per byte",
    "ln_ppl_change": "ln ppl, change",
    "top1": "top-1 agreement",
    "ear": "acceptance (EAR)",
    "greedy": f"same of {greedy.LENGTH} greedy",
}


@dataclass(frozen=True, slots=True)
class CacheBits:
    """Bits per value of the measured KV cache, in a sequence of `context` tokens.

    `stored` counts scales, outliers and 16-bit windows; `shared` is what the model's calibrated matrices or levels add
    where that sequence is the only one.
    """

    scheme: str
    context: int
    stored: float
    shared: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme, "context": self.context, "bits": self.stored, "bits_shared": self.shared,
        }  # fmt: skip

    def __str__(self) -> str:
        calibrated = f"; calibration adds {self.shared:.3f} to one sequence alone" if self.shared else ""
        return f"KV cache {self.scheme}: {self.stored:.3f} bits a number at {self.context} tokens{calibrated}"


@dataclass(frozen=True, eq=False)
class Report:
    """Figures of a measurement with their intervals, by the names in `SHOWN`; figures that were not measured are
    absent. `bytes` counts the bytes of the counted tokens, None where the tokenizer was not at hand. `cache` is None
    where no KV cache was measured. `notes` are warnings."""

    measurement: Measurement
    figures: Mapping[str, Interval]
    protocol: Protocol | ImageProtocol
    bytes: int | None
    cache: CacheBits | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.measurement.tokens

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values: every name in `SHOWN` with its value, `tokens`, `bytes`, `intervals` (name to
        [low, high] or None), `protocol` and, where there are such, `kv_cache` and
        `warnings`. A value is None where it was not measured or is
        infinite."""
        shown = {name: self.figures.get(name) for name in SHOWN}
        return {
            **{name: None if figure is None else _finite(figure.value) for name, figure in shown.items()},
            "tokens": self.tokens,
            "bytes": self.bytes,
            "intervals": {name: None if figure is None else _pair(figure) for name, figure in shown.items()},
            "protocol": self.protocol.to_dict(),
            **({} if self.cache is None else {"kv_cache": self.cache.to_dict()}),
            **({"warnings": list(self.notes)} if self.notes else {}),
        }

    def table(self) -> str:
        """Return a line of text for each figure, and the protocol below."""
        lines = []
        for name in SHOWN:
            if (figure := self.figures.get(name)) is not None:
                pair = "" if figure.low is None else f"  [{figure.low:.4g}, {figure.high:.4g}]"
                lines.append(f"{_LABELS.get(name, name.replace('_', ' ')):<17} {figure.value:>10.5g}{pair}")
        lines += self.protocol.lines(self.tokens)
        if self.cache is not None:
            lines.append(str(self.cache))
        return "\n".join(lines)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _pair(figure: Interval) -> list[float] | None:
    if figure.low is None or figure.high is None or not math.isfinite(figure.high):
        return None
    return [figure.low, figure.high]


def measure(
    model: Decoder,
    ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    base: Decoder | None = None,
    bos: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    bytes_of: Tokenizer | None = None,
    cache: NewCache | None = None,
    prompts: int = 0,
    progress: StageProgress | None = None,
) -> Report:
    """Measure the perplexity of `model` on token ids, and its divergence from `base`.

    `ids` is one text's tokens, or several sequences that are cut separately. `context` defaults to what both models
    support, at most 2048; `stride` to `context`. `bytes_of` gives the number of bytes of each token (special tokens:
    none), which yields bits per byte. With `cache`, `model` (not `base`) runs through such caches. `prompts` prompts
    from all over the text are continued greedily by both (`metrics.greedy`).

    Raises ValueError for fewer than two tokens, ids outside the vocabulary, and a context that a model does not
    support. It also does for models of different vocabularies, for prompts without a base or more than the text has,
    and for logits that are not finite.
    """
    config = model.config
    if base is not None and base.config.vocab_size != config.vocab_size:
        raise UserError(
            "vocabulary_mismatch",
            f"the models have vocabularies of {config.vocab_size} and {base.config.vocab_size} tokens: "
            "a divergence needs one vocabulary, so compare a model with the one it was made from",
        )
    supported = min(config.context, config.context if base is None else base.config.context)
    context = min(supported, CONTEXT) if context is None else context
    if context > supported:
        raise UserError(
            "context_exceeded",
            f"a context of {context} is longer than the {supported} positions that the model supports",
        )
    stride = context if stride is None else stride
    windows: list[Window] = []
    sequences = _sequences(ids)
    started = greedy.prompts(sequences, prompts, bos, supported) if prompts else None  # fails before hours of work
    if started is not None and base is None:
        raise UserError("option_missing", "greedy continuations are compared with those of a base: name one")
    for sequence in sequences:
        outside = next((i for i in sequence if not 0 <= i < config.vocab_size), None)
        if outside is not None:
            raise UserError(
                "token_out_of_vocabulary", f"token id {outside} lies outside the vocabulary of {config.vocab_size}"
            )
        windows += plan_windows(sequence, context, stride, bos)
    other = None if base is None else decoder_logits(base)
    measurement = stream(decoder_logits(model, cache), windows, other, progress)
    figures = measurement.figures()
    loss = figures.pop("nll")
    size = None if bytes_of is None else _bytes(bytes_of, windows)
    if size:
        per_byte = measurement.tokens / size / math.log(2)
        figures["bits_per_byte"] = loss.map(lambda nats: nats * per_byte)
    if started is not None and base is not None:
        lengths = greedy.shared(model, base, started, cache=cache)
        figures["greedy"] = mean(lengths, np.arange(len(lengths)))
    return Report(measurement, figures, Protocol(context, stride, bos, len(windows), prompts), size)


def _sequences(ids: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    if not ids:
        raise UserError("text_empty", "there is nothing to measure on: the text is empty")
    flat = [i for i in ids if isinstance(i, int)]
    nested = [list(i) for i in ids if not isinstance(i, int)]
    if flat and nested:
        raise UserError("option_malformed", "token ids are one list of ids or a list of such lists, not both")
    return nested or [flat]


def _bytes(tokenizer: Tokenizer, windows: Sequence[Window]) -> int:
    counted = chain.from_iterable(w.counted for w in windows)
    return sum(len(tokenizer.id_to_bytes(i)) for i in counted if i not in tokenizer.special_ids)
