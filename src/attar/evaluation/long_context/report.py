"""All figures of long contexts in one report: sparse attention, sparse prefill, KV eviction, and passkeys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.errors import UserError
from attar.evaluation.long_context import eviction as kv_eviction
from attar.evaluation.long_context import passkeys, sparse_attention, sparse_prefill
from attar.evaluation.long_context.eviction import EvictionReport
from attar.evaluation.long_context.passkeys import PasskeyReport
from attar.evaluation.long_context.sparse_attention import SparseAttentionReport
from attar.evaluation.long_context.sparse_prefill import SparsePrefillReport
from attar.evaluation.long_context.windows import Reading
from attar.progress import Progress

PASSKEYS = 1  # prompts at each depth, by default


@dataclass(frozen=True)
class LongContextReport:
    """What was measured; None for the rest."""

    sparse_attention: SparseAttentionReport | None
    sparse_prefill: SparsePrefillReport | None
    kv_eviction: EvictionReport | None
    passkeys: PasskeyReport | None

    def _parts(self) -> dict[str, SparseAttentionReport | SparsePrefillReport | EvictionReport | PasskeyReport]:
        return {name: part for name, part in vars(self).items() if part is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of each part under its name."""
        return {name: part.to_dict() for name, part in self._parts().items()}

    def table(self) -> str:
        """Return the figures as lines of text."""
        return "\n\n".join(part.table() for part in self._parts().values())


def measure(
    model: str,
    text: Path,
    reading: Reading,
    *,
    context: int | None = None,
    max_tokens: int | None = None,
    kv: str | None = None,
    prompts: int = PASSKEYS,
    progress: Progress | None = None,
) -> LongContextReport:
    """Measure each setting that is given by itself, and ask for passkeys with all of them in `prompts` texts a depth.

    Raises ValueError as the parts do, and (`option_conflict`) for eviction beside the others.
    """
    sparse, prefill, eviction = reading
    if eviction is not None and (sparse is not None or prefill is not None):
        raise UserError("option_conflict", "--kv-eviction is measured alone, without reading few keys")
    length = context or (sparse_attention.CONTEXT if prefill is None else sparse_prefill.CONTEXT)
    return LongContextReport(
        None if sparse is None else sparse_attention.measure(
            model, text, sparse, context=length, max_tokens=max_tokens, kv=kv, progress=progress,
        ),
        None if prefill is None else sparse_prefill.measure(
            model, text, prefill, context=length, max_tokens=max_tokens, kv=kv, progress=progress,
        ),
        None if eviction is None else kv_eviction.measure(
            model, text, eviction, context=length, max_tokens=max_tokens, kv=kv, progress=progress,
        ),
        passkeys.measure(
            model, text, reading, context=length, prompts=prompts, kv=kv, progress=progress,
        ) if prompts else None,
    )  # fmt: skip
