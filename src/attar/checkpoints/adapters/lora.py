"""Low-rank adapters (LoRA, Hu et al. 2021) in PEFT's format, read onto a model; `merge.py` merges them into one.

A folder holds adapter_config.json and adapter_model.safetensors. For each linear that it changes, the latter has
`base_model.model.<module>.lora_A.weight` [r, I] and `...lora_B.weight` [O, r], and the linear computes

    y = x' W^T + b + (alpha / r) (x A^T) B^T        (alpha / sqrt(r) for rank-stabilised LoRA, Kalajdzievski 2023).

x' may be rounded, permuted or divided, as the stored W needs. The adapter reads the plain x that it was trained on
(after the rotation, where the linear rotates its inputs at run time). So compressed bases work, and W stays as it is:
an adapter applies to every row (`attach`), or under a number to the rows that ask for it (`install`), beside others.
This fails where a recipe moved scales from norms into weights, or rotated the residual stream. The base then computes
the same with an x that the adapter was not trained on, unless it was trained on that very base (`doubt`).

Every process of a model in several reads the whole adapter, because the first must find any mistake before the others
receive it. It keeps the part that belongs to its linears (`parallel.cut_adapter`).

A partly read adapter gives a model that runs and answers otherwise than trained. So every tensor must have its place,
every pair must be whole, and every key of the config that changes the computation must be known here. DoRA, trained
biases or embeddings, activated and quantization-aware adapters are refused by name. PEFT also saves matrices of the
base: those of `modules_to_save`, and the embedding and LM head where one is a target. Such a copy is accepted where it
equals the base's own, so that it changes nothing. Header and config are checked, and the adapter's memory is known
(`Outline`), before any value is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoints.adapters import base_copies
from attar.checkpoints.folder import read_config, read_json
from attar.checkpoints.patterns import Patterns
from attar.checkpoints.receipts import receipt
from attar.checkpoints.safetensors import TensorFile
from attar.checkpoints.strict_io import CheckpointError, near
from attar.kernels import ops
from attar.kernels.operands import Adapter, Linear, PreparedAdapter
from attar.model.config import ModelConfig, Names
from attar.model.decoder import Decoder
from attar.model.parallel import SplitDecoder, cut_adapter
from attar.model.split import Cut, Share, split
from attar.plan.costs import matrices

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "attar_base.json"
"""A file beside them in which `finetune` identifies the base."""
STILL = ("clip",)
"""Passes before a recipe's last that leave the inputs of linears as in the original."""
MAX_CONFIG = 1_000_000
MAX_RANK = 512
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
KNOWN = frozenset(
    (
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
        "ensure_weight_tying", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
        "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "megatron_config",
        "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
        "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
    )
)  # fmt: skip
"""Keys of adapter_config.json that are read here, or do not affect what a trained adapter computes. Any other key is
refused unless it is empty or false."""


FLOATS = ("float32", "float16", "bfloat16", "float64")
LANES = 16  # rows stored together in the kernels' layout
WHOLE = Share()


@dataclass(frozen=True, slots=True)
class Pair:
    """The two tensors of a linear's adapter by their names in the file, its rank, and the factor of B A."""

    down: str
    up: str
    rank: int
    scale: float


@dataclass(frozen=True)
class Outline:
    """Description of an adapter, from its config and header alone; `pairs` by the name of the linear that each
    changes."""

    path: Path
    pairs: Mapping[str, Pair]
    copies: Mapping[str, str]
    """Tensors that are none of a pair, with the names of the base's tensors that they should equal."""

    def weight_bytes(self, shapes: Mapping[str, tuple[int, int]]) -> int:
        """Return the bytes of its matrices in memory, in the layout of the CPU kernels, for linears of `shapes`
        (O, I)."""
        return sum(_laid_out(pair.rank, shapes[name]) for name, pair in self._of(shapes))

    def step_bytes(self, shapes: Mapping[str, tuple[int, int]], rows: int) -> int:
        """Return the most bytes that a product with it takes besides: gathered rows, intermediates between A and B,
        sums."""
        each = (shapes[name][1] + pair.rank + 2 * shapes[name][0] for name, pair in self._of(shapes))
        return 4 * rows * max(each, default=0)

    def _of(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Pair]]:
        return ((name, pair) for name, pair in self.pairs.items() if name in shapes)


