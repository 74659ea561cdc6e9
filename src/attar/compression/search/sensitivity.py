"""Sensitivity of a model's predictions to compressing some of its linears, which `allocate.py` decides by.

A `Trial` holds the model dense, and every group packed in every candidate scheme. Candidates are rounded by the
recipe's own kind of rounding: GPTQ on Hessians of the original's inputs, or to nearest, with importances where the
block pass has them. The trial swaps groups in and out and measures the mean KL divergence from the original. Hidden
states that enter each block are kept, so that a measurement starts at the block that changed: half a forward pass on
average.

Weights that are not chosen for (the LM head, a packed embedding, overrides) are rounded too, as the recipe has it, in
every measurement of the whole model. A group alone is measured in the model that is otherwise unchanged.

Some calibration sequences make the Hessians, and divergences are measured on the last ones (`apart`). Nothing else
reads those: choices made on them are not fitted to them. Predictions are compared at as many evenly spaced positions as
there is memory for the original's logits. Measurements go to a file as they are made, by which a killed run resumes.
Candidates are rounded anew, unless they are kept for a choice that may follow this one.

Legend: S sequences, L tokens of each, N rows, I hidden size, V vocabulary, P positions, G groups, C schemes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.compression.calibration.hidden_states import HEAD_ROWS, rows_at_once
from attar.compression.groups import input_groups
from attar.compression.outputs.base import Output
from attar.compression.recipe.methods import Gptq, Rtn
from attar.compression.recipe.recipe import naming
from attar.compression.resume import Log, restore, save
from attar.compression.search.target import Choice, Group
from attar.compression.solvers.rounding import gptq, rtn
from attar.compression.solvers.rounding.form_levels import shared_largest
from attar.compression.solvers.rounding.means import ColumnMean
from attar.compression.solvers.transforms import fold
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import ops
from attar.kernels.operands import ActivationHook, Linear
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder, Embedding
from attar.model.layers import Block

MEASURED_TOKENS = 4096  # tokens on which a divergence is measured
HESSIAN_TOKENS = 32768
LOGITS = 1 << 27  # maximal number of logits of the original that are kept
LOGITS_AT_ONCE = 1 << 22

Swap = tuple[Linear, Sequence[PackedTensor]]
"""A linear and its rounded weight, some rows after others."""


def apart(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Split calibration tokens [S, L] in two: the first calibrate; on the last, a third at most, divergences are
    measured. Raises ValueError where there is one sequence."""
    divisible(len(ids))
    count = max(1, min(len(ids) // 3, math.ceil(MEASURED_TOKENS / ids.shape[1])))
    return ids[: len(ids) - count], ids[len(ids) - count :]


def divisible(sequences: int) -> None:
    """Raise ValueError where so few calibration sequences cannot be taken `apart`."""
    if sequences < 2:
        raise UserError(
            "calibration_too_short",
            "a target needs at least 2 calibration sequences: one is to measure on; give more text",
        )


@dataclass(frozen=True, eq=False)
class Experiment:
    """The subject of measurements: groups of linears, each rounded to every candidate scheme. Hessians are of
    calibration tokens `ids` [S, L], divergences of those `measured` [T, L]. `output` is how all other tensors are
    stored, None: unchanged; `weighs`, whether importances are measured, for an output that is given none."""

    groups: Sequence[Group]
    candidates: Sequence[Scheme]
    rounding: Gptq | Rtn
    ids: Tensor
    measured: Tensor
    output: Output | None = None
    weighs: bool = False

    def fingerprint(self, decoder: Decoder) -> str:
        """Return a hash of all that measurements depend on. A weighted sum of each matrix is enough to tell models
        apart; the plain sums of two rotations of one matrix are nearly the same."""
        names = (
            [(scheme.name, scheme.scale_dtype) for scheme in self.candidates],
            [group.linears for group in self.groups],
        )
        sizes = MEASURED_TOKENS, HESSIAN_TOKENS, LOGITS, list(self.ids.shape), list(self.measured.shape)
        machine = str(torch.__version__), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
        schemes = {} if self.output is None else self.output.schemes
        stored = {name: scheme.name for name, scheme in schemes.items() if scheme is not None}
        digest = hashlib.sha256(json.dumps([names, sizes, repr(self.rounding), machine, stored, self.weighs]).encode())
        for name, mean in () if self.output is None else self.output.importances.items():
            digest.update(name.encode() + mean.numpy().tobytes())
        digest.update(torch.cat((self.ids, self.measured)).to(torch.int32).numpy().tobytes())
        for block in decoder.blocks:
            for linear in block.linears():
                weight = fold.dense_weight(linear).double()
                weights = torch.arange(weight.shape[1], dtype=torch.float64).cos()
                digest.update(repr(float((weight @ weights).sum())).encode())
        return digest.hexdigest()


class Trial:
    """A dense model with some groups compressed. Between calls its weights are unchanged."""

    def __init__(
        self,
        decoder: Decoder,
        experiment: Experiment,
        log: Log,
        told: Callable[[], None],
        keeps: bool = False,
        original: Callable[[], Decoder] | None = None,
    ) -> None:
        """Prepare the trial. `told` is called after each measurement. `keeps`: whether candidates stay beside the log
        for another trial. `original` loads the model that divergences are from, where that is not `decoder`: a rotated
        model has tables that were rounded once more."""
        ids, measured, rounding = experiment.ids, experiment.measured, experiment.rounding
        self.groups, self.candidates = tuple(experiment.groups), tuple(experiment.candidates)
        self._output, self._weighs, self._keeps = experiment.output, experiment.weighs, keeps
        self._importances = {} if self._output is None else dict(self._output.importances)
        self._decoder, self._rounding, self._log, self._told = decoder, rounding, log, told
        self._length = ids.shape[1]
        self._rest = ids[: max(1, HESSIAN_TOKENS // self._length)]
        self._batch = self._length * max(1, rows_at_once(decoder.config) // self._length)  # rows of one call
        self.tokens = measured.numel()
        positions = min(self.tokens, max(1, LOGITS // decoder.config.vocab_size))
        self._rows = torch.arange(positions) * self.tokens // positions
        self._linears = {linear.name: linear for block in decoder.blocks for linear in block.linears()}
        chosen = {name for group in self.groups for name in group.linears}
        schemes = {} if self._output is None else self._output.schemes
        self._decided = {
            name: scheme
            for name, scheme in schemes.items()
            if scheme is not None and name in self._linears and name not in chosen
        }
        self._packed: dict[tuple[int, int], list[PackedTensor]] = {}
        self._fixed: list[Swap] = []  # weights that are rounded whatever is chosen
        self._ids = measured
        self._original = [self._embedded(measured)]  # inputs of each block
        self._entered = self._original[0]  # inputs of the first, as stored
        last = self._run(self._original[0], 0, self._original)
        if original is not None:
            self._decoder = original()
            last = self._run(self._embedded(measured), 0)
        with torch.inference_mode():
            self._base = self._decoder.logits(last[self._rows]).log_softmax(-1)  # [P, V]
        self._decoder = decoder

    # --- measurements -------------------------------------------------------------------------------------------------

    def alone(self) -> tuple[tuple[float, ...], ...]:
        """Return the divergence with each group alone in each scheme, [G][C]. To be called first: it rounds the
        candidates."""
        states, at = self._embedded(self._rest), 0  # `at` is the block that `states` enter
        rows = []
        for layer in range(len(self._decoder.blocks)):
            mine = [g for g, group in enumerate(self.groups) if group.layer == layer]
            if not self._known(layer, mine):  # known blocks run only to reach one that is not
                states, at = self._candidates(layer, mine, self._run(states, at, stop=layer)), layer + 1
            for g in mine:
                plans = range(len(self.candidates))
                found = (self._measured(f"{g}:{c}", self._swaps({g: c}), self._original, layer) for c in plans)
                rows.append(tuple(found))
        self._round_ends(self._run(states, at) if self._weighs else states)
        return tuple(rows)

    def whole(self, choice: Choice) -> float:
        """Return the divergence with every group as chosen, and all else as the recipe has it."""
        return self._measured(_key(choice), [*self._swaps(dict(enumerate(choice))), *self._fixed], [self._entered], 0)

    def neighbours(self, choice: Choice) -> list[dict[int, float]]:
        """Return, for each group, the divergence of the whole with it one scheme up and one down, by index of the
        candidates."""
        states = [self._entered]
        found: list[dict[int, float]] = []
        with self._with([*self._swaps(dict(enumerate(choice))), *self._fixed]):
            for g, chosen in enumerate(choice):
                found.append({})
                for other in (chosen - 1, chosen + 1):
                    if 0 <= other < len(self.candidates):
                        key = _key((*choice[:g], other, *choice[g + 1 :]))
                        if self._log.get(key) is None and len(states) == 1:
                            self._run(states[0], 0, states)
                        found[-1][other] = self._measured(key, self._swaps({g: other}), states, self.groups[g].layer)
        return found

    def _measured(self, key: str, swaps: Sequence[Swap], states: Sequence[Tensor], first: int) -> float:
        """Return the divergence with `swaps`, from the log or from a pass that starts at block `first`, the first that
        they change. `states` are the inputs of the blocks without them."""
        value: float | None = self._log.get(key)
        if value is None:
            with self._with(swaps):
                value = self._divergence(self._run(states[first], first))
            self._log.put(key, value)
        self._told()
        return value

    @torch.inference_mode()
    def _divergence(self, states: Tensor) -> float:
        """Return the mean KL(original || this) in nats over the positions, given the last states [N, I]."""
        total, at_once = 0.0, max(1, LOGITS_AT_ONCE // self._base.shape[1])
        for base, rows in zip(self._base.split(at_once), self._rows.split(at_once), strict=True):
            log_q = self._decoder.logits(states[rows]).log_softmax(-1)
            total += float((base.exp() * (base - log_q)).sum(-1).double().sum())
        if not math.isfinite(total):
            raise UserError(
                "not_finite", "with a group compressed the model's predictions are not finite: leave 2 bits out"
            )
        return max(total / len(self._rows), 0.0)  # float32 may end just below

    # --- forward passes -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _embedded(self, ids: Tensor, embedding: Embedding | None = None) -> Tensor:
        """Return the inputs of the first block, [N, I]."""
        step = ForwardBatch((self._length,) * len(ids), self._length)
        return (embedding or self._decoder.embedding).forward(ids.reshape(-1), step.positions).float()

    def _run(self, states: Tensor, first: int, kept: list[Tensor] | None = None, stop: int | None = None) -> Tensor:
        """Run the blocks from `first` on, to `stop` or the last; return the last states [N, I]. `kept` receives the
        output of each block."""
        for block in self._decoder.blocks[first:stop]:
            states = self._through(block, states)
            if kept is not None:
                kept.append(states)
        return states

    @torch.inference_mode()
    def _through(self, block: Block, states: Tensor, hook: ActivationHook | None = None) -> Tensor:
        parts = states.split(self._batch)
        steps = (ForwardBatch((self._length,) * (len(part) // self._length), self._length) for part in parts)
        return torch.cat([block.run(part, step, hook) for part, step in zip(parts, steps, strict=True)])

    def _swaps(self, changes: Mapping[int, int]) -> list[Swap]:
        """Return the swaps of the groups (keys) to candidate schemes (values)."""
        return [
            (self._linears[name], (packed,))
            for g, c in changes.items()
            for name, packed in zip(self.groups[g].linears, self._packed[g, c], strict=True)
        ]

    @contextmanager
    def _with(self, swaps: Sequence[Swap]) -> Iterator[None]:
        """Install the swapped weights while the context lasts."""
        before = [(linear, linear.weight) for linear, _ in swaps]
        try:
            for linear, pieces in swaps:
                dense = [piece.dequantize() for piece in pieces]
                linear.weight = dense[0] if len(dense) == 1 else torch.cat(dense)
            yield
        finally:
            for linear, weight in before:
                linear.weight = weight

    # --- candidates ---------------------------------------------------------------------------------------------------

    def _wanted(self, layer: int, mine: Sequence[int]) -> dict[str, tuple[Scheme, ...]]:
        """Return the schemes to round the linears of a block to: every candidate for its groups, the override's
        own for other linears."""
        linears = self._decoder.blocks[layer].linears()
        wanted = {name: self.candidates for g in mine for name in self.groups[g].linears}
        return wanted | {each.name: (self._decided[each.name],) for each in linears if each.name in self._decided}

    def _known(self, layer: int, mine: Sequence[int]) -> bool:
        """Load the candidates of a block that an earlier trial kept; return False where none did."""
        if not self._keeps or not (kept := self._log.folder / f"block-{layer}").is_dir():
            return False
        parts = restore(kept)[1]

        def packed(name: str, c: int, scheme: Scheme) -> PackedTensor:
            shape = self._linears[name].shape
            return PackedTensor(scheme, shape, {part: parts[f"{name}.{c}.{part}"] for part in scheme.parts(shape)})

        wanted = self._wanted(layer, mine).items()
        self._take(mine, {name: [packed(name, c, each) for c, each in enumerate(row)] for name, row in wanted})
        return True

    def _keep(self, layer: int, made: Mapping[str, Sequence[PackedTensor]]) -> None:
        """Write the candidates of a block for another trial."""
        self._log.folder.mkdir(exist_ok=True)
        packed = {f"{name}.{c}": each for name, row in made.items() for c, each in enumerate(row)}
        parts = {f"{name}.{part}": tensor for name, each in packed.items() for part, tensor in each.parts.items()}
        save(self._log.folder / f"block-{layer}", {}, parts)

    def _take(self, mine: Sequence[int], made: Mapping[str, list[PackedTensor]]) -> None:
        """Store the candidates of a block, by linear in the order of `_wanted`."""
        for g in mine:
            for c in range(len(self.candidates)):
                self._packed[g, c] = [made[name][c] for name in self.groups[g].linears]
        self._fixed += [(self._linears[name], made[name]) for name in made if name in self._decided]

    @torch.inference_mode()
    def _candidates(self, layer: int, mine: Sequence[int], states: Tensor) -> Tensor:
        """Round the linears of a block with inputs `states`; return the inputs of the next one."""
        block, wanted = self._decoder.blocks[layer], self._wanted(layer, mine)
        shared = [[each for each in linears if each.name in wanted] for linears in input_groups(block)]
        shared = [linears for linears in shared if linears]
        hessians: dict[str, gptq.Hessian] = {}
        means: dict[str, ColumnMean] = {}
        for linears in shared:
            name, columns = linears[0].name, linears[0].shape[1]
            if isinstance(self._rounding, Gptq):
                hessians[name] = gptq.Hessian(columns)
            elif self._weighs:
                means[name] = ColumnMean(columns, 2, name)

        def hook(linear: Linear, x: Tensor) -> None:
            for each in (hessians.get(linear.name), means.get(linear.name)):
                if each is not None:
                    each.add(x)

        states = self._through(block, states, hook if hessians or means else None)
        made: dict[str, list[PackedTensor]] = {}
        for linears in shared:
            name = linears[0].name
            with naming(name):
                prepared = self._prepared(hessians.pop(name, None))
                if name in means and means[name].tokens:
                    self._importances |= {linear.name: means[name].value for linear in linears}
                for linear in linears:
                    made[linear.name] = []
                    for scheme in wanted[linear.name]:
                        alike = [(each, scheme) for each in linears if scheme in wanted[each.name]]
                        largest = shared_largest([alike]).get(linear.name)
                        made[linear.name].append(self._rounded(linear, scheme, prepared, largest))
        self._take(mine, made)
        if self._keeps and made:
            self._keep(layer, made)
        return states

    def _prepared(self, hessian: gptq.Hessian | None) -> gptq.Prepared | None:
        if hessian is None or not isinstance(self._rounding, Gptq):
            return None
        if not hessian.tokens and self._decoder.config.experts is not None:
            hessian.mean.fill_diagonal_(1.0)  # an expert that received no token has its weights alone
        return gptq.prepare(hessian, self._rounding.damping, self._rounding.order)

    def _rounded(
        self, linear: Linear, scheme: Scheme, prepared: gptq.Prepared | None, largest: Tensor | None
    ) -> PackedTensor:
        rounding, weight = self._rounding, _as_stored(fold.dense_weight(linear), scheme)
        importance = self._importances.get(linear.name)
        if prepared is None or not isinstance(rounding, Gptq):
            return rtn.solve(weight, scheme, scale_search=rounding.scale_search, importance=importance, largest=largest)
        plain = replace(rounding, polish=0)
        found = gptq.solve(weight, prepared, scheme, plain, largest=largest, importance=importance).packed
        assert isinstance(found, PackedTensor)
        return found

    @torch.inference_mode()
    def _round_ends(self, states: Tensor) -> None:
        """Round embedding and LM head as the output stores them. `states` are the last states on calibration text,
        where importances are measured."""
        output, decoder = self._output, self._decoder
        if output is None:
            return
        if self._weighs:
            mean = ColumnMean(decoder.config.hidden, 2, decoder.head.name)
            for part in states.split(self._batch):
                mean.add(ops.norm(part, None, decoder.final_norm)[1])
            self._importances[decoder.config.names.head] = mean.value
        output = output.weighing(self._importances)
        if output.head is not None:
            whole = _as_stored(fold.dense_weight(decoder.head), output.head)
            self._fixed.append((decoder.head, [output.round_head(rows) for rows in whole.split(HEAD_ROWS)]))
        table = decoder.embedding.table
        assert isinstance(table, Tensor)
        used, places = torch.unique(self._ids, return_inverse=True)
        rows = table[used] if output.head is None else _as_stored(table[used], output.head)
        if (rounded := output.round_embedding(rows)) is not None:
            self._entered = self._embedded(places, replace(decoder.embedding, table=rounded.dequantize()))


def _as_stored(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return a weight in the stored dtype of a checkpoint, which scales have too, and in which some codecs compute. A
    weight of another dtype, because a rotation made it, is returned unchanged."""
    stored = weight.to(getattr(torch, scheme.scale_dtype))
    return stored if torch.equal(stored.to(weight.dtype), weight) else weight


def _key(choice: Choice) -> str:
    return ",".join(map(str, choice))
