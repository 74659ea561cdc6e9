"""`receipt.json`: what was compressed, how, what it cost, and how to check that a copy is still the same.

A receipt holds the hashes of the source and of every file beside it, the recipe, the hash of the calibration tokens,
the seed, and the versions. It holds the properties of the machine that decide the last bits (instruction set, threads,
whether there are native kernels). It holds the error of each layer, as stored and if only rounded, the bits per weight,
the evaluation figures, and the probes (`probes.py`). A receipt that a conversion copied holds its origin under
`converted`; format and schemes of a source that was compressed itself are under `original`. It holds no clock, host,
path or duration: the same inputs give the same bytes. The JSON is canonical, keys sorted and floats in their shortest
form. Results that come later are recorded in it (`recorded.py`); a recorded plan alone holds times.

A receipt is no signature: a change of the weights can come with a change of the receipt. It finds accidents (a download
that ended early, a conversion that lost something, a machine whose kernels are wrong), and it records what was done.

Receipts are untrusted input like every file of a folder: they are read strictly, and file names that would lead out of
the folder are refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from attar import machine
from attar.checkpoints.folder import json_object, read_bytes
from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.parts import part_paths
from attar.checkpoints.receipts.place import NAME, receipt_path
from attar.checkpoints.receipts.probes import EXACT, NO_FLOOR, Probes, kernel_path, unrounded
from attar.checkpoints.strict_io import CheckpointError
from attar.errors import UserError
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.progress import StageProgress
from attar.version import __version__

FORMAT = 1
MAX_BYTES = 64_000_000
DEEPEST = 32  # levels of a copied receipt; ours have fewer than ten, and each is a space a line
MAX_EARLIER = 64  # hashes of receipts that a receipt names
_CHUNK = 1 << 20

FIGURES = ("ppl", "bits_per_byte", "kl_mean", "kl_p999", "top1", "tokens")
"""Evaluation figures that every receipt has, null where they were not measured."""

READ = (".safetensors", ".json", ".jinja", ".model", ".tiktoken")
"""Endings of files of a folder that a loader may read: a new one beside those of the receipt is a difference."""

_MACHINE = ("attar", "torch", "python", "instruction_set", "threads", "kernels")
REQUIRED = ("source", "recipe", "calibration", "seed", "versions", "layers", "bits_per_weight", "evaluation", "files")
KEYS: Mapping[str, str] = {
    "format": "Version of this layout.",
    "source": "SHA-256 of each file of the original, and one over all.",
    "recipe": "The recipe in full, with every option.",
    "calibration": "Hash of the calibration tokens; null without calibration.",
    "seed": "Seed of every random choice.",
    "versions": "attar, torch, Python, instruction set, threads and kernels of the run.",
    "layers": "Each linear layer: scheme, bits, error as stored, error if only rounded.",
    "bits_per_weight": "Bits per weight of the compressed linear layers.",
    "evaluation": "Figures of `--eval`.",
    "tasks": "Figures of `attar eval --task --record`, by task.",
    "plan": "What `attar plan --apply` predicted of this output, beside what it measured.",
    "images": "Figures of `--eval-images`, or of `attar eval --images --record`.",
    "earlier": "SHA-256 of the receipt before something was recorded in it, and of those that it names.",
    "files": "SHA-256 of each file beside the receipt.",
    "probes": "Inputs and outputs that `attar verify` replays.",
    "shard": "Largest size of a file, in bytes.",
    "drawn": "Number of calibration sequences that the model wrote itself.",
    "calibration_images": "Number and digest of the images that calibrated beside the text.",
    "device": "Device of the run, if not the CPU.",
    "imatrix": "SHA-256 of the importance matrix.",
    "allocation": "Bits by layer: the target, what was reached, and what was tried.",
    "rotation": "Loss of learned rotations before and after training.",
    "tune": "Losses of `tune` or `distill`.",
    "selection": "Candidates of `best-` and `--target-kl`, and the chosen one.",
    "texts": "Kind of the calibration text: the loss on it beside the entropy of the model.",
    "gain": "Comparison with plain rounding on held-out text.",
    "warnings": "Sentences that the run printed as warnings.",
    "original": "Format and schemes of a source that was compressed itself.",
    "copied": "Modules beside the language model, copied unquantized, with the dtypes that the output has of them.",
    "vision": "Vision tower and projector: scheme, error of an image's rows, and the probe of them.",
    "drafts_for": "Hash of the model that this one makes drafts for.",
    "products": "`bfloat16` where products ran on tiles.",
}
"""Keys that `write` may give a receipt, with their meanings. REQUIRED: those that every receipt has."""

Advance = Callable[[int], None]
"""Callback advance(bytes hashed since the last call)."""


def environment() -> dict[str, Any]:
    """Return the versions, and what else decides the last bits of a result: the instruction set and thread count of
    torch's products, and whether there are native kernels, whose rounding the probes measure."""
    return {
        "attar": __version__,
        "torch": str(torch.__version__),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "kernels": "ref" if dispatch.store() is None else "native",
    }


