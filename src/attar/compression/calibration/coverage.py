"""Coverage of a model by its calibration text: warns about channels and experts without calibration data.

Three figures are reported. Fewer tokens than a linear has columns leave its Hessian without full rank, however they are
chosen. An input channel that was zero at every token has no weight, so its column is rounded as if it could never
matter. Text of another kind may use it (ReLU models and mixtures have many such channels). An expert that received no
token is rounded by its weights alone (`hessians`), and searches on its inputs leave it unchanged (`transforms`).

Inputs of a block's linears are observed where the block runs compressed, to calibrate the next one: that costs a
comparison a number, until every channel was seen. The last block, behind which nothing is calibrated, is run for this
alone. Where the block pass reads no inputs, they are observed where importances are gathered, from the original.
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
    """Calibration coverage of one block. `hook` is the hook for the linears' inputs."""

    def __init__(self, block: Block) -> None:
        self._experts = list(block.feed_forward.experts) if isinstance(block.feed_forward, MixtureOfExperts) else []
        readers = [block.attention.qkv[0], block.attention.output]
        readers += [linear for each in block.feed_forwards() for linear in (each.up[0], each.down)]
        self._tokens = dict.fromkeys((linear.name for linear in readers), 0)
        self._seen: dict[str, Tensor] = {}  # linears that tokens reached: bool [I], nonzero channels
        self._whole: set[str] = set()  # those of whose channels none is left to see

    def hook(self, linear: Linear, x: Tensor) -> None:
        """Update the coverage from rows x [N, I]."""
        if linear.name in self._tokens and len(x):
            self._tokens[linear.name] += len(x)
            if linear.name not in self._whole:
                found = (x != 0).any(0)
                self._seen[linear.name] = found | self._seen.get(linear.name, found)
                if self._seen[linear.name].all():
                    self._whole.add(linear.name)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready counts: for each linear that tokens reached, its unused channels and all of them; for the
        experts, the unreached ones and their number."""
        idle = [expert.up[0].name for expert in self._experts if not self._tokens[expert.up[0].name]]
        unseen = {name: [int((~seen).sum()), len(seen)] for name, seen in self._seen.items()}
        return {"channels": unseen, "idle": idle, "experts": len(self._experts)}


def keep(folder: Path, key: str, layer: int, found: Coverage) -> None:
    """Store the coverage of a block under the `key` of its run."""
    resume.write_note(_file(folder, key, layer), found.to_dict())


def kept(folder: Path, key: str, layers: int) -> list[dict[str, Any]]:
    """Return the stored coverage of the blocks, where a run of this key stored any."""
    return [json.loads(file.read_text()) for i in range(layers) if (file := _file(folder, key, i)).is_file()]


def _file(folder: Path, key: str, layer: int) -> Path:
    return folder / f"coverage-{key}-{layer}.json"


def of(config: ModelConfig, ids: Tensor, folder: Path, key: str) -> tuple[str, ...]:
    """Return `warnings` of the calibration text ids [S, L], from the coverage stored in the folder under the key."""
    widest = max(each.columns for each in matrices(config) if each.compressible)
    return tuple(warnings(ids.numel(), widest, kept(folder, key, config.layers)))


def warnings(tokens: int, widest: int, blocks: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield warnings about `tokens` of calibration text for a model whose widest linear has `widest` columns, given
    `Coverage.to_dict` of its blocks. Nothing is yielded where the text is enough."""
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
