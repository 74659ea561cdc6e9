"""Reader of a Hugging Face model folder: config.json, safetensors in one file or in shards, and the files around them.

Every fault of the files as files is found when the folder is opened. All headers are read and checked against the index
before any tensor is, so that a missing shard does not appear after hours of work. The meaning of the tensors (families,
tied embeddings, quantized layouts) belongs to the readers above.

The index's `total_size` is not compared with anything: writers disagree on what it counts, and every byte is accounted
for by the shards' own headers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import reprlib
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoints.safetensors import TensorFile
from attar.checkpoints.strict_io import CONVERT, PICKLES, CheckpointError, OnDisk, OpenFile, near, parse_json
from attar.errors import code_of
from attar.formats.scheme import Part
from attar.model.vision.wrappers import VILA_CONVERTED, is_vila
from attar.progress import StageProgress

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
MAX_CONFIG = 16_000_000
MAX_INDEX = 48_000_000
MAX_MARKS = 500_000  # braces, brackets and commas of a config: one with 80,000 packed linears has as many
MAX_ENTRIES = 300_000  # entries of an index; the largest published have two thirds of it

DENSE = frozenset({"float32", "float16", "bfloat16", "float64"})  # dtypes of tensors that are numbers as they are

CARRIED = (
    "tokenizer.json", "tokenizer.model", "tokenizer.model.v[0-9]*", "tokenizer_config.json", "spiece.model",
    "sentencepiece.bpe.model", "*.tiktoken", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
    *(name + suffix for name in ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY") for suffix in ("", ".txt", ".md")),
)  # fmt: skip
"""Files that belong to a model besides its weights and config. The list names the wanted files: code, pickles and
optimizer states are left out without being named."""


def read_json(path: Path, limit: int, marks: int = MAX_MARKS) -> dict[str, Any]:
    """Read a JSON object from a file of at most `limit` bytes and `marks` braces, brackets and commas, decoded
    strictly.

    Raises CheckpointError.
    """
    return json_object(read_bytes(path, limit), path, marks)


def read_config(path: Path) -> dict[str, Any]:
    """Read a config that a library of Python wrote: as `read_json`, and what only Python takes for JSON is read as
    Python reads it, with a warning. Raises CheckpointError."""
    return json_object(read_bytes(path, MAX_CONFIG), path, lenient=True)


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError("file_wrong_kind", f"{path}: not a regular file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = file.read(limit + 1) if size <= limit else b""
    except OSError as error:
        raise CheckpointError(code_of(error), f"{path}: cannot be read: {error.strerror}") from error
    if max(size, len(text)) > limit:
        raise CheckpointError("file_too_large", f"{path}: larger than {limit} bytes")
    return text


def json_object(text: bytes, path: Path, marks: int = MAX_MARKS, *, lenient: bool = False) -> dict[str, Any]:
    """Parse a JSON object of at most `marks` braces, brackets and commas from a text, which `path` holds or will hold.

    The marks are counted before parsing, so that 16 MB of "[],[]," cannot become half a gigabyte of lists. Raises
    CheckpointError.
    """
    if (count := sum(map(text.count, (b"{", b"[", b",")))) > marks:
        raise CheckpointError(
            "file_too_large", f"{path}: has {count} braces, brackets and commas; attar accepts {marks}"
        )
    value = parse_json(text, path, lenient)
    if not isinstance(value, dict):
        raise CheckpointError("file_malformed", f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a config as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_vila(path: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a config.json is that of VILA's three folders."""
    if is_vila(config):
        raise CheckpointError("architecture_unsupported", f"{path}: {VILA_CONVERTED}")


