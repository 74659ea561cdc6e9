"""Importances of the columns of each linear's weight: the mean square of its inputs, over calibration text.

Rounding damages a linear's output by the sum over columns of error^2 E[x^2], if inputs of different columns are
uncorrelated. So E[x^2] weighs an error when scales and codes of GGML blocks are searched, and is the content of
llama.cpp's importance matrices. It is measured on the original model, with one block in memory, and depends on no
recipe. One matrix serves every file made of a model (`attar imatrix`), and matrices of other programs can be read.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.convert.dense import open_dense
from attar.checkpoints.gguf import export as gguf_export
from attar.checkpoints.gguf.names import file_name, homes, place
from attar.checkpoints.sources import hub, imatrix
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.sources.imatrix import Imatrix
from attar.checkpoints.vocabulary import is_gguf
from attar.compression.calibration import coverage, domain, hidden_states, texts
from attar.compression.calibration.amount import Amount, Calibration, is_text
from attar.compression.calibration.coverage import Coverage
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.calibration.image_rows import ImageRows
from attar.compression.groups import input_groups
from attar.compression.solvers.rounding.means import ColumnMean
from attar.errors import UserError
from attar.kernels import ops
from attar.kernels.operands import Linear
from attar.model.assembly import all_compressible, build_block, build_final_norm
from attar.model.config import Names
from attar.model.layers import Block
from attar.progress import Progress


@torch.inference_mode()
def collect(
    checkpoint: Checkpoint, ids: Tensor, folder: Path, key: str, memory: int, progress: Progress,
    images: ImageRows | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return E[x^2], float32 [I], of the inputs of each linear, the LM head included, on `ids` [S, L], by module name.
    Hidden states are kept in files of `folder`, and in memory up to `memory` bytes. The coverage of each block stays
    there, under `key` (`coverage.kept`). Raises ValueError naming the block whose output is not finite, and a linear
    that no token reached."""
    config = checkpoint.config
    shape, rows = (*ids.shape, config.hidden), hidden_states.rows_at_once(config)
    spare = (memory - hidden_states.IN_A_BLOCK) // 2
    places = None if images is None else images.places(len(ids))
    streams = [HiddenStates(folder / f"importance-{i}.f32", shape, spare, rows, places=places) for i in range(2)]
    found: dict[str, Tensor] = {}
    try:
        hidden_states.embed(checkpoint, ids, streams[0], images=images)
        for layer in range(config.layers):
            block = build_block(config, checkpoint, layer)
            for linear in block.linears():
                linear.keep_dense = False
            shown = Coverage(block)
            found |= _block(block, streams[layer % 2], streams[1 - layer % 2], layer, shown)
            coverage.keep(folder, key, layer, shown)
            progress("importances", layer + 1, config.layers)
        norm = build_final_norm(config, checkpoint)
        last = ColumnMean(config.hidden, 2, config.names.head)
        for batch in streams[config.layers % 2].batches():
            last.add(ops.norm(streams[config.layers % 2].read(batch), None, norm)[1])
        found[config.names.head] = last.value
    finally:
        for stream in streams:
            stream.close()
            stream.path.unlink()
    return found


