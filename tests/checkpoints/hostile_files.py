"""Model files from strangers, wrong in every way that we could think of, and what must hold when one is opened.

Two sorts. The named ones are those that the tests of each reader list, and a few that need more than bytes: pipes,
links in circles, sparse files. The others are models in the formats that we read, damaged by chance: cut short, bits
flipped, numbers, pieces and whole tensors replaced; most headers that are damaged as text get a length that fits again,
or nothing but that length would ever be looked at. Case i of a seed is the same wherever it is made.

`examine` opens one as `attar inspect`, `attar plan` and whoever needs a tokenizer do. What is refused must be refused
in a sentence of ours that names the file. What is not must be, tensor for tensor, the bytes that the format's own
package reads, and must then load and run: to numbers, or to a sentence, for what headers cannot tell (a column that
lies outside of its matrix) is found there at the latest.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import re
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf as gguf_package
import safetensors.torch as safetensors_package
import torch

from attar.checkpoints import vocabulary
from attar.checkpoints.convert.run import convert
from attar.checkpoints.folder import INDEX, Folder
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.inspect import inspect
from attar.checkpoints.sources import opening
from attar.checkpoints.sources.opening import stored
from attar.checkpoints.strict_io import CheckpointError
from attar.compression.runs.pipeline import compress
from attar.formats.codecs import ggml_search
from attar.formats.codecs.ggml import TYPES
from attar.kernels import dispatch
from attar.model.cache import ForwardBatch
from tests.checkpoints import test_folder, test_safetensors
from tests.checkpoints.gguf import test_checkpoint as test_gguf_checkpoint
from tests.checkpoints.gguf import test_file as test_gguf
from tests.text import gguf_metadata, test_gguf_refused

Files = dict[str, bytes]

COSTLY = "safetensors: costly"

WEIGHTS, FILE = "model.safetensors", "model.gguf"
TERABYTE = 1 << 40
MESSAGE = 1500  # characters of a refusal, at most: a hostile header does not flood the terminal
CALIBRATION = [[(7 * i + 3 * j) % 288 for j in range(32)] for i in range(8)]

FOLDERS = {
    "dense": "", "4 bits": "rtn-w4g32", "columns in another order": "gptq-w4g32", "8 bits, static": "rtn-w8a8-static",
    "fp8 blocks": "rtn-fp8-block", "nvfp4": "rtn-nvfp4-weight", "nf4": "rtn-nf4", "llm.int8": "rtn-llm-int8",
    "table and outliers": "rtn-lut4-s45", "2:4 sparse": "magnitude-2:4-sparse24", "mxfp4": "rtn-mxfp4-weight",
    "qserve": "rtn-qserve-g64", "GGML's blocks": "rtn-iq4_nl", "fp8 e5m2": "rtn-fp8-e5m2",
    "rotated at run time": "quarot-w8a8", "fp8, static": "rtn-fp8-tensor-static",
}  # fmt: skip
"""Sound folders by what they hold: the recipe that makes them of the dense one."""
FEW = ("4 bits", "8 bits, static")
CONVERTED = {"gptq": "4 bits", "awq": "4 bits"}
FP8 = {"fp8 blocks": {"weight_block_size": [128, 128]}, "fp8, static": {"activation_scheme": "static"}}
"""Of which folders others say quant_method "fp8", and in which words."""
GGUF_TYPES = ("F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
SEARCHED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Types of the one matrix whose rows are whole blocks of them; the others of such a file are Q8_0."""
DOWN = "blk.0.ffn_down.weight"