def combined_hash(hashes: Mapping[str, str]) -> str:
    """Return one SHA-256 over files' names and hashes, in the order of their names."""
    lines = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def missing(output: Path) -> str:
    """Return the message for an output without a receipt."""
    return f"no receipt: {why_missing(output)}"


def why_missing(output: Path) -> str:
    """Return the reasons why an output may have no receipt."""
    return f"attar did not make this, or its {receipt_path(output).name} was not copied along"


def write(
    output: Path,
    about: Mapping[str, Any],
    source_files: Mapping[str, str],
    layers: Sequence[Mapping[str, Any]],
    bits_per_weight: float,
    evaluation: Mapping[str, Any] | None,
    probes: Mapping[str, Any],
) -> Path:
    """Write the receipt of `output`, whose other files must all be in place, and return its path.

    `about` is `environment()` together with `recipe` (a dict), `calibration` (the token hash or None) and `seed`, and
    may have others of `KEYS`. `source_files` maps the source's files to their SHA-256. Raises ValueError where a
    figure is not finite, or the receipt exceeds `MAX_BYTES`.
    """
    path = receipt_path(output)
    value = {key: about[key] for key in about if key not in _MACHINE} | {
        "format": FORMAT,
        "versions": {key: about[key] for key in _MACHINE},
        "source": {"files": dict(source_files), "sha256": combined_hash(source_files)},
        "layers": [dict(layer) for layer in layers],
        "bits_per_weight": bits_per_weight,
        "evaluation": dict.fromkeys(FIGURES) | dict(evaluation or {}),
        "files": {name: sha256(output_file(output, name)) for name in _files(output)},
        "probes": probes,
    }
    assert set(value) <= set(KEYS), f"a conversion would leave out {sorted(set(value) - set(KEYS))}"
    machine.write_whole(path, _text(value))
    return path


def carry(
    found: Receipt,
    source: Path,
    output: Path,
    digest: str,
    bits_per_weight: float | None,
    copied: Mapping[str, str] | None = None,
    has_tower: bool = True,
    progress: StageProgress | None = None,
) -> str | None:
    """Write the receipt of `output`, a conversion of `source` with bitwise equal values, to which the source's receipt
    applies too.

    `found` is the source's receipt, `digest` that of the values. The bits are those of the output, None where it packs
    nothing. `copied` are the modules beside the language model and their dtypes, None: as the source has them. What the
    source's receipt says of a vision tower is left out without `has_tower`, which says whether the output has one.
    `progress(done, total)` counts hashed bytes, of both.

    Returns None, or the reason why no receipt is written: the source's files differ from its receipt. Raises ValueError
    where the result could not be read back.
    """
    names, done = _files(output), 0
    paths = [*(output_file(source, name) for name in found.files), *(output_file(output, name) for name in names)]
    total = sum(path.stat().st_size for path in paths if path.is_file())

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    if (wrong := _verify_files(source, found, advance)) is not None:
        return f"the output gets no receipt, because the source's does not hold: {wrong.detail}"
    # The source's receipt is untrusted: unknown keys are left out, and so is nesting that indentation would make large.
    # So is a plan, which is of the source's own layout.
    left_out = {"plan"} if has_tower else {"plan", "copied", "vision", "images"}
    value = {key: found.value[key] for key in KEYS if key in found.value and key not in left_out}
    if has_tower and copied is not None:
        value["copied"] = dict(copied)
    if _deeper(value, DEEPEST):
        raise UserError("receipt_invalid", f"that of the source is nested more than {DEEPEST} deep")
    value |= {
        "converted": {"files": combined_hash(found.files), "values": digest, "receipts": found.known},
        "files": {name: sha256(output_file(output, name), advance) for name in names},
    }
    value |= {} if bits_per_weight is None else {"bits_per_weight": bits_per_weight}
    path, text = receipt_path(output), _text(value)
    json_object(text, path)  # it may exceed the limits that the source's receipt met
    machine.write_whole(path, text)
    return None


