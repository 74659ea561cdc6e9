"""What `attar serve` does with several models, or several engines of one, before it listens: names and paths, and each
one's part of the memory and of the cores."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attar.cli.options import Defaults
from attar.cli.terminal import tell
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.plan.rates.profile import MachineProfile
    from attar.plan.sharing import Sharing
    from attar.protocol.settings import Settings
    from attar.server.models.served import ModelSpec

MAX_MODELS = 64
SIZES = (sys.executable, "-m", "attar.engine.deployment")  # of models, by a process with torch
ONE_ENGINE = "one-engine"  # the name of a thread
SLOWER = (sys.executable, "-m", "attar.evaluation.planning.engines")  # whether replicas are, by such a process


def parse_models(given: Sequence[str]) -> dict[str, Path]:
    """Return the path of each model by its name, from NAME=PATH. Raises ValueError for another form, a name that is
    given twice, more than MAX_MODELS, and a path without a model."""
    from attar.checkpoints.sources import hub
    from attar.server.options import check_name

    if len(given) > MAX_MODELS:
        raise UserError("option_out_of_range", f"{len(given)} models: at most {MAX_MODELS} are served")
    found: dict[str, Path] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals or not path:
            raise UserError("option_malformed", f"a model is given as NAME=PATH, not {each[:160]!r}")
        if check_name(name) in found:
            raise UserError("option_conflict", f"--model {name}: two models have this name")
        found[name] = hub.resolve(path)
    return found


def divide(models: Sequence[Settings], memory: int | None) -> Sharing:
    """Divide the memory, by default what the machine has, among models. Raises ValueError for a model that cannot be
    read, or does not fit alone."""
    from attar import machine
    from attar.plan.sharing import Sharing

    total = machine.examine().budget if memory is None else memory
    asked = json.dumps([total, *map(msgspec.to_builtins, models)]).encode()
    done = subprocess.run(SIZES, input=asked, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise UserError("value_invalid", "the models' sizes could not be found: see above")
    found: dict[str, Any] = json.loads(done.stdout)
    if "error" in found:
        raise UserError(found["code"], found["error"])
    return msgspec.convert(found, Sharing)


def tell_parts(sharing: Sharing) -> None:
    """Print where the memory goes."""
    from attar.plan.fit import size

    lines = [(name, part.size, f"loaded on first use, {part.context:,} tokens") for name, part in sharing.parts.items()]
    width = max(13, *(len(name) for name, _, _ in lines))
    for name, taken, more in (*lines, ("server", sharing.server, "with the tokenizers of all")):
        tell(f"{name:<{width}}{size(taken):>10}  {more}")
    together = sum(part.size for part in sharing.parts.values())
    fits = "all fit at once" if together <= sharing.engines else f"together {size(together)}: they take turns"
    tell(f"{'memory':<{width}}{size(sharing.memory):>10}  {size(sharing.engines)} for models; {fits}")


def spec(settings: Settings, sharing: Sharing, defaults: Defaults) -> ModelSpec:
    """Make what the server needs of a model: settings with its part of the memory, its tokenizer, and its sampling
    parameters. Raises ValueError for a model without a readable tokenizer."""
    from attar.checkpoints import generation_config, image_settings, vocabulary
    from attar.checkpoints.fingerprints import fingerprints
    from attar.server.models.served import ModelSpec

    part, path = sharing.parts[settings.name], Path(settings.model)
    files = fingerprints(settings.folders)  # first: later changes are noticed
    settings = msgspec.structs.replace(settings, memory=part.memory, context=part.context, files=files)
    sampling = generation_config.sampling(path) if defaults is Defaults.model else {}
    images = image_settings.read(path) if settings.image_cache else None
    return ModelSpec(settings, part.size, vocabulary.tokenizer(path), sampling, images)


def check_engines(
    device: str, replicas: int | None, listed: Sequence[str], routed: bool, processes: Mapping[str, int]
) -> None:
    """Raise UserError for options that do not go with --replicas, or with --router-key-file where it is given
    (`routed`).

    `listed` are those of --replica-cores, which need --replicas. `processes` are the sizes of `tp` and `pp`. On a CPU
    an answer of several processes cannot continue on another host. On GPUs no answer can, which the start says.
    """
    parallel = next(((name, size) for name, size in processes.items() if size > 1), None)
    if replicas is None:
        if listed:
            raise UserError("option_missing", "--replica-cores needs --replicas N")
        if routed and device == "cpu" and parallel is not None:
            name, size = parallel
            message = (
                f"--router-key-file with --{name} {size}: no other host could continue an answer of several "
                "processes; serve in one process, which is no slower on a CPU"
            )
            raise UserError("feature_unsupported", message)
        return
    if device != "cpu":
        raise UserError("feature_unsupported", f"--replicas is for CPUs; --device {device} has one engine")
    if routed:
        message = "--router-key-file with --replicas: give the router one server of each engine instead"
        raise UserError("feature_unsupported", message)
    if parallel is not None:
        name, size = parallel
        message = f"--replicas with --{name} {size}: each replica is one process; choose one of the two"
        raise UserError("option_conflict", message)


def divide_cores(settings: Settings, count: int, listed: Sequence[str]) -> list[tuple[Settings, tuple[int, ...]]]:
    """Return settings and cores of each of `count` engines, on cores that are `listed` or in equal shares, and print
    them. Raises UserError for more engines than cores, and for wrong lists."""
    from attar import machine
    from attar.plan.fit import size
    from attar.server.replicas import cores

    shares = cores.shares(count, listed)
    total = settings.memory
    if total is None:
        here = machine.examine()
        total = here.budget if settings.kv_fraction is None else here.memory
    found = []
    on_node = Counter(cores.node(share[0]) for share in shares)
    for number, share in enumerate(shares):
        threads, sharers = settings.threads or cores.threads(share, count), on_node[cores.node(share[0])]
        placed = msgspec.structs.replace(settings, memory=total * sharers // count, sharers=sharers, threads=threads)
        found.append((placed, share))
        tell(f"replica {number:<6}processors {_ranges(share)}, threads: {threads}")
    for node, sharers in on_node.items():
        if sharers > 1:
            where = f" on memory node {node}" if len(on_node) > 1 else ""
            tell(f"{sharers} replicas{where} share {size(total * sharers // count)}, and hold the weights once")
    from attar.plan.rates import store

    rates = store.RatesStore(store.folder()).find(store.key())
    if rates is not None:  # in a thread, because the answer takes seconds and the engines can start meanwhile
        threading.Thread(target=_tell_slower, args=(settings, count, rates), name=ONE_ENGINE, daemon=True).start()
    elif len({cores.node(cpu) for share in shares for cpu in share}) == 1:
        tell("the replicas share one memory node and its bandwidth: one engine on all cores often makes more tokens")
        tell("with the rates of `attar bench --rates`, the next start says which of the two is faster")
    return found


def _tell_slower(settings: Settings, count: int, rates: MachineProfile) -> None:
    """Print whether one engine on all cores decodes faster than `count` replicas, by this machine's rates."""
    asked = json.dumps([msgspec.to_builtins(settings), count, msgspec.to_builtins(rates)]).encode()
    done = subprocess.run(SLOWER, input=asked, stdout=subprocess.PIPE, check=False)
    if done.returncode == 0 and (found := json.loads(done.stdout)):
        tell(found)


def _ranges(cpus: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as 0-3,8."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
