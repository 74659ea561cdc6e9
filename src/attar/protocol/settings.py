"""Settings that an engine is started with: the one value that the server writes to the engine's standard input.

Torch-free: the process that speaks HTTP makes it. That process reads the tokenizer once, and restarts a crashed engine
with the same settings. So they include fingerprints of the model's files, and an engine refuses to serve other files.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from attar.protocol.scheduler_config import PRESETS, Limits

MAX_ADAPTERS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,255}")  # includes Hub ids; requests may name no longer one
READ = (
    "*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer.*", "special_tokens_map.json", "vocab.json",
    "merges.txt",
)  # fmt: skip
"""Files of a model's or an adapter's folder that an engine reads. Chat templates, which only the server reads, and
reports or other files beside a model are not among them."""
PIECES, PIECE = 4, 64 << 10  # of a file, and bytes of each, that tell files of equal size and date apart


HOPELESS, CHANGED = 2, 3
"""Exit statuses of an engine that cannot serve its model, and of one whose files differ from the server's."""


class ChangedError(ValueError):
    """An error for a model's files that differ from those a server was started with."""


def name_of(model: str) -> str:
    """Return a model's name: a folder's or file's own name, or a Hub id as given. Raises ValueError for a folder
    without a name, the root. A link keeps its own name: files in the Hub's cache link to files named by a hash."""
    path = Path(model).expanduser()
    name = Path(os.path.abspath(path)).name if path.exists() else model
    if not name:
        raise ValueError(f"{model} has no name that requests could ask for: give it one with --name")
    return name


def check_name(name: str) -> str:
    """Return `name`. Raises ValueError where it is no valid model name for requests."""
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(
            f"--name {name[:160]!r}: a model's name is of letters, digits and . _ : @ / -, at most 256 of them"
        )
    return name


def fingerprints(folders: Iterable[str]) -> dict[str, str]:
    """Return a fingerprint (size, date, hash of samples) of each file of models and adapters that an engine reads, by
    path.

    Inode numbers are left out: on some file systems they change by themselves. Raises OSError for a file that cannot be
    read.
    """
    paths = (path for each in folders for path in _read_from(Path(each)))
    return {str(path): _fingerprint(path) for path in paths}


def _read_from(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    yield from sorted({found for pattern in READ for found in path.glob(pattern) if found.is_file()})


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        for start in range(0, status.st_size, max(PIECE, -(-status.st_size // PIECES))):
            file.seek(start)
            digest.update(file.read(PIECE))
    return f"{status.st_size} {status.st_mtime_ns} {digest.hexdigest()}"


def parse_adapters(given: Sequence[str], model: str) -> tuple[tuple[str, str], ...]:
    """Parse adapters, each given as NAME=FOLDER, to be served beside `model`: (name, folder) of each.

    Raises ValueError for another form, a name that is invalid or taken, more than MAX_ADAPTERS, and a folder without an
    adapter.
    """
    if len(given) > MAX_ADAPTERS:
        raise ValueError(f"{len(given)} adapters: at most {MAX_ADAPTERS} are served at a time")
    found: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or not folder or not NAME.fullmatch(name):
            raise ValueError(
                f"an adapter is given as NAME=FOLDER, its name of letters, digits and . _ : -, not {each[:160]!r}"
            )
        if name in found or name == model:
            what = "the model's own name" if name == model else "the name of two adapters"
            raise ValueError(f"--adapter {name}: requests ask for one by its name, and this is {what}")
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ValueError(f"--adapter {name}: {folder} holds no adapter_config.json: not a PEFT adapter's folder")
        found[name] = folder
    return tuple(found.items())


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model to serve, and how much of the machine to use. None stands for the default, or for what fits."""

    model: str
    socket: str
    device: str = "cpu"
    dtype: str | None = None  # float32 on a CPU, bfloat16 elsewhere
    activations: str = "int8g128"
    kv: str | None = None  # a scheme of kv/schemes.py
    context: int | None = None
    memory: int | None = None
    max_cached_tokens: int | None = None
    kv_fraction: float | None = None  # fraction of the memory left after the model for the KV cache
    preset: str | None = None
    policy: str | None = None
    max_running: int | None = None
    max_step_tokens: int | None = None
    max_waiting: int | None = None
    max_delay: float | None = None  # seconds, for the policy `dynamic`
    max_preemptions: int | None = None
    threads: int | None = None
    verify: bool = True
    adapters: tuple[tuple[str, str], ...] = ()  # name and folder of each
    tp: int = 1  # processes that compute each layer together
    pp: int = 1  # stages of layers
    name: str = ""  # the model's name in requests; empty: `name_of` it
    files: dict[str, str] = {}  # `fingerprints` of the files to serve; empty: any files

    @property
    def computes_in(self) -> str:
        """Return the name of the dtype that the model computes in."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def served_as(self) -> str:
        """Return the model's name in requests."""
        return self.name or name_of(self.model)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return the present fingerprints of the model and its adapters, by path."""
        return fingerprints((self.model, *(folder for _, folder in self.adapters)))

    def require_unchanged(self) -> None:
        """Raise ChangedError, naming files, where the model differs from the one that these settings were made for."""
        if not self.files or (now := self.fingerprints) == self.files:
            return
        changed = sorted(path for path in {*now, *self.files} if now.get(path) != self.files.get(path))
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ChangedError(
            f"{changed[0]}{more} changed on disk since the server was started, which still has the tokenizer of then: "
            "start the server again to serve what is there now"
        )

    def limits(self) -> Limits:
        """Return the preset with the settings that differ from it. Raises ValueError for an unknown preset or invalid
        values."""
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}: known are {', '.join(PRESETS)}")
        names = ("policy", "max_running", "max_step_tokens", "max_waiting", "max_delay", "max_preemptions")
        changed = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(PRESETS[self.preset] if self.preset else Limits(), **changed)