def known(output: Path) -> list[str]:
    """Return the SHA-256 of an output's receipt, of what it was before results were recorded, and of the receipts of
    its origins by conversion, which hold the same values. Empty where it has none. Raises CheckpointError where it is
    no JSON."""
    path = receipt_path(output)
    if not path.is_file():
        return []
    text = read_bytes(path, MAX_BYTES)
    return _known(json_object(text, path), text)


def _known(value: Mapping[str, Any], text: bytes) -> list[str]:
    before = value.get("converted")
    lists = value.get("earlier"), before.get("receipts") if isinstance(before, dict) else None
    others = [each for one in lists if isinstance(one, list) for each in one if isinstance(each, str)]
    return [hashlib.sha256(text).hexdigest(), *others]


def amend(output: Path, changes: Mapping[str, Any]) -> None:
    """Replace keys of an output's receipt.

    What refers to the receipt by its hash, as a draft head does, keeps holding. Raises CheckpointError where the output
    has no receipt, or a damaged one.
    """
    found = read_receipt(output)
    if found is None:
        raise CheckpointError("receipt_invalid", f"{output}: {missing(output)}")
    assert set(changes) <= set(KEYS), f"a conversion would leave out {sorted(set(changes) - set(KEYS))}"
    kept = found.known[:MAX_EARLIER]
    machine.write_whole(receipt_path(output), _text({**found.value, **changes, "earlier": kept}))