@dataclass(frozen=True)
class Case:
    """One hostile model: its files by name, which of them is opened ("": the folder), what is done to them then."""

    family: str  # what a table has a row of
    kind: str
    files: Mapping[str, bytes]
    opened: str = ""
    then: Callable[[Path], object] | None = None

    def write(self, folder: Path) -> Path:
        """The path to open, in an emptied `folder`."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if self.then is not None:
            self.then(folder)
        return folder / self.opened


@dataclass(frozen=True)
class Corpus:
    """Sound models, and hostile ones by name."""

    sound: Mapping[str, Files]
    named: tuple[Case, ...]

    @classmethod
    def make(cls, work: Path, all_kinds: bool = True) -> Corpus:
        """Build the models, in `work`; without `all_kinds` few of either sort, which is quick."""
        source = test_gguf_checkpoint.make_source(_emptied(work / "source"), layers=1)
        halves = {name: each.half() for name, each in safetensors_package.load_file(source / WEIGHTS).items()}
        safetensors_package.save_file(halves, source / WEIGHTS)
        made = {"dense": source}
        for name, recipe in FOLDERS.items():
            if recipe and (all_kinds or name in FEW):
                given = CALIBRATION if recipe.startswith("gptq") or "static" in recipe else None
                made[name] = compress(source, work / name, recipe=recipe, calibration=given).path
        for to, name in CONVERTED.items() if all_kinds else ():
            made[to] = convert(made[name], work / to, to=to).path
        sound = {f"safetensors, {name}": _contents(folder) for name, folder in made.items()}
        if all_kinds:
            sound["safetensors, shards"] = _in_shards(_contents(source))
            sound |= {f"safetensors, {name} by method": _as_fp8(_contents(made[name]), FP8[name]) for name in FP8}
            sound["safetensors, squeezellm"] = _as_squeezellm(_contents(made["table and outliers"]))
            sound["safetensors, 2:4 masks"] = _as_masks(_contents(made["2:4 sparse"]))
        tensors, path = test_gguf_checkpoint.as_in_files(source), work / FILE
        metadata = {**test_gguf_checkpoint.TOKENIZER, "llama.block_count": 1}
        for kind in GGUF_TYPES if all_kinds else GGUF_TYPES[2:3]:
            test_gguf_checkpoint.write_file(path, tensors, kind, metadata)
            sound[f"GGUF, {kind}"] = {FILE: path.read_bytes()}
        for kind in SEARCHED if all_kinds else ("Q4_K",):
            blocks = ggml_search.encode(TYPES[kind], tensors[DOWN].float())
            more = {DOWN: (blocks, TYPES[kind], tuple(tensors[DOWN].shape))}
            test_gguf_checkpoint.write_file(path, tensors, "Q8_0", metadata, more)
            sound[f"GGUF, {kind}"] = {FILE: path.read_bytes()}
        named = [*_named(sound["safetensors, dense"]), *_packed(sound["safetensors, 4 bits"])]
        if all_kinds:
            named += [*_models(work), *_vocabularies(work)]
        return cls(sound, tuple(named))

    def case(self, seed: int, i: int) -> Case:
        """The i-th: the named ones first, then as many by chance as anybody wants."""
        if i < len(self.named):
            return self.named[i]
        rng = random.Random(f"{seed}/{i}")
        if rng.random() < 0.15:  # what was hostile already
            chosen = rng.choice([case for case in self.named if case.then is None and case.files])
            name, files, opened = "hostile already", dict(chosen.files), chosen.opened
        else:
            name = rng.choice(list(self.sound))
            files = dict(self.sound[name])
            opened = FILE if FILE in files else ""
        weights = [each for each in files if each.endswith((".safetensors", ".gguf"))]
        texts = [each for each in files if each.endswith(".json")]
        victim = rng.choice(weights if weights and (not texts or rng.random() < 0.75) else texts or list(files))
        where = "GGUF" if victim.endswith(".gguf") else "safetensors" if victim.endswith(".safetensors") else "JSON"
        damage = rng.choice([each for each in DAMAGE if each != TENSOR or where == "safetensors"])
        files[victim] = DAMAGE[damage](files[victim], rng)
        return Case(f"{where}: {damage}", f"{name}: {victim} {damage}", files, opened)


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _contents(folder: Path) -> Files:
    """The files that a reader looks at."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix in (".json", ".safetensors")}


def _as_squeezellm(files: Files) -> Files:
    """The same model in SqueezeLLM's own layout."""
    tensors, config = safetensors_package.load(files[WEIGHTS]), json.loads(files["config.json"])
    for module in config["quantization_config"]["modules"]:
        tensors[f"{module}.qweight"] = tensors.pop(f"{module}.weight.codes").t().contiguous()
        for ours, theirs in {"table": "lookup_table", "starts": "rows", "places": "cols", "extras": "vals"}.items():
            tensors[f"{module}.{theirs}"] = tensors.pop(f"{module}.weight.{ours}")
    config["quantization_config"] = {"quant_method": "squeezellm", "wbits": 4}
    return {**files, "config.json": json.dumps(config).encode(), WEIGHTS: safetensors_package.save(tensors)}


