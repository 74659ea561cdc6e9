"""The contract between a recipe's result and its writers: a folder (`folder`) or one GGUF file (`gguf`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from attar.checkpoints.writer import FilePlan, ShardWriter
from attar.compression.block.structured import Sizes
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.model.layers import Block


class Output(Protocol):
    """Names, schemes and sizes of what one recipe makes of one checkpoint, decided before any weight is read.
    Attributes are for reading. Linears go by their module names. The order of writing is fixed: every block, in order;
    the LM head, if `head` is a scheme; the rest; the config; after tuning some tensors again; the card. Tensors go to a
    `ShardWriter` made for `plans`, so that a run that was killed finds those of finished blocks (`written`)."""

    schemes: dict[str, Scheme | None]
    """The scheme of each matrix that recipes reach; None: it stays unchanged."""
    head: Scheme | None
    """The scheme of the LM head."""
    sizes: Sizes | None
    """Remaining dimensions after structured pruning, if the recipe prunes so."""
    importances: Mapping[str, Tensor]
    """Importances of the columns [I] of a matrix where the output rounds it; empty: all columns count alike."""
    bits_per_weight: float
    """Stored bits of the compressed weights, over their number."""
    notes: tuple[str, ...]
    """Notes for users who load the output elsewhere, a sentence each."""

    def weighing(self, importances: Mapping[str, Tensor]) -> Output:
        """Return this output with importances, or itself where it rounds nothing by them."""

    def plans(self, max_shard_bytes: int | None) -> list[FilePlan]:
        """Lay out files of at most so many bytes; None: of the output's own size. Raises ValueError as `plan_files`."""

    def written(self, blocks_done: int) -> list[str]:
        """Name the tensors that are on disk once so many blocks are done."""

    def write_block(self, writer: ShardWriter, block: Block, layer: int) -> None:
        """Write every tensor of a finished block, and leave its weights as readers of the output have them."""

    def round_head(self, rows: Tensor) -> PackedTensor:
        """Round rows [R, I] of the LM head as they are stored; every row's codes and scales are its own."""

    def round_embedding(self, rows: Tensor) -> PackedTensor | None:
        """Round rows [R, I] of the embedding as they are stored; None where they stay as they are."""

    def as_read(self, packed: PackedTensor) -> PackedTensor:
        """Return rows of the LM head as readers of the output have them."""

    def write_head(self, writer: ShardWriter, pieces: Iterable[PackedTensor]) -> None:
        """Write the LM head, whose rows come in `pieces`, all but the last of a multiple of 32 rows."""

    def copy_rest(self, writer: ShardWriter, report: Callable[[str, int, int], None]) -> None:
        """Write what belongs to no block, but for an LM head that `write_head` wrote."""

    def write_config(self, folder: Path) -> None:
        """Write to `folder` what stands beside the weights."""

    def write_again(self, writer: ShardWriter, found: Mapping[str, Tensor]) -> None:
        """Replace tensors that were written, by the names that tuning gives them."""

    def write_card(self, folder: Path, size: int, cost: Mapping[str, Any] | None) -> None:
        """Write the model card, given the bytes of all weight files and the evaluation figures, if there are any."""
