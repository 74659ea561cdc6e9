"""The question of a plan by goals: the model's shape, this machine's rates, its memory, and receipts of outputs.

A bare config.json, a folder that has nothing else, and the header of a GGUF file are enough. So are the headers of a
model on the Hub, which is not downloaded. torch is loaded only where tensors' headers are read or rates are measured: a
plan of a config.json with kept rates starts without it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attar import machine, strict_json
from attar.checkpoints.strict_io import CheckpointError
from attar.engine import deployment
from attar.errors import UserError
from attar.formats.scheme import ITEM_BITS
from attar.images.settings import ImageSettings, read_settings
from attar.model.config import ModelConfig
from attar.model.families import read_config
from attar.model.vision.config import read_vision
from attar.plan import costs
from attar.plan.comparison import Subject
from attar.plan.costs import Storage
from attar.plan.goals import candidates, quality
from attar.plan.goals.candidates import Weights
from attar.plan.rates import profile as profiles
from attar.plan.rates import store
from attar.plan.rates.profile import MachineProfile
from attar.plan.rates.step_time import curve_name
from attar.plan.vision import AMX, TowerWeights

if TYPE_CHECKING:
    from attar.checkpoints.sources.hub import HubName

logger = logging.getLogger(__name__)

Told = Callable[[str], None]
MAX_CONFIG = 16_000_000
CONFIG = "config.json"
MOST_MEASURED = 8  # further schemes, 3 s each


def subject(name: str) -> Subject:
    """Return a model by its path or name. Raises UserError as loading would, but for missing weights."""
    path = Path(name).expanduser()
    bare = path if path.suffix == ".json" and path.is_file() else path / CONFIG
    weights = path.is_dir() and any(path.glob("*.safetensors*"))
    if bare.is_file() and not weights:
        return _bare(name, bare)
    from attar.checkpoints.sources import hub
    from attar.checkpoints.sources.hub import HubName

    here = path.exists() or (path.suffix.lower() == ".gguf" and path.parent.is_dir())  # as `hub.resolve`
    if not here and (remote := HubName.parse(name)) is not None:
        return _remote(name, remote)
    found = hub.resolve(name)
    try:
        return deployment.subject_at(name, found)
    except UserError as error:
        if error.code != "checkpoint_incomplete" or found.suffix.lower() != ".gguf":
            raise
        return deployment.subject_at(name, found, whole=False)


def _remote(name: str, remote: HubName) -> Subject:
    """Return a model of the Hub: from the local cache where it is whole, else by the headers of its files. A GGUF file
    that is cached without its mmproj file is a language model only where the Hub cannot be asked."""
    from attar.checkpoints.sources import hub, hub_headers

    def cached(alone: bool) -> Subject | None:
        try:
            found = hub.resolve(name, offline=True, alone=alone)
            return deployment.subject_at(name, found) if alone or hub.lacks_tower(remote, found) is False else None
        except CheckpointError as error:
            if error.code not in ("file_not_found", "checkpoint_incomplete"):
                raise
            return None

    if (whole := cached(alone=False)) is not None:
        return whole
    try:
        with tempfile.TemporaryDirectory(prefix="attar-plan-") as place:
            return deployment.subject_at(name, hub_headers.fetch(remote, Path(place)), whole=False)
    except CheckpointError as error:
        if error.code != "download_failed" or remote.file is None or (found := cached(alone=True)) is None:
            raise
        logger.warning("%s is planned without images: the Hub cannot be asked for its mmproj file", name)
        return found


def _bare(name: str, path: Path) -> Subject:
    with path.open("rb") as file:
        text = file.read(MAX_CONFIG + 1)
    if len(text) > MAX_CONFIG:
        raise UserError("file_too_large", f"{path}: a config.json has at most {MAX_CONFIG:,} bytes")
    try:
        value = strict_json.parse(text)
    except (ValueError, RecursionError) as error:
        raise UserError("config_invalid", f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise UserError("config_invalid", f"{path} holds no JSON object")
    if isinstance(value.get("quantization_config"), dict):
        message = f"{path} is of quantized weights, whose layout only the weights tell: give the whole folder"
        raise UserError("feature_unsupported", message)
    config = read_config(value)
    candidates.check_size(config)
    dtype = config.dtype if config.dtype in ITEM_BITS and config.dtype != "float32" else "bfloat16"
    try:
        vision = read_vision(value, config.hidden)
    except UserError as error:  # of a tower that is not read: such a model is served as a language model
        return Subject(name, config, Storage(dtype=dtype), images=str(error))
    if vision is None:
        return Subject(name, config, Storage(dtype=dtype))
    images = None
    if path.name == CONFIG:  # what lies beside it is of the same model
        images = _images(path.parent)
    return Subject(name, config, Storage(dtype=dtype), TowerWeights(vision, dtype, {}), images)


def _images(folder: Path) -> ImageSettings | str | None:
    try:
        return read_settings(folder)
    except UserError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class Known:
    """A profile, and whether it is of this machine as it is now."""

    profile: MachineProfile
    here: bool
    notes: tuple[str, ...]


def rates(file: Path | None, schemes: Iterable[str], tell: Told, amx: bool = False) -> Known:
    """Return the rates in `file`, or those kept for this machine, or measured now and kept; with `amx` also that of
    products in bfloat16 on AMX, where the processor has it.

    `schemes` are names of curves: missing ones are measured, 3 s each, unless a file was given. Raises UserError where
    there are no kernels to measure.
    """
    key = store.key()
    if file is not None:
        found = profiles.read(file)
        here = replace(found.key, threads=key.threads) == key
        notes = () if here else (f"rates of another machine or build: {found.key.machine}, {found.measured}",)
        return Known(found, here, notes)
    kept = store.RatesStore(store.folder())
    known = kept.find(key)
    if kept.problem is not None:
        tell(kept.problem)
    missing = [name for name in dict.fromkeys(schemes) if known is None or name not in known.products]
    lacks_tiles = amx and known is not None and known.isa == AMX and known.bf16_tiles is None and deployment.has_amx()
    if known is not None and not missing and not lacks_tiles:
        return Known(known, True, ())
    from attar.evaluation.planning import machine_rates

    if known is None:
        tell("measuring this machine's rates, once: about a minute")
        known = machine_rates.measure()
        missing = [name for name in missing if name not in known.products]
    left = missing[:MOST_MEASURED]
    if left:
        tell(f"measuring products with {', '.join(left)} weights, 3 s each")
    found = machine_rates.extended(known, left)
    if lacks_tiles:
        tell("measuring products in bfloat16, as vision towers compute them")
        found = machine_rates.with_tiles(found)
    before = kept.problem
    if not kept.keep(found) and kept.problem is not None and before is None:
        tell(kept.problem)
    return Known(found, True, ())


def curve_names(config: ModelConfig, storages: Iterable[Storage]) -> list[str]:
    """Return the names of the curves that some storages of a model need."""
    return list(dict.fromkeys(
        curve_name(storage.of(each)) for storage in storages for each, _ in costs.counted(config, storage)
    ))  # fmt: skip


def outputs(folders: Sequence[str], of: ModelConfig) -> tuple[Weights, ...]:
    """Return existing outputs with the divergence that their receipts state. Raises UserError for an output of another
    shape, without a receipt, or whose receipt states no divergence."""
    if not folders:
        return ()
    from attar.checkpoints.sources import hub
    from attar.checkpoints.sources.opening import stored

    found = []
    for name in folders:
        path = hub.resolve(name)
        config, storage = stored(path)
        if (config.layers, config.hidden, config.vocab_size) != (of.layers, of.hidden, of.vocab_size):
            raise UserError("checkpoint_mismatch", f"{name} is no output of this model: its shape is another")
        cost = of_receipt(path)
        if cost is None:
            raise UserError(
                "receipt_invalid", f"{name}: no receipt states its KL: attar compress --eval TEXT writes it"
            )
        found.append(Weights(name, storage, cost, path=name))
    return tuple(found)


def of_receipt(path: Path) -> quality.Quality | None:
    """Return the divergence that an output's receipt states; None where it has none. Raises CheckpointError for a
    damaged receipt."""
    from attar.checkpoints.receipts.place import receipt_path
    from attar.checkpoints.receipts.receipt import read_receipt

    receipt = read_receipt(path)
    measured = None if receipt is None else receipt.value.get("evaluation")
    kl = measured.get("kl_mean") if isinstance(measured, dict) else None
    if not isinstance(measured, dict) or isinstance(kl, bool) or not isinstance(kl, int | float) or kl < 0:
        return None
    ends = measured.get("intervals")
    span = ends.get("kl_mean") if isinstance(ends, dict) else None
    low, high = (kl, kl)
    if isinstance(span, list | tuple) and len(span) == 2 and all(isinstance(each, int | float) for each in span):
        low, high = map(float, span)
    top1 = measured.get("top1")
    share = float(top1) if isinstance(top1, int | float) and 0 <= top1 <= 1 else None
    return quality.receipt(float(kl), low, high, share, str(receipt_path(path)))


def memory(asked: int | None, here: bool) -> tuple[int | None, str]:
    """Return the bytes to plan with, and where they come from; None for another machine whose memory is not given."""
    if asked is not None:
        return asked, "--memory"
    if not here:
        return None, "not limited: the rates are of another machine, and there is no --memory"
    found = machine.examine()
    return found.budget, f"90 % of {found.limited_by}"