def _as_masks(files: Files) -> Files:
    """The same model as compressed-tensors stored 2:4 sparse ones."""
    tensors, config = safetensors_package.load(files[WEIGHTS]), json.loads(files["config.json"])
    for module, said in config["quantization_config"]["modules"].items():
        values, places = (tensors.pop(f"{module}.weight.{part}") for part in ("values", "places"))
        halves = [(places >> shift & 3).int() for shift in (0, 2, 4, 6)]
        low, high = (1 << halves[i] | 1 << halves[i + 1] for i in (0, 2))
        stored = {"compressed": values, "bitmask": (low | high << 4).byte(), "shape": torch.tensor(said["shape"])}
        tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"},
    }
    return {**files, "config.json": json.dumps(config).encode(), WEIGHTS: safetensors_package.save(tensors)}


def _as_fp8(files: Files, said: Mapping[str, object]) -> Files:
    """The same model as a checkpoint of quant_method "fp8"."""
    tensors = safetensors_package.load(files[WEIGHTS])
    renamed = {name.replace(".weight_scale", ".weight_scale_inv"): tensor for name, tensor in tensors.items()}
    config = json.loads(files["config.json"]) | {"quantization_config": {"quant_method": "fp8", **said}}
    return {**files, "config.json": json.dumps(config).encode(), WEIGHTS: safetensors_package.save(renamed)}


def _in_shards(files: Files) -> Files:
    """The same model in two weight files and an index."""
    tensors = safetensors_package.load(files[WEIGHTS])
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    place = {name: shard for shard, inside in shards.items() for name in inside}
    written = {s: safetensors_package.save({name: tensors[name] for name in inside}) for s, inside in shards.items()}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": place}).encode()
    return {"config.json": files["config.json"], INDEX: index, **written}


# --- kinds with a name ------------------------------------------------------------------------------------------------


def _named(sound: Files) -> list[Case]:
    config = {"config.json": sound["config.json"]}
    cases = [
        Case("safetensors: named", kind, {**config, WEIGHTS: content})
        for kind, content in {**test_safetensors.REFUSED, **test_safetensors.ACCEPTED}.items()
    ]
    cases += [Case(COSTLY, kind, {**config, WEIGHTS: make()}) for kind, make in test_safetensors.COSTLY.items()]
    cases += [
        Case("GGUF: named", kind, {FILE: content}, FILE)
        for kind, content in [
            *((kind, content) for kind, (content, _) in test_gguf.REFUSED.items()), *test_gguf.ACCEPTED.items()
        ]
    ]  # fmt: skip
    shards = {name: safetensors_package.save(tensors) for name, tensors in test_folder.SHARDS.items()}
    indices = [*(found for found, _ in test_folder.INDEX_REFUSED), {f"d{i}": test_folder.ONE for i in range(1_000_000)}]
    cases += [
        Case("JSON: named", f"index {i}", {**config, **shards, INDEX: json.dumps({"weight_map": found}).encode()})
        for i, found in enumerate(indices)
    ]
    cases += [
        Case("JSON: named", f"config {i}", {**sound, "config.json": text})
        for i, (text, _) in enumerate(test_folder.CONFIG_REFUSED)
    ]
    return [*cases, *_no_plain_files(sound)]