class Folder(OnDisk):
    """An open checkpoint folder with its config read and its weight files checked.

    `config` is config.json as a dict; `files` maps each weight file's name to the open file. Raises CheckpointError
    where the folder is not a model, or its files do not fit together. Reading is thread-safe. `is_part`: it lies within
    a model's folder, as VILA's three do.
    """

    is_part = False

    def __init__(self, path: str | os.PathLike[str], is_part: bool = False) -> None:
        self.path, self.is_part = Path(path), is_part
        if not self.path.is_dir():
            raise self.error("file_not_found", "no such folder")
        self._refuse_other_kinds()
        self.config = read_config(self.path / CONFIG)
        refuse_vila(self.path, self.config)
        self.mapped = False  # whether `read` may give tensors on the pages of the files (`TensorFile.map`)
        self._where: dict[str, TensorFile] = {}
        index = self._index()
        shards = [self._single()] if index is None else sorted(set(index.values()))
        files = {shard: TensorFile(self.path / shard) for shard in shards}
        self.files: Mapping[str, OpenFile] = files
        for shard, file in files.items():
            for name in file.names():
                if index is not None and index.get(name) != shard:
                    place = f"places it in {index[name]} instead" if name in index else "does not list it"
                    raise file.error("checkpoint_mismatch", f"holds tensor {name!r}, but {INDEX} {place}")
                self._where[name] = file
        for name, shard in (index or {}).items():
            if name not in files[shard]:
                problem = f"has no tensor {reprlib.repr(name)}, which {INDEX} places in it"
                raise files[shard].error("checkpoint_mismatch", problem)

    def names(self) -> tuple[str, ...]:
        """Return all tensors' names, file by file, in the order of their data."""
        return tuple(self._where)

    def has(self, name: str) -> bool:
        return name in self._where

    def info(self, name: str) -> Part:
        """Return a tensor's torch dtype name and shape. Raises CheckpointError naming near misses."""
        return self._file(name).info(name)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """Return the tensor, in memory of its own or in `out` (contiguous, on the CPU, same dtype and shape)."""
        return self._file(name).map(name) if self.mapped and out is None else self._file(name).read(name, out)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows start..stop-1 of the first dimension: [stop - start, ...]."""
        return self._file(name).read_rows(name, start, stop)

    @property
    def size(self) -> int:
        """Return the bytes of all weight files."""
        return sum(file.size for file in self.files.values())

    def generation(self) -> dict[str, Any] | None:
        """Return generation_config.json, None where there is none. A file that holds no JSON object counts as none,
        with a warning: the model runs without it."""
        path = self.path / GENERATION
        if not path.exists():
            return None
        try:
            return read_config(path)
        except CheckpointError as error:
            if error.code != "file_malformed":
                raise
            logger.warning("it is not used: %s", error)
            return None

    def carry_files(self) -> tuple[str, ...]:
        """Return the files that an output made from this checkpoint needs too (tokenizer, templates, generation config,
        licence), as sorted paths relative to the folder.

        Raises CheckpointError where one is a link out of the folder: a copy would carry the link's target, perhaps a
        private file, into an output that is published. Only the Hub's cache is made of such links.
        """
        found = [p for pattern in ("*", "additional_chat_templates/*") for p in self.path.glob(pattern) if p.is_file()]
        by_name = {p.relative_to(self.path).as_posix(): p for p in found}
        names = sorted(name for name in by_name if any(fnmatchcase(name, wanted) for wanted in CARRIED))
        root = self.path.resolve()
        snapshot = root.parent if self.is_part else root
        homes = [root, *([snapshot.parent.parent / "blobs"] if snapshot.parent.name == "snapshots" else [])]
        for name in names:
            target = by_name[name].resolve()
            if not any(target.is_relative_to(home) for home in homes):
                raise CheckpointError(
                    "file_unsafe",
                    f"{self.path / name}: a link out of the folder, to {target}: put a copy in its place if that file "
                    "belongs to the model",
                )
        return tuple(names)

    def carry(self, names: Iterable[str], out: Path) -> None:
        """Copy the files named by `carry_files` to the folder `out`."""
        for name in names:
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.path / name, out / name)

    def source_hashes(self, progress: StageProgress | None = None) -> dict[str, str]:
        """Return the SHA-256 in hex of config.json, the index and each weight file, by name.

        `progress(done, total)` is called in bytes as the weight files are read, which takes about a second a gigabyte.
        """
        hashes = {}
        for name in (CONFIG, INDEX):
            if (self.path / name).is_file():
                hashes[name] = hashlib.sha256((self.path / name).read_bytes()).hexdigest()
        done, total = 0, self.size

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        return hashes | {name: file.sha256(advance) for name, file in self.files.items()}

    def close(self) -> None:
        """Close the weight files now rather than when the folder is dropped."""
        for file in self.files.values():
            file.close()

    def _file(self, name: str) -> TensorFile:
        if name not in self._where:
            raise self.error("checkpoint_incomplete", f"has no tensor {name!r}{near(name, self._where)}")
        return self._where[name]

    def _refuse_other_kinds(self) -> None:
        if (self.path / CONFIG).is_file():
            return
        if (self.path / "adapter_config.json").is_file():
            raise self.error(
                "file_wrong_kind",
                f"an adapter (LoRA), not a model: name its base, with --adapter {self.path}, or merge it "
                "into that: attar merge BASE ADAPTER OUT",
            )
        inner = sorted(p.parent.name for p in self.path.glob(f"*/{CONFIG}"))[:5]
        hint = f"; its subfolder {' or '.join(inner)} has one" if inner else ""
        if not inner and any(self.path.glob("*.gguf")):
            hint = "; it holds GGUF files: give the path of one of them"
        raise self.error("file_wrong_kind", f"no {CONFIG}: not a Hugging Face model folder{hint}")

    def _index(self) -> dict[str, str] | None:
        """Return the index's map of tensor to shard, checked; None where there is no index."""
        path = self.path / INDEX
        if not path.exists():
            return None
        weight_map = read_json(path, MAX_INDEX, MAX_ENTRIES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                "checkpoint_malformed", f"{path}: needs a weight_map that lists each tensor with its file"
            )
        for shard in weight_map.values():
            # A bare name, because the index is untrusted and must not reach out of the folder.
            name = shard if isinstance(shard, str) else ""
            if not name.endswith(".safetensors") or not name.isprintable() or name[0] == "." or "/" in name:
                raise CheckpointError(
                    "checkpoint_malformed", f"{path}: {reprlib.repr(shard)} is not the name of a safetensors file"
                )
        shards = sorted(set(weight_map.values()))
        if missing := [shard for shard in shards if not (self.path / shard).exists()]:
            raise self.error(
                "checkpoint_incomplete",
                f"{len(missing)} of {len(shards)} weight files missing: {', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}; download or copy them again",
            )
        if (self.path / SINGLE).exists() and SINGLE not in shards:
            raise self.error(
                "checkpoint_mismatch",
                f"holds both {SINGLE} and {INDEX}, which names other files; remove the one that is stale",
            )
        return weight_map

    def _single(self) -> str:
        """Return the one weight file of a folder without an index. Old GPTQ checkpoints give it a name of their own."""
        if (self.path / SINGLE).exists():
            return SINGLE
        found = sorted(p.name for p in self.path.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        if found:
            raise self.error(
                "checkpoint_incomplete", f"{len(found)} safetensors files but no {INDEX} to say what is where"
            )
        pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise self.error("file_unsafe", f"its weights are pickles ({', '.join(pickles[:3])}). {CONVERT}")
        raise self.error("checkpoint_incomplete", "has no safetensors file; download or copy the weights again")


class FolderView(Folder):
    """A folder whose tensors are those of another, `of`, read through changes; all its other files are that one's.

    `names` are its tensors, in order. Subclasses say in `info`, `read` and `read_rows` what the changes are.
    """

    def __init__(self, of: Folder, names: Iterable[str], config: Mapping[str, Any]) -> None:
        self.path, self.files, self.mapped = of.path, of.files, False
        self.config, self.of = dict(config), of
        self._names = dict.fromkeys(names)

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def has(self, name: str) -> bool:
        return name in self._names

    def generation(self) -> dict[str, Any] | None:
        return self.of.generation()

    def carry_files(self) -> tuple[str, ...]:
        return self.of.carry_files()

    def carry(self, names: Iterable[str], out: Path) -> None:
        self.of.carry(names, out)
