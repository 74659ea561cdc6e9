"""Whether calibration text says enough about a model: what it never reached is rounded blindly, and somebody is told.

Three figures. Fewer tokens than a linear has columns leave its Hessian without full rank, however they are chosen. An
input channel that was zero at every token weighs nothing, so its column is rounded as if it could never matter: text of
another kind may use it (ReLU models and mixtures have many such). An expert that no token was sent to is rounded by its
weights alone (`hessians`), and what searches on its inputs leaves it as it is (`transforms`).

What a block's linears read is seen where the block runs compressed, to calibrate the next one: that costs a comparison
a number. The last block, behind which nothing is calibrated, is run for this alone. Where the walk reads no inputs, it
is seen where importances are gathered, from the original.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.compression import resume
from attar.kernels.operands import Linear
from attar.model.config import ModelConfig
from attar.model.layers import Block, MixtureOfExperts
from attar.plan.costs import matrices


class Coverage:
    """What calibration showed one block. `hook` is for the linears' inputs."""

    def __init__(self, block: Block) -> None:
        self._experts = list(block.feed_forward.experts) if isinstance(block.feed_forward, MixtureOfExperts) else []
        readers = [block.attention.qkv[0], block.attention.output]
        readers += [linear for each in block.feed_forwards() for linear in (each.up[0], each.down)]
        self._tokens = dict.fromkeys((linear.name for linear in readers), 0)
        self._seen: dict[str, Tensor] = {}  # of those that tokens reached, bool [I]: channels that were not zero

    def hook(self, linear: Linear, x: Tensor) -> None:
        """Note rows x [N, I]."""
        if linear.name in self._tokens and len(x):
            found = (x != 0).any(0)
            self._seen[linear.name] = found | self._seen.get(linear.name, found)
            self._tokens[linear.name] += len(x)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: of each linear that tokens reached, the channels that none used and all of them; of the experts,
        those that none reached, and their number."""
        idle = [expert.up[0].name for expert in self._experts if not self._tokens[expert.up[0].name]]
        unseen = {name: [int((~seen).sum()), len(seen)] for name, seen in self._seen.items()}
        return {"channels": unseen, "idle": idle, "experts": len(self._experts)}


def keep(folder: Path, key: str, layer: int, found: Coverage) -> None:
    """Note what a block was shown, under the `key` of what it is about."""
    resume.write_note(_file(folder, key, layer), found.to_dict())


def kept(folder: Path, key: str, layers: int) -> list[dict[str, Any]]:
    """What the blocks were shown, where that was noted by a run of this key."""
    return [json.loads(file.read_text()) for i in range(layers) if (file := _file(folder, key, i)).is_file()]


def _file(folder: Path, key: str, layer: int) -> Path:
    return folder / f"coverage-{key}-{layer}.json"


def of(config: ModelConfig, ids: Tensor, folder: Path, key: str) -> tuple[str, ...]:
    """`warnings` of the calibration text ids [S, L], by what was noted in the folder under the key."""
    widest = max(each.columns for each in matrices(config) if each.compressible)
    return tuple(warnings(ids.numel(), widest, kept(folder, key, config.layers)))


def warnings(tokens: int, widest: int, blocks: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What is to be said of `tokens` of calibration text for a model whose widest linear has `widest` columns, and of
    what `Coverage.to_dict` says of its blocks. Nothing, where there is enough."""
    if tokens < widest:
        yield (
            f"the calibration text has {tokens:,} tokens and the widest linear {widest:,} input columns: fewer tokens "
            "than columns say little of how columns go together; give more text"
        )
    unseen = total = idle = experts = 0
    worst, share = "", 0.0
    for block in blocks:
        idle, experts = idle + len(block["idle"]), experts + block["experts"]
        for name, (missed, count) in block["channels"].items():
            unseen, total = unseen + missed, total + count
            if missed / count > share:
                worst, share = name, missed / count
    if unseen:
        yield (
            f"{unseen:,} of {total:,} input channels were zero at every calibration token, most of them in {worst} "
            f"({share:.1%}): what reads them is rounded as if they never mattered; give text of the kind it will see"
        )
    if idle:
        yield (
            f"{idle:,} of {experts:,} experts were sent no calibration token: what they compute was not looked at; "
            "give more text, or text of more kinds"
        )