def _packed(sound: Files) -> list[Case]:
    """Packed weights whose config's patterns would take for ever, or whose groups of columns more than all memory."""
    cases = []
    for text in (".?" * 60 + "Z", ".*.*.*.*.*Z", "(?:a|a)" * 30 + "Z", ".*.*.*[Z]", "a{99999999999}"):
        config = json.loads(sound["config.json"])
        for group in config["quantization_config"]["config_groups"].values():
            group["targets"] = [f"re:{text}"]
        cases.append(Case("JSON: named", f"pattern {text}", {**sound, "config.json": json.dumps(config).encode()}))
    tensors = safetensors_package.load(sound[WEIGHTS])
    module = next(name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed"))
    for group, dtype in ((2**31 - 1, torch.int32), (2**62, torch.int64), (-2, torch.int64)):
        index = torch.full((int(tensors[f"{module}.weight_shape"][1]),), group, dtype=dtype)
        weights = safetensors_package.save({**tensors, f"{module}.weight_g_idx": index})
        cases.append(Case("safetensors: named", f"columns of group {group}", {**sound, WEIGHTS: weights}))
    return cases


def _models(work: Path) -> list[Case]:
    """GGUF files that are sound, and no model."""
    tensors = test_gguf_checkpoint.as_in_files(test_gguf_checkpoint.make_source(_emptied(work / "three")))
    cases = []
    for kind, (metadata, _) in test_gguf_checkpoint.METADATA_REFUSED.items():
        path = test_gguf_checkpoint.write_file(work / FILE, tensors, "Q4_0", metadata)
        cases.append(Case("GGUF: no model", kind, {FILE: path.read_bytes()}, FILE))
    for kind, (more, less, _) in test_gguf_checkpoint.TENSORS_REFUSED.items():
        path = test_gguf_checkpoint.write_file(work / FILE, tensors, "F32", None, more, less)
        cases.append(Case("GGUF: no model", kind, {FILE: path.read_bytes()}, FILE))
    return cases


def _vocabularies(work: Path) -> list[Case]:
    """GGUF files of which no tokenizer can be made; those left out that GGUF itself cannot say."""
    cases, sound = [], (gguf_metadata.small_gpt2(), gguf_metadata.small_llama())
    for i, (change, words) in enumerate(test_gguf_refused.REFUSED):
        metadata = change(*sound)
        try:
            path = test_gguf_checkpoint.write_file(work / FILE, {"a": torch.zeros(1)}, "F32", metadata)
        except ValueError:
            continue
        cases.append(Case("GGUF: no vocabulary", f"{i}: {words}", {FILE: path.read_bytes()}, FILE))
    return cases


def _no_plain_files(sound: Files) -> list[Case]:
    """What is no regular file, and files that do not end where they should."""
    huge = test_safetensors.pack({"a": test_safetensors.entry("I8", (TERABYTE,), (0, TERABYTE))})
    huge_gguf = test_gguf.one(dims=(TERABYTE // 4,), data=b"")
    plain, alone = {"config.json": sound["config.json"]}, {WEIGHTS: sound[WEIGHTS]}

    def at(name: str, do: Callable[[Path], object]) -> Callable[[Path], object]:
        return lambda folder: do(folder / name)

    def grown(size: int) -> Callable[[Path], object]:
        return lambda path: os.truncate(path, size)

    makers: dict[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero"),
        "a folder": lambda path: path.mkdir(), "a link in a circle": lambda path: path.symlink_to(path),
        "a link to nowhere": lambda path: path.symlink_to(path.parent / "absent"),
    }  # fmt: skip
    cases = []
    for what, make in makers.items():
        cases.append(Case("no plain file", f"weights are {what}", plain, "", at(WEIGHTS, make)))
        cases.append(Case("no plain file", f"config is {what}", alone, "", at("config.json", make)))
        cases.append(Case("no plain file", f"index is {what}", sound, "", at(INDEX, make)))
        cases.append(Case("no plain file", f"GGUF is {what}", {}, FILE, at(FILE, make)))
    weights, files = {**plain, WEIGHTS: huge}, {FILE: huge_gguf}
    cases.append(Case("no plain file", "a terabyte", weights, "", at(WEIGHTS, grown(len(huge) + TERABYTE))))
    cases.append(Case("no plain file", "a terabyte and one", weights, "", at(WEIGHTS, grown(len(huge) + TERABYTE + 1))))
    cases.append(Case("no plain file", "a terabyte of GGUF", files, FILE, at(FILE, grown(len(huge_gguf) + TERABYTE))))
    cases.append(Case("no plain file", "a terabyte of zeros", {}, FILE, at(FILE, _zeros)))
    cases.append(
        Case("no plain file", "a terabyte of config", {WEIGHTS: sound[WEIGHTS]}, "", at("config.json", _zeros))
    )
    cases.append(Case("no plain file", "a terabyte of index", sound, "", at(INDEX, _zeros)))
    return cases


def _zeros(path: Path) -> None:
    path.touch()
    os.truncate(path, TERABYTE)


# --- damage by chance -------------------------------------------------------------------------------------------------

INTEGERS = [0, 1, 2, 13, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
WORDS = ["-1", "-0", "0.5", "1e308", "1e999", "NaN", "null", "true", '"1"', "[]", "{}", '"\\ud800"', "[[[[[[[[]]]]]]]]"]
WORDS += [str(value) for value in INTEGERS] + ["9" * 5000]


def _header(content: bytes) -> int:
    """Where the header ends, as far as one can tell."""
    length = int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and length <= len(content) - 8:
        return 8 + length
    return min(len(content), 16384)


def _place(content: bytes, rng: random.Random) -> int:
    """Where to do harm: in the header, mostly."""
    return rng.randrange(max(1, _header(content) if rng.random() < 0.8 else len(content)))


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: _place(content, rng) if rng.random() < 0.5 else rng.randrange(len(content) + 1)]


def _flip(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8)) if damaged else 0):
        damaged[_place(content, rng)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _number(content: bytes, rng: random.Random) -> bytes:
    """Another number: as text in JSON, elsewhere as four or eight bytes."""
    end = _header(content)
    begin = 8 if content[8:9] == b"{" else 0
    if content[begin : begin + 1] == b"{":
        found = list(re.finditer(rb"-?\d+(\.\d+)?", content[begin:end]))
        if found:
            match, word = rng.choice(found), rng.choice(WORDS).encode()
            text = content[begin:end][: match.start()] + word + content[begin:end][match.end() :]
            return _sized(text, content, begin, end, rng)
    size = rng.choice((4, 8))
    at = _place(content, rng)
    return content[:at] + (rng.choice(INTEGERS) % (1 << (8 * size))).to_bytes(size, "little") + content[at + size :]


def _sized(text: bytes, content: bytes, begin: int, end: int, rng: random.Random) -> bytes:
    """A header's new text in its file, often with the length that it now has."""
    if begin == 0:
        return text
    return (struct.pack("<Q", len(text)) if rng.random() < 0.8 else content[:8]) + text + content[end:]


def _pieces(content: bytes, rng: random.Random) -> bytes:
    """A piece repeated, left out, or put elsewhere."""
    end, begin = _header(content), 8 if content[8:9] == b"{" else 0
    text = content[begin:end]
    first, last = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    last = min(last, first + rng.choice((1, 4, 8, 40, 400)))
    piece, at = text[first:last], rng.randrange(len(text) + 1)
    changed = rng.choice(
        (text[:first] + text[last:], text[:at] + piece + text[at:], text[:first] + piece + text[first:])
    )
    return _sized(changed, content, begin, end, rng) if begin else changed + content[end:]


def _bytes(content: bytes, rng: random.Random) -> bytes:
    at = _place(content, rng)
    return content[:at] + rng.randbytes(rng.choice((1, 2, 8, 64))) + content[at + rng.choice((0, 1, 8)) :]


def _tensor(content: bytes, rng: random.Random) -> bytes:
    """Another tensor in one's place, in a sound file: of another shape or dtype, of values that nothing should have."""
    try:
        tensors = safetensors_package.load(content)
    except Exception:  # of the package's own kind; damaged before
        return _flip(content, rng)
    # What was damaged before may be of a dtype that only the package knows: complex numbers.
    solid = sorted(name for name, tensor in tensors.items() if tensor.numel() and not tensor.is_complex())
    if not solid:
        return _flip(content, rng)
    name = rng.choice(solid)
    old = tensors.pop(name)
    many = torch.zeros(rng.choice((0, 1, 3, 100_000)), dtype=old.dtype)
    other = rng.choice([torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool])
    if old.dtype.is_floating_point:
        values = [0.0, -1.0, 448.0, torch.nan, torch.inf]
    else:
        values = [0, 1, torch.iinfo(old.dtype).min, torch.iinfo(old.dtype).max] if old.dtype != torch.bool else [0, 1]
    new = {
        "gone": {},
        "renamed": {rng.choice((name + "_", f"{name}.weight", "model.other")): old},
        "scalar": {name: old.flatten()[:1].reshape(())},
        "long": {name: many},
        "flat": {name: old.flatten()},
        "deep": {name: old[None]},
        "turned": {name: old.T.contiguous() if old.ndim == 2 else old},
        "half": {name: old[: len(old) // 2] if old.ndim else old},
        "cast": {name: old.float().to(other)},
        "filled": {name: torch.full_like(old.float(), rng.choice(values)).to(old.dtype) if old.dtype.is_floating_point
                   else torch.full_like(old, rng.choice(values))},
        "noise": {name: torch.tensor(list(rng.randbytes(old.nbytes)), dtype=torch.uint8).view(old.dtype).view(old.shape)
                  if old.ndim and old.dtype != torch.bool else old},
    }  # fmt: skip
    return safetensors_package.save(tensors | new[rng.choice(list(new))])


TENSOR = "another tensor"
DAMAGE: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "cut short": _cut,
    "bits flipped": _flip,
    "another number": _number,
    "pieces moved": _pieces,
    "bytes put in": _bytes,
    TENSOR: _tensor,
}


# --- what must hold ---------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of a case. `seconds` (of the processor) and `bytes` are the most that any way of opening it took;
    `allowance` is what four times the header may take besides."""

    refused: str | None = None
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    bytes: int = 0
    allowance: int = 0


class Memory:
    """The most memory of this process while a block runs, above what it had before, by the kernel's count."""

    def __enter__(self) -> Memory:
        ctypes.CDLL(None).malloc_trim(0)  # or what an earlier case left behind would hide what this one takes
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.taken = max(0, self._read("VmHWM") - self.before)

    @staticmethod
    def _read(name: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{name}:")[1].split()[0]) << 10


def examine(path: Path) -> Outcome:
    """Open what lies at `path` in every way, then read and run it where nothing speaks against it."""
    outcome = Outcome(allowance=4 * _on_disk(path))
    ways: list[Callable[[Path], object]] = [inspect, stored]
    if path.name == FILE:
        ways.append(_tokenizer)
    gc.freeze()  # or the collector would walk through what thousands of tests left behind, at this file's expense
    for way in ways:
        memory, began = Memory(), time.process_time()
        try:
            with memory:
                way(path)
        except CheckpointError as error:
            outcome.refused = said = str(error)
            if len(said) > MESSAGE + len(str(path)) or not said.isprintable() or str(path.parent) not in said:
                outcome.wrong.append(f"{way.__name__}: does not say which file, shortly: {said[:200]!r}")
        except Exception as error:
            outcome.refused = f"{type(error).__name__}: {error}"
            outcome.wrong.append(f"{way.__name__} raised {type(error).__name__}: {str(error)[:200]}")
        outcome.seconds = max(outcome.seconds, time.process_time() - began)
        outcome.bytes = max(outcome.bytes, memory.taken)
    gc.unfreeze()
    if outcome.refused is None:
        try:
            outcome.wrong += _read_otherwise(path)
            outcome.wrong += _run(path)
        except Exception as error:
            outcome.wrong.append(f"reading raised {type(error).__name__}: {str(error)[:200]}")
    return outcome


def _tokenizer(path: Path) -> None:
    if vocabulary.has_tokenizer(path):
        vocabulary.tokenizer(path).encode("a text")


def _on_disk(path: Path) -> int:
    """Bytes that the files take: an upper bound of their headers, and a close one, for these models are small."""
    try:
        files = [path] if path.name == FILE else list(path.iterdir())
        stats = [each.stat() for each in files if each.is_file()]
    except OSError:
        return 0
    return sum(min(each.st_size, 512 * each.st_blocks) for each in stats)


def _read_otherwise(path: Path) -> list[str]:
    """Tensors that are not, bit for bit, what the format's own package reads."""
    if path.name == FILE:
        file, reader = GgufFile(path), gguf_package.GGUFReader(path)
        theirs = {tensor.name: tensor.data.tobytes() for tensor in reader.tensors}
        ours = {name: file.read(name).numpy().tobytes() for name in file.names()}
    else:
        folder = Folder(path)
        found = {k: v for name in folder.files for k, v in safetensors_package.load_file(path / name).items()}
        theirs, ours = ({k: _raw(v) for k, v in each.items()} for each in (found, {n: folder.read(n) for n in found}))
        if set(folder.names()) != set(found):
            return ["has other tensors than its package reads"]
    return [
        f"{name!r} is not what its package reads" for name in theirs.keys() | ours if theirs.get(name) != ours.get(name)
    ]


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _run(path: Path) -> list[str]:
    """Load it for both kinds of kernels, and run a few tokens. What has no sentence against it must give logits."""
    wrong = []
    for store in (None, dispatch.store("exact")):
        try:
            decoder = opening.load(path, torch.float32, store=store)
            count = min(4, decoder.config.vocab_size, decoder.config.context)
            logits = decoder.forward(torch.arange(count), ForwardBatch((count,), count, decoder.cache(count)))
        except ValueError as error:
            if not str(error).isprintable():
                wrong.append(f"running says {str(error)[:200]!r}")
            continue
        if logits.shape != (count, decoder.config.vocab_size):
            wrong.append(f"running gives logits of shape {list(logits.shape)}")
    return wrong
