"""The gradient of a model's loss at every product, block by block from the last to the first, one in memory.

Rounding that knows the loss weighs an error of a linear's output by its effect on the loss. For that it needs, of every
token, the rows x [N, I] that a linear reads and the gradient g [N, O] at its output. A forward pass keeps the inputs of
each block in files (`HiddenStates`). The loss is taken at the LM head. Then each block, from the last to the first,
runs again on its inputs with gradients recorded. It is differentiated from the gradient at its output to the one at its
input, which is the output gradient of the block before. So memory is one block and the graph of one forward call,
whatever the depth; time is that of two forward passes and a backward one.

The loss is the sum over positions of -log p(label), in nats, not a mean: g does not depend on how much text there is.
Labels are *sampled* from the model's own prediction, one a position, from counters of (seed, sequence). The mean of g
g^T is then the Fisher matrix, which is the Hessian of KL(model || changed model), the measure of compression. With the
text's next tokens as labels it is the "empirical Fisher", which is something else (Kunstner et al. 2019) and is there
to compare; the last position of a sequence then has no label.

Everything is float32, on the reference path. Not done: keeping fewer states and running several blocks again (the disk
is cheaper than the time); gradients of weights, which are g^T x, the watcher's to sum.

Legend: S sequences, L tokens of each, N rows of one call (whole sequences, one after another, but for the rows that a
router chose), I input and O output columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.writer import allocated, require_free
from attar.compression import device_placement
from attar.compression.calibration import hidden_states
from attar.compression.calibration.hidden_states import HiddenStates, rows_at_once
from attar.compression.calibration.image_rows import ImageRows
from attar.errors import UserError
from attar.metrics.perplexity import in_rows
from attar.model import decoder
from attar.model.assembly import build_block, build_ends, build_final_norm
from attar.model.layers import Block
from attar.progress import Progress

Watchers = Mapping[str, Callable[[Tensor, Tensor], None]]
"""Callbacks by the name of a linear of a block: each receives the rows [N, I] that it reads and the gradient [N, O] at
its output. Both tensors are only lent: copy them to keep them."""

LOGITS_AT_ONCE = 1 << 22
NO_LABEL = -100


def walk(
    source: Checkpoint,
    ids: Tensor,
    folder: Path,
    watch: Callable[[int, Block], Watchers],
    done: Callable[[int], None] = lambda layer: None,
    *,
    memory: int = 2 << 30,
    seed: int | None = 0,
    progress: Progress | None = None,
    images: ImageRows | None = None,
) -> float:
    """Pass the gradients of all blocks on token ids [S, L] to watchers; return the mean loss of a label, in nats.

    For each block, from the last to the first, `watch(layer, block)` names the watchers, which then receive one call
    after another, in a deterministic order. After the last call, `done(layer)` is called. `folder` takes (layers + 2) x
    S x L x hidden float32 during the walk; at most `memory` bytes of it are held in memory as well. Labels are sampled
    by `seed`; None: they are the text's next tokens. The last sequences may have rows of `images`. May be called where
    inference mode is on.

    Raises ValueError where the disk is too small, where no position has a label, and, naming the position, where a loss
    or a gradient is not finite.
    """
    report = progress or (lambda stage, done, total: None)
    config, shape = source.config, (*ids.shape, source.config.hidden)
    had = allocated(folder.glob("gradient-*.f32"))  # files of a killed run, which are used again
    require_free(folder, 4 * (config.layers + 2) * ids.numel() * config.hidden - had)
    with (
        torch.inference_mode(False),
        _states(folder, shape, config.layers + 2, memory, rows_at_once(config), images) as states,
    ):
        *inputs, gradient = states
        through(source, ids, inputs, lambda blocks: report("states", blocks, config.layers), images)
        loss = _at_head(source, ids, inputs[-1], gradient, seed, report)
        for done_blocks, layer in enumerate(reversed(range(config.layers)), 1):
            block = build_block(config, source, layer)
            watchers = watch(layer, block)
            for linear in block.linears():
                linear.keep_dense = False
                linear.on_gradient = watchers.get(linear.name)
            _through_block(layer, block, inputs[layer], gradient)
            done(layer)
            report("gradients", done_blocks, config.layers)
    return loss


@contextmanager
def _states(
    folder: Path, shape: tuple[int, int, int], count: int, memory: int, rows: int, images: ImageRows | None
) -> Iterator[list[HiddenStates]]:
    """Yield files of hidden states that last as long as the context."""
    paths = [folder / f"gradient-{i}.f32" for i in range(count)]
    made: list[HiddenStates] = []
    try:
        for path in paths:
            places = None if images is None else images.places(shape[0])
            made.append(HiddenStates(path, shape, memory // count, rows, places=places))
        yield made
    finally:
        for each in made:
            each.close()
        for path in paths:
            path.unlink(missing_ok=True)


@torch.no_grad()
def advance(source: Checkpoint, layer: int, here: HiddenStates, there: HiddenStates) -> None:
    """Run block `layer` on the states `here` and write its outputs to `there`, which may be the same object."""
    block = build_block(source.config, source, layer)
    device_placement.move(block, torch.device(here.device))
    for linear in block.linears():
        linear.keep_dense = False
    for batch in here.batches():
        there.write(batch, block.run(here.read(batch), here.step(batch)))


def through(
    source: Checkpoint, ids: Tensor, states: Sequence[HiddenStates], done: Callable[[int], None] = lambda blocks: None,
    images: ImageRows | None = None,
) -> None:  # fmt: skip
    """Fill `states` with the inputs of each block and, last, of the final norm on token ids [S, L]. They may all be one
    object, which then holds the last. `done` receives the number of blocks so far."""
    hidden_states.embed(source, ids, states[0], images=images)
    for layer in range(source.config.layers):
        advance(source, layer, states[layer], states[layer + 1])
        done(layer + 1)


@torch.enable_grad()
def _at_head(
    source: Checkpoint, ids: Tensor, final: HiddenStates, gradient: HiddenStates, seed: int | None, report: Progress
) -> float:
    """Write the gradient at the final norm's input; return the mean loss."""
    config, length = source.config, ids.shape[1]
    norm, head = build_final_norm(config, source), build_ends(config, source)[1]
    head.keep_dense = False
    at_once, total, count = max(1, LOGITS_AT_ONCE // config.vocab_size), 0.0, 0
    following = F.pad(ids[:, 1:], (0, 1), value=NO_LABEL)
    for batch in final.batches():
        noise = torch.from_numpy(np.concatenate([uniforms(seed or 0, s, length) for s in batch]))
        wanted = following[batch.start : batch.stop].reshape(-1)
        parts, slopes = (each.split(at_once) for each in (final.read(batch), noise)), []
        for rows, draws, texts in zip(*parts, wanted.split(at_once), strict=True):
            rows = rows.detach().requires_grad_()
            logits = decoder.logits(config, norm, head, rows)
            chosen = texts if seed is None else draw(logits.detach(), draws)
            loss = F.cross_entropy(logits, chosen, ignore_index=NO_LABEL, reduction="sum")
            slopes.append(torch.autograd.grad(loss, rows)[0])
            total += float(loss.detach())
            count += int((chosen != NO_LABEL).sum())
        found = torch.cat(slopes)
        if not found.isfinite().all():
            raise UserError("not_finite", "the gradient of the loss at the LM head holds a NaN or an infinity")
        gradient.write(batch, found)
        report("loss", batch.stop, ids.shape[0])
    if not count:
        raise UserError("calibration_too_short", "sequences of one token have no next token to learn from")
    return total / count


@torch.enable_grad()
def _through_block(layer: int, block: Block, inputs: HiddenStates, gradient: HiddenStates) -> None:
    """Replace the gradient at the block's output by the one at its input, and pass it to the watchers on the way."""
    for batch in inputs.batches():
        rows = inputs.read(batch).detach().requires_grad_()
        (found,) = torch.autograd.grad(block.run(rows, inputs.step(batch)), rows, gradient.read(batch))
        if not found.isfinite().all():
            raise UserError("not_finite", f"the gradient at the input of block {layer} holds a NaN or an infinity")
        gradient.write(batch, found)


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Sample one token a row from the softmax of logits [N, V], by `noise` [N] in [0, 1), float64; return int64 [N]."""
    drawn = []
    for rows, numbers in zip(runs := in_rows(logits), noise.split([len(run) for run in runs]), strict=True):
        cumulative = rows.double().softmax(-1).cumsum(-1)
        drawn.append(torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)[:, 0])
    return torch.cat(drawn).clamp(max=logits.shape[1] - 1)


def uniforms(seed: int, sequence: int, count: int, counter: int = 1) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return `count` numbers in [0, 1) of stream (seed, sequence): the top 53 bits of Philox words, which are fixed.
    Labels have a range of the `counter` beyond that of text sampled from the model by the same seed
    (`texts.sample_from`): they would otherwise be that very text."""
    stream = np.random.Philox(key=np.array([seed, sequence], dtype=np.uint64), counter=np.array([0, 0, counter, 0]))
    return (np.asarray(stream.random_raw(count)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