def _laid_out(rank: int, shape: tuple[int, int]) -> int:
    rows, columns = shape
    return 4 * (-(-rank // LANES) * LANES * columns + -(-rows // LANES) * LANES * rank)


def memory(folders: Sequence[Path], config: ModelConfig, rows: int, whole: Share = WHOLE) -> int:
    """Return the bytes that adapters take beside a model of `config`, with their products in steps of `rows` tokens, by
    their headers.

    Where `whole.count` processes share the model, this is the largest of all processes. Raises CheckpointError as
    `outline` does, and ValueError where the model cannot be split so.
    """
    shapes = _whole(config)
    found = [outline(folder, config.names, shapes) for folder in folders]
    return max(_memory(found, config, rows, share) for share in whole.every()) if found else 0


def _memory(found: Sequence[Outline], config: ModelConfig, rows: int, share: Share) -> int:
    """Return the bytes in one process. The split of the vocabulary also depends on the LM head's storage; by a few
    rows."""
    part, names = split(config, share, {}), config.names
    layers = tuple(f"{names.layer.format(i=i)}." for i in part.layers)
    shapes = {
        name: part.cuts.get(name, Cut()).shape(shape)
        for name, shape in _whole(config).items()
        if name.startswith(layers) or (name == names.head and part.vocabulary is not None)
    }
    step = max(each.step_bytes(shapes, rows) for each in found)
    if config.gated:
        step += 12 * rows * part.block.intermediate  # gate and up are no longer one call
    return sum(each.weight_bytes(shapes) for each in found) + step


def _whole(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return [O, I] of every linear of a model by name."""
    return {each.name: (each.rows, each.columns) for each in matrices(config)}


@dataclass(frozen=True, eq=False)
class Lora:
    """Matrices of an adapter by the name of the linear that each changes."""

    path: Path
    adapters: Mapping[str, Adapter]


def outline(path: Path, names: Names, shapes: Mapping[str, tuple[int, int]]) -> Outline:
    """Return the outline of the adapter folder `path`, for a model whose linears, by name, have `shapes` (O, I).

    Raises CheckpointError where it is no LoRA adapter, uses an unknown feature, has a tensor without a place, half a
    pair, or one of another shape, rank or kind.
    """
    with closing(_open(path)) as file:
        return _outline(path, file, names, shapes)


def _open(path: Path) -> TensorFile:
    if not (path / WEIGHTS).exists() and (path / "adapter_model.bin").exists():
        raise CheckpointError(
            "file_unsafe", f"{path}: adapter_model.bin is a pickle, which is not read: have PEFT save safetensors"
        )
    return TensorFile(path / WEIGHTS)


def _outline(path: Path, file: TensorFile, names: Names, shapes: Mapping[str, tuple[int, int]]) -> Outline:
    config = read_config(path / CONFIG)
    _check(config, path)
    modules = {spelling: name for name in shapes for spelling in names.spellings(name)}
    halves: dict[str, dict[str, str]] = {}
    copies: dict[str, str] = {}
    for tensor in file.names():
        half = next((end for end in (DOWN, UP) if tensor.endswith(end)), None)
        module = tensor.removeprefix(PREFIX)
        if not tensor.startswith(PREFIX) or (half is None and not module.endswith((".weight", ".bias"))):
            raise file.error("adapter_invalid", f"tensor {tensor!r} is neither the A nor the B of a linear's LoRA")
        if half is None:
            copies[tensor] = base_copies.name_in_base(module)
            continue
        module = module.removesuffix(half)
        if module not in modules:
            raise file.error("adapter_mismatch", f"the model has no linear {module!r}{near(module, modules)}")
        part = file.info(tensor)
        if part.dtype not in FLOATS or len(part.shape) != 2:
            raise file.error("adapter_invalid", f"tensor {tensor!r} is {part.dtype} {list(part.shape)}, not a matrix")
        pair = halves.setdefault(modules[module], {})
        if half in pair:
            raise file.error("adapter_invalid", f"holds {half.removeprefix('.')} of {modules[module]} twice")
        pair[half] = tensor
    if not halves:
        raise file.error("adapter_invalid", "holds no adapter")
    alphas = _Patterned(config, "alpha_pattern", "lora_alpha", path)
    ranks = _Patterned(config, "rank_pattern", "r", path)
    pairs = {}
    for name, pair in halves.items():
        if len(pair) < 2:
            raise file.error("adapter_invalid", f"{name} has only one of lora_A and lora_B")
        rank = ranks.of(name)
        if rank > MAX_RANK or rank != int(rank):
            raise CheckpointError(
                "adapter_invalid", f"{path / CONFIG}: a rank of {rank:g} for {name}: they are 1 to {MAX_RANK}"
            )
        down, up = file.info(pair[DOWN]).shape, file.info(pair[UP]).shape
        if down != (rank, shapes[name][1]) or up != (shapes[name][0], rank):
            raise file.error(
                "adapter_mismatch",
                f"{name} is {list(shapes[name])} and its rank {rank:g}, which A {list(down)} and "
                f"B {list(up)} do not fit",
            )
        scale = alphas.of(name) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pairs[name] = Pair(pair[DOWN], pair[UP], int(rank), scale)
    return Outline(path, pairs, copies)


def read(path: Path, names: Names, shapes: Mapping[str, tuple[int, int]], base: Path | None = None) -> Lora:
    """Read the adapter folder `path` for the model `base`, whose linears, by name, have `shapes` (O, I); in float32.

    Raises CheckpointError as `outline` does, for a value that is not finite, and for a tensor of the base itself that
    does not equal the base's, or cannot be compared because no `base` is given.
    """
    with closing(_open(path)) as file:
        found = _outline(path, file, names, shapes)
        if found.copies:
            base_copies.check(file, found.copies, base)
        adapters = {
            name: Adapter(_finite(file, pair.down), _finite(file, pair.up, pair.scale))
            for name, pair in found.pairs.items()
        }
    return Lora(path, adapters)


def _finite(file: TensorFile, tensor: str, scale: float = 1.0) -> Tensor:
    value = file.read(tensor).float() * scale
    if not value.isfinite().all():
        raise file.error("not_finite", f"tensor {tensor!r} holds a NaN or an infinity")
    return value


BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it was. Others take the adapter's initial values from it."""


def _check(config: Mapping[str, Any], path: Path) -> None:
    def refused(what: str) -> CheckpointError:
        return CheckpointError("feature_unsupported", f"{path / CONFIG}: {what}")

    if config.get("peft_type") != "LORA":
        raise refused(f"peft_type is {config.get('peft_type')!r}: only LORA is supported")
    if config.get("bias", "none") != "none":
        raise refused(f"bias is {config['bias']!r}: trained biases are not supported")
    if (beginning := config.get("init_lora_weights", True)) not in BEGINNINGS:
        raise refused(
            f"init_lora_weights is {beginning!r}, which changes the base: have PEFT convert the adapter when it saves "
            "it (path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key not in KNOWN and value:
            raise refused(f"{key} is set, which changes what is computed and is not supported")


class _Patterned:
    """A number of the config for each module: its pattern's, or else the general one."""

    def __init__(self, config: Mapping[str, Any], patterns: str, general: str, path: Path) -> None:
        where = f"{path / CONFIG}"
        found = config.get(patterns) or {}
        if not isinstance(found, dict):
            raise CheckpointError("adapter_invalid", f"{where}: {patterns} must be an object")
        self._general = _positive(config.get(general), f"{where}: {general}")
        compiled = Patterns()
        self._patterns: list[tuple[re.Pattern[str], float]] = [
            (compiled.compile(key, f"{where}: {patterns}"), _positive(value, f"{where}: {patterns}"))
            for key, value in found.items()
        ]

    def of(self, module: str) -> float:
        """Return the value of the first pattern that matches the module's name from some dot on to its end, else the
        general one."""
        ends = [module, *(module[m.end() :] for m in re.finditer(r"\.", module))]
        return next((value for key, value in self._patterns if any(map(key.fullmatch, ends))), self._general)


def _positive(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise CheckpointError("adapter_invalid", f"{where} must be a positive number, not {value!r}")
    return value


def linears_of(decoder: Decoder) -> Iterator[Linear]:
    """Yield every linear of a model in this process, the LM head last."""
    for block in decoder.blocks:
        yield from block.linears()
    if not isinstance(decoder, SplitDecoder) or decoder.split.vocabulary is not None:
        yield decoder.head


def doubt(adapter: Path, base: Path) -> str | None:
    """Return why an adapter may not fit a base, as a sentence; None without a known reason.

    Raises CheckpointError where the base's receipt or its config.json is damaged.
    """
    made = receipt.read_receipt(base)
    said = None if made is None else made.value["recipe"]
    recipe: Mapping[str, Any] = said if isinstance(said, dict) else {}
    passes = recipe.get("passes")
    methods = [each.get("method") for each in passes if isinstance(each, dict)] if isinstance(passes, list) else []
    moved = [each for each in methods[:-1] if each not in STILL]  # the last pass chooses codes, and moves nothing
    moved += ["rotate"] if recipe.get("rotate") else []
    if made is None and base.is_dir():
        quantization = read_config(base / "config.json").get("quantization_config")
        moved = ["awq"] if isinstance(quantization, dict) and quantization.get("quant_method") == "awq" else []
    if not moved or not set(trained_on(adapter)).isdisjoint(receipt.known(base)):
        return None
    return (
        f"{base} was made with {moved[0]}, after which its linears read other numbers than the original's: an adapter "
        "that was trained on the original does not fit it; train it on this folder, or take one made with gptq"
    )


def trained_on(adapter: Path) -> list[str]:
    """Return the `receipt.known` of its base that was recorded at training; empty where there is none."""
    if not (adapter / BASE).is_file():
        return []
    found = read_json(adapter / BASE, MAX_CONFIG).get("receipts")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def attach(decoder: Decoder, path: Path, base: Path | None = None) -> Lora:
    """Read an adapter and apply it to every row of the model; the weights stay as they are. It replaces an earlier one.

    `base` is the model's folder or file. Raises CheckpointError as `read` does.
    """
    return _put(decoder, 0, path, base)


def install(decoder: Decoder, number: int, path: Path, base: Path | None = None) -> Lora:
    """Read an adapter for the rows of a step that ask for `number`, which is 1 or more.

    `base` is the model's folder or file. Raises CheckpointError as `read` does.
    """
    assert number > 0, "0 is for rows without an adapter"
    return _put(decoder, number, path, base)


def _put(decoder: Decoder, number: int, path: Path, base: Path | None) -> Lora:
    """Read an adapter into a model's linears, number 0 for every row; other processes of the model read it too."""
    found = read(path, decoder.config.names, shapes_of(decoder), base)
    for linear in linears_of(decoder):
        made = _prepared(found, linear, decoder)
        if not number:
            linear.adapter = made
        elif made is not None:
            linear.adapters[number] = made
    if isinstance(decoder, SplitDecoder) and decoder.lead is not None:
        decoder.lead.adapt(number, str(path.resolve()))
    return found


def shapes_of(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """Return [O, I] of every linear by name; for a model in several processes, of the whole model."""
    if isinstance(decoder, SplitDecoder):
        return _whole(decoder.split.config)
    return {linear.name: linear.shape for linear in linears_of(decoder)}


def _prepared(found: Lora, linear: Linear, decoder: Decoder) -> Adapter | PreparedAdapter | None:
    change = found.adapters.get(linear.name)
    if change is None:
        return None
    cut = decoder.split.cuts.get(linear.name) if isinstance(decoder, SplitDecoder) else None
    change = change if cut is None else cut_adapter(change, cut)
    return ops.prepare_adapter(change, decoder.store, decoder.device)