def kept(
    checkpoint: Checkpoint, ids: Tensor, folder: Path, key: str, memory: int, progress: Progress,
    images: ImageRows | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the importances of `collect`, computed once: a resumed run finds them in `folder`, under its `key`."""
    path = folder / f"importances-{key}.gguf"
    if not path.exists():
        means = collect(checkpoint, ids, folder, key, memory, progress, images)
        imatrix.write(path, as_imatrix(checkpoint.config.names, means, ids, "calibration"))
    return known(path, checkpoint)


def as_imatrix(names: Names, means: dict[str, Tensor], ids: Tensor, dataset: str) -> Imatrix:
    """Convert importances to an `Imatrix`, under the names of a GGUF file's tensors; those of experts [E, I]."""
    named: dict[str, Tensor] = {}
    for tensor, together in homes(names, (f"{module}.weight" for module in means)).items():
        rows = [means[name.removesuffix(".weight")] for name in together]
        named[tensor] = rows[0] if place(names, together[0]).expert is None else torch.stack(rows)
    return Imatrix(named, dict.fromkeys(named, ids.numel()), len(ids), ids.shape[1], (dataset,))


def known(path: str | Path, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read the importances of a file, [I] by module name. Raises ValueError where it is malformed, of a model with
    other columns, or knows none of the model's linears."""
    found, config = imatrix.read(path).means, checkpoint.config
    modules = all_compressible(config)
    importances: dict[str, Tensor] = {}
    for module in [*modules, config.names.head]:
        tensor, expert = place(config.names, f"{module}.weight")
        if (mean := found.get(tensor)) is None:
            continue
        columns = config.hidden if module == config.names.head else checkpoint.linear_shape(module)[1]
        count = 1 if expert is None or config.experts is None else config.experts.count
        if mean.numel() != count * columns:
            raise UserError(
                "imatrix_mismatch",
                f"{path}: {tensor.removesuffix('.weight')} has {mean.numel()} columns, and {count * columns} in the "
                "model",
            )
        mean = mean.view(count, columns)[expert or 0]
        importances[module] = mean
    if missing := [module for module in modules if module not in importances]:
        raise UserError(
            "imatrix_mismatch",
            f"{path}: knows nothing of {file_name(config.names, missing[0])}.weight"
            + (f" and {len(missing) - 1} other matrices" if len(missing) > 1 else "")
            + f" of {checkpoint.folder.path}: it was made of another model",
        )
    return importances


def _block(block: Block, inputs: HiddenStates, outputs: HiddenStates, layer: int, shown: Coverage) -> dict[str, Tensor]:
    """Return the mean squares of the inputs of a block's linears, and write the block's outputs."""
    groups = {group[0].name: group for group in input_groups(block)}
    means = {name: ColumnMean(group[0].shape[1], 2, name) for name, group in groups.items()}

    def hook(linear: Linear, x: Tensor) -> None:
        shown.hook(linear, x)
        if linear.name in means:
            means[linear.name].add(x)

    for batch in inputs.batches():
        out = block.run(inputs.read(batch), inputs.step(batch), hook)
        if not out.isfinite().all():
            raise UserError("not_finite", f"the output of block {layer} holds a NaN or an infinity")
        outputs.write(batch, out)
    return {each.name: means[name].value for name, group in groups.items() for each in group}


@dataclass(frozen=True)
class Made:
    """Result of `make`."""

    path: Path
    tokens: int
    matrices: int
    widest: tuple[str, float]  # the matrix whose columns differ most, and its largest importance over its mean
    warnings: tuple[str, ...] = ()  # about too little calibration text

    def to_dict(self) -> dict[str, Any]:
        widest = {"matrix": self.widest[0], "ratio": self.widest[1]}
        return asdict(self) | {"path": str(self.path), "widest": widest, "warnings": list(self.warnings)}


def make(
    src: str | Path,
    dst: str | Path,
    *,
    calibration: Calibration,
    amount: Amount = Amount(),  # noqa: B008
    calib_memory: int = 2 << 30,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Made:
    """Measure the importances of the checkpoint `src` (folder, GGUF file, Hub id or `demo`), and write them to the file
    `dst`. `calibration` is as in `pipeline.compress`. A name that ends in .dat selects the older file form. Raises
    ValueError for anything a user can mend: an existing output, a text that is too short."""
    source, target = hub.resolve(src), Path(dst)
    if not str(dst) or target.is_dir():
        raise UserError("output_invalid", f"{str(dst)!r} is no name of a file to write")
    if target.exists() and not overwrite:
        raise UserError("output_exists", f"{target} exists and is kept; choose another output, or pass --overwrite")
    if not target.parent.is_dir():
        raise UserError("output_invalid", f"{target.parent}: no such folder to write {target.name} into: make it first")
    report = progress or (lambda stage, done, total: None)
    checkpoint = open_dense(source) if is_gguf(source) else Checkpoint.open(source)
    gguf_export.architecture(checkpoint.config)
    tokenizer = texts.tokenizer_for(calibration, source)
    with tempfile.TemporaryDirectory(prefix="attar-", dir=target.absolute().parent) as folder:
        drawn = Path(folder) / "drawn.i32"
        ids = texts.tokens(calibration, checkpoint, tokenizer, amount, drawn, partial(report, "sampling"))
        means = collect(checkpoint, ids, Path(folder), "", calib_memory, report)
        warnings = (
            *coverage.of(checkpoint.config, ids, Path(folder), ""),
            *domain.warnings(domain.surprise(checkpoint, ids, Path(folder)), None),
        )
    named = as_imatrix(
        checkpoint.config.names, means, ids, Path(str(calibration)).name if is_text(calibration) else "self"
    )
    imatrix.write(target, named, overwrite)
    ratios = {name: float(mean.max() / mean.mean().clamp_min(1e-30)) for name, mean in named.means.items()}
    widest = max(ratios, key=lambda name: ratios[name])
    return Made(target, ids.numel(), len(ratios), (widest, ratios[widest]), warnings)