def _text(value: Mapping[str, Any]) -> bytes:
    """Return canonical JSON. Raises ValueError for more than `MAX_BYTES`, before they are all in memory."""
    text = bytearray()
    encoder = json.JSONEncoder(sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    for piece in encoder.iterencode(value):
        text += piece.encode()
        if len(text) >= MAX_BYTES:
            raise UserError("file_too_large", f"it would be longer than {MAX_BYTES} bytes, and nobody could read it")
    return bytes(text + b"\n")


def _deeper(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested deeper than `levels` levels."""
    level = [value]
    for _ in range(levels + 1):
        nested = [each for each in level if isinstance(each, list | dict)]
        if not nested:
            return False
        level = [each for inner in nested for each in (inner.values() if isinstance(inner, dict) else inner)]
    return True


@dataclass(frozen=True, eq=False)
class Receipt:
    """A parsed receipt. `value` is the whole JSON object, `known` the result of the function of that name."""

    value: Mapping[str, Any]
    files: Mapping[str, str]
    probes: Probes
    known: list[str]


def read_receipt(output: Path) -> Receipt | None:
    """Read the receipt of a folder (or GGUF file), None where it has none. Raises CheckpointError where it is
    damaged."""
    path = receipt_path(output)
    if not path.is_file():
        return None
    text = read_bytes(path, MAX_BYTES)
    value = json_object(text, path)
    if value.get("format") != FORMAT:
        raise CheckpointError(
            "receipt_invalid",
            f"{path}: its format is {value.get('format')!r}, not {FORMAT}: use another version of attar",
        )
    missing = [key for key in REQUIRED if key not in value]
    if missing:
        raise CheckpointError("receipt_invalid", f"{path}: the receipt is damaged: it lacks {', '.join(missing)}")
    files = value["files"]
    if not isinstance(files, dict) or not all(_is_plain(n) and isinstance(h, str) for n, h in files.items()):
        raise CheckpointError(
            "receipt_invalid", f"{path}: the receipt is damaged: `files` must map names within the folder to hashes"
        )
    return Receipt(value, files, Probes.parse(value.get("probes"), str(path)), _known(value, text))


@dataclass(frozen=True, slots=True)
class PathVerdict:
    """Result of the probes on one kernel path; `ok` is None where the receipt has no noise floor for it."""

    ok: bool | None
    first_divergence: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a verification. `first_divergence` names the file or the module that differs first, None where nothing
    does. `paths` holds the result of each kernel path on which probes were replayed."""

    ok: bool
    first_divergence: str | None
    detail: str
    paths: Mapping[str, PathVerdict] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """Return the verdict as a sentence."""
        return f"ok: {self.detail}" if self.ok else f"failed: {self.detail}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    output: Path,
    decoder: Decoder | Callable[[], Decoder] | None,
    *,
    hashes: bool = True,
    probes: Literal["all", "one", "none"] = "all",
) -> Verdict:
    """Check an output against its receipt: first the hashes of its files, then the probes on this machine's kernels.

    `decoder` is the loaded output, or a function that loads it, which is called once the hashes match. Where it rounds
    rows that its schemes leave alone, it is replayed on exact rows as well. Raises CheckpointError where the receipt is
    damaged, of another model, or has no noise floor for any path that the decoder can run on.
    """
    receipt = read_receipt(output)
    if receipt is None:
        return Verdict(False, None, missing(output))
    if hashes and (verdict := _verify_files(output, receipt)) is not None:
        return verdict
    count = len(receipt.files)
    have = "1 file has the hash" if count == 1 else f"{count} files have the hashes"
    done = [f"{have} of the receipt"] if hashes else []
    if probes == "none":
        return Verdict(True, None, "; ".join(done))
    assert decoder is not None, "probes need the model"
    count = 1 if probes == "one" else len(receipt.probes.prompts)
    paths = _replay(receipt.probes, decoder if isinstance(decoder, Decoder) else decoder(), count)
    for path, found in paths.items():
        if found.ok is False:
            return Verdict(False, found.first_divergence, f"on the {path} kernels {found.detail}", paths)
    if all(found.ok is None for found in paths.values()):
        raise CheckpointError("device_unsupported", "; ".join(found.detail for found in paths.values()))
    done += [f"{path}: {found.detail}" for path, found in paths.items()]
    return Verdict(True, None, "; ".join(done), paths)


def _replay(probes: Probes, decoder: Decoder, count: int) -> dict[str, PathVerdict]:
    """Replay the first `count` probes on every path that the decoder can run on, the sharpest first."""
    paths: dict[str, PathVerdict] = {}
    own = kernel_path(decoder)
    with unrounded(decoder):
        if own != EXACT and kernel_path(decoder) == EXACT:
            paths[EXACT] = _replay_path(probes, decoder, count)
    paths[own] = _replay_path(probes, decoder, count)
    return paths


def _replay_path(probes: Probes, decoder: Decoder, count: int) -> PathVerdict:
    path = kernel_path(decoder)
    if probes.noise.get(path) is None:
        return PathVerdict(None, None, NO_FLOOR.format(path))
    found = probes.replay(decoder, count)
    if found is not None:
        return PathVerdict(False, found.where, str(found))
    said = f"{count} probe{'s' * (count > 1)} of {len(probes.prompts)} replayed within the noise"
    return PathVerdict(True, None, said)


def _verify_files(output: Path, receipt: Receipt, advance: Advance | None = None) -> Verdict | None:
    for name in sorted(receipt.files):
        path = output_file(output, name)
        if not path.is_file():
            return Verdict(False, name, f"{name} is in the receipt, but not in the folder")
        if sha256(path, advance) != receipt.files[name]:
            return Verdict(False, name, f"{name} is not the file that was written: its SHA-256 is not the receipt's")
    known = {output_file(output, name) for name in receipt.files}  # a file may have been renamed
    for name in _files(output):
        if output_file(output, name) not in known and (not output.is_dir() or name.endswith(READ)):
            return Verdict(False, name, f"{name} was added to the output: the receipt does not know it")
    return None


def sha256(path: Path, advance: Advance | None = None) -> str:
    """Return a file's SHA-256 in hex; `advance` is called with the size of each hashed piece."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def output_file(output: Path, name: str) -> Path:
    """Return the path of an output's file. A GGUF file may have been renamed, and its mmproj file with it; parts go by
    their names."""
    if output.is_dir():
        return output / name
    if name.startswith(mmproj.PREFIX) and not output.name.startswith(mmproj.PREFIX):
        return mmproj.path_of(output)
    return output if part_paths(output) == [output] else output.with_name(name)


def _files(output: Path) -> list[str]:
    """Return the names of an output's files, relative to its folder, without receipts and hidden files. A file has its
    other parts and its mmproj file."""
    if not output.is_dir():
        tower = mmproj.path_of(output)
        return [path.name for path in part_paths(output)] + ([tower.name] if tower.is_file() else [])
    found = (path.relative_to(output) for path in output.rglob("*") if path.is_file())
    return sorted(f.as_posix() for f in found if f.as_posix() != NAME and not any(p.startswith(".") for p in f.parts))


def _is_plain(name: object) -> bool:
    """Return whether a file's name stays within the folder."""
    return isinstance(name, str) and name.isprintable() and all(p not in ("", ".", "..") for p in name.split("/"))
