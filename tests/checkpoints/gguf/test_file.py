"""The GGUF reader against a corpus of malformed files, random damage, and the gguf package and llama.cpp as oracles."""

from __future__ import annotations

import difflib
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as oracle
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from attar.checkpoints import writer
from attar.checkpoints.gguf import header as gguf_header
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.values import Array, Typed
from attar.checkpoints.gguf.writer import atomic_gguf, plan
from attar.checkpoints.strict_io import NEAR, CheckpointError
from attar.formats.codecs.ggml import TYPES
from tests.errors import user_error

BYTES_PER_REFUSAL = 32 << 20  # and four times the header

U8, U16, U32, I32, F32, BOOL, STR, ARR, U64, F64 = 0, 2, 4, 5, 6, 7, 8, 9, 10, 12
ROOT = Path(__file__).resolve().parents[3]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return u64(len(data) if length is None else length) + data


def key(name: str | bytes, kind: int = U32, value: bytes = u32(7)) -> bytes:
    return text(name) + u32(kind) + value


def array(name: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return key(name, ARR, u32(kind) + u64(count) + data)


def info(
    name: str | bytes = "a", dims: tuple[int, ...] = (2,), kind: int = 0, at: int = 0, rank: int | None = None
) -> bytes:
    return text(name) + u32(len(dims) if rank is None else rank) + b"".join(map(u64, dims)) + u32(kind) + u64(at)


def pack(
    keys: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    keys, infos = keys or [], infos or []
    counts = u64(len(infos) if n_tensors is None else n_tensors) + u64(len(keys) if n_keys is None else n_keys)
    header = magic + u32(version) + counts + b"".join(keys) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + data


def one(data: bytes = bytes(8), keys: list[bytes] | None = None, **fields: Any) -> bytes:
    return pack(keys, [info(**fields)], data)


def alignment(kind: int, value: bytes) -> bytes:
    return one(keys=[key("general.alignment", kind, value)])


GOOD = one()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

REFUSED: dict[str, tuple[bytes, str]] = {
    # other formats, versions, lengths
    "empty": (b"", "truncated: 0 bytes"),
    "three bytes": (b"GGU", "truncated: 3 bytes"),
    "magic alone": (b"GGUF", "truncated: the version would end at byte 8, the file has 4"),
    "magic of another": (b"GGUE" + GOOD[4:], "not a GGUF file: it is one that begins b'GGUE'"),
    "magic lower case": (b"gguf" + GOOD[4:], "not a GGUF file: it is one that begins b'gguf'"),
    "magic reversed": (b"FUGG" + GOOD[4:], "with its bytes in reverse order"),
    "zeros": (bytes(64), "not a GGUF file"),
    "GGML of 2023": (b"ggjt" + bytes(64), "a format of 2023"),
    "zip": (b"PK\x03\x04" + bytes(64), "a zip archive, as torch.save writes"),
    "ELF": (b"\x7fELF\x02\x01\x01" + bytes(64), "an ELF program"),
    "pickle": (b"\x80\x04\x95\x10" + bytes(64), "not a GGUF file"),
    "safetensors": (u64(2) + b"{}", "a safetensors file"),
    "web page": (b"\n<!DOCTYPE html><html></html>", "a web page"),
    "LFS pointer": (LFS, "git lfs pull"),
    "version 0": (pack(version=0), "GGUF version 0 is unknown: attar reads 2 and 3"),
    "version 1": (pack(version=1), "GGUF version 1, of August 2023, is not read"),
    "version 4": (pack(version=4), "GGUF version 4 is unknown"),
    "version 99": (pack(version=99), "GGUF version 99 is unknown"),
    "version 2^32 - 1": (pack(version=2**32 - 1), "GGUF version 4294967295 is unknown"),
    "big-endian 3": (pack(version=3 << 24), "its numbers are big-endian; convert it with gguf-convert-endian"),
    "big-endian 2": (pack(version=2 << 24), "its numbers are big-endian"),
    # counts
    "tensors 2^63 - 1": (pack(n_tensors=2**63 - 1), "9223372036854775807 tensors; attar accepts 16384"),
    "tensors 2^64 - 1": (pack(n_tensors=2**64 - 1), "18446744073709551615 tensors; attar accepts 16384"),
    "tensors 16,385": (pack(n_tensors=16_385), "16385 tensors; attar accepts 16384"),
    "tensors without room": (pack(n_tensors=1000), "truncated: 0 keys and 1000 tensors take 33000 bytes or more"),
    "one tensor more": (pack(n_tensors=2, infos=[info()]), "truncated: 0 keys and 2 tensors take 66 bytes or more"),
    "keys 2^63 - 1": (pack(n_keys=2**63 - 1), "9223372036854775807 keys; attar accepts 16384"),
    "keys 2^64 - 1": (pack(n_keys=2**64 - 1), "18446744073709551615 keys; attar accepts 16384"),
    "keys 16,385": (pack(n_keys=16_385), "16385 keys; attar accepts 16384"),
    "keys without room": (pack(n_keys=16_384), "truncated: 16384 keys and 0 tensors take 229376 bytes or more"),
    "one key more": (pack([key("a", U8, b"\1")], n_keys=2, alignment=1), "truncated: 2 keys and 0 tensors take 28 by"),
    # keys
    "key empty": (pack([key("")]), "the name of key 0 is an empty name"),
    "key length 2^40": (pack([text("a", 2**40) + bytes(64)]), "the name of key 0 has 1099511627776 bytes, more than"),
    "key length 2^64 - 1": (pack([text("a", 2**64 - 1) + bytes(64)]), "the name of key 0 has 18446744073709551615 b"),
    "key of 257 bytes": (pack([key("k" * 257)]), "the name of key 0 has 257 bytes, more than 256"),
    "key cut off": (pack([text("a", 200) + bytes(8)]), "truncated: the name of key 0 would end at byte 232"),
    "key not UTF-8": (pack([key(b"\xff\xfe")]), "the name of key 0 is not UTF-8"),
    "key surrogate": (pack([key("\ud800")]), "the name of key 0 is not UTF-8"),
    "key with NUL": (pack([key("a\0b")]), "the name of key 0 is a name with characters that do not print"),
    "key with newline": (pack([key("a\nb")]), "the name of key 0 is a name with characters that do not print"),
    "key with ANSI": (pack([key("\x1b[31mred")]), "the name of key 0 is a name with characters that do not print"),
    "key right to left": (pack([key("a\u202eb")]), "the name of key 0 is a name with characters that do not print"),
    "key twice": (pack([key("a"), key("b"), key("a")]), "key 'a' is given twice"),
    "key twice, other types": (pack([key("a"), key("a", STR, text("x"))]), "key 'a' is given twice"),
    # types of values
    "value type 13": (pack([key("a", 13)]), "key 'a' has the value type 13, which does not exist"),
    "value type 200": (pack([key("a", 200)]), "key 'a' has the value type 200, which does not exist"),
    "value type 2^32 - 1": (pack([key("a", 2**32 - 1)]), "key 'a' has the value type 4294967295"),
    "value missing": (pack([key("abcdef", U64, b"")], alignment=1), "truncated: key 'abcdef' would end at byte 50"),
    "bool of 7": (pack([key("a", BOOL, b"\7")]), "key 'a' is a bool of 7: neither 0 nor 1"),
    "bool of 255": (pack([key("a", BOOL, b"\xff")]), "key 'a' is a bool of 255"),
    "bool of 2 in an array": (pack([array("a", BOOL, 3, b"\0\1\2")]), "key 'a' holds a bool that is neither 0 nor 1"),
    # strings
    "string length 2^40": (pack([key("a", STR, u64(2**40))]), "key 'a' is a string of 1099511627776 bytes, more than"),
    "string length 2^63": (pack([key("a", STR, u64(2**63))]), "key 'a' is a string of 9223372036854775808 bytes"),
    "string length 2^64 - 1": (pack([key("a", STR, u64(2**64 - 1))]), "key 'a' is a string of 18446744073709551615"),
    "string of 16 MiB and 1": (pack([key("a", STR, text(bytes(2**24 + 1)))]), "key 'a' is a string of 16777217 bytes"),
    "string cut off": (pack([key("a", STR, text("xyz", 100))]), "truncated: key 'a' would end at byte 145"),
    # arrays
    "array length 2^40": (pack([array("a", STR, 2**40)]), "key 'a' has 1099511627776 elements; attar accepts 1048576"),
    "array of bytes, length 2^40": (pack([array("a", U8, 2**40)]), "key 'a' has 1099511627776 elements"),
    "array length 2^61": (pack([array("a", U64, 2**61)]), "key 'a' has 2305843009213693952 elements"),
    "array length 2^64 - 1": (pack([array("a", U8, 2**64 - 1)]), "key 'a' has 18446744073709551615 elements"),
    "array length 1,048,577": (pack([array("a", U8, 2**20 + 1)]), "key 'a' has 1048577 elements"),
    "array longer than the file": (pack([array("a", U32, 1000)]), "truncated: key 'a' would end at byte 4049"),
    "strings longer than the file": (pack([array("a", STR, 1000)]), "truncated: 1000 strings of key 'a' take 8000"),
    "1,048,577 strings": (
        pack([array("a", STR, 2**19, bytes(2**22)), array("b", STR, 2**19 + 1)]),
        "key 'b': more than the 1048576 strings",
    ),
    "string in an array cut off": (pack([array("a", STR, 1, text("x", 500))]), "key 'a' would end at byte 557"),
    "second string cut off": (
        pack([array("a", STR, 2, text("x" * 20))], alignment=1), "truncated: the length of string 1 of key 'a'",
    ),
    "string in an array, 2^63": (pack([array("a", STR, 1, u64(2**63))]), "string 0 of key 'a' has 9223372036854775808"),
    "token of 10 MB": (pack([array("a", STR, 1, text(bytes(10**7)))]), "string 0 of key 'a' has 10000000 bytes"),
    "array of arrays": (pack([array("a", ARR, 1, u32(U8) + u64(0))]), "key 'a' is an array of arrays"),
    "arrays nested 20,000": (pack([key("a", ARR, (u32(ARR) + u64(1)) * 20_000)]), "key 'a' is an array of arrays"),
    "array of type 77": (pack([array("a", 77, 1, bytes(8))]), "key 'a' has the value type 77"),
    # alignment and parts
    "alignment 0": (alignment(U32, u32(0)), "general.alignment must be a u32, a power of two from 8 to 65536"),
    "alignment 1": (alignment(U32, u32(1)), "not u32 1"),
    "alignment 13": (alignment(U32, u32(13)), "not u32 13"),
    "alignment 2^17": (alignment(U32, u32(2**17)), "not u32 131072"),
    "alignment 2^31": (alignment(U32, u32(2**31)), "not u32 2147483648"),
    "alignment a u64": (alignment(U64, u64(32)), "65536, not u64"),
    "alignment negative": (alignment(I32, struct.pack("<i", -32)), "65536, not i32"),
    "alignment a string": (alignment(STR, text("32")), "65536, not string"),
    "alignment a float": (alignment(F32, struct.pack("<f", 32)), "65536, not f32"),
    "alignment an array": (alignment(ARR, u32(U32) + u64(1) + u32(32)), "65536, not [u32]"),
    "one of 3 parts": (one(keys=[key("split.count", U16, b"\3\0")]), "has split.count 3, but no split.no"),
    "parts a string": (one(keys=[key("split.count", STR, text("3"))]), "split.count must be a whole number, not str"),
    "parts an array": (one(keys=[array("split.count", U16, 1, b"\3\0")]), "must be a whole number, not [u16]"),
    # tensors' names
    "tensor name empty": (one(name=""), "the name of tensor 0 is an empty name"),
    "tensor name of 65 bytes": (one(name="n" * 65), "the name of tensor 0 has 65 bytes, more than 64"),
    "tensor name 2^40": (pack([], [text("a", 2**40) + bytes(64)]), "the name of tensor 0 has 1099511627776 bytes"),
    "tensor name not UTF-8": (one(name=b"\xff"), "the name of tensor 0 is not UTF-8"),
    "tensor name with ..": (one(name="../a"), "the name of tensor 0 is a name that looks like a path"),
    "tensor name with NUL": (one(name="a\0b"), "the name of tensor 0 is a name with characters that do not print"),
    "tensor twice": (pack([], [info(), info(at=32)], bytes(40)), "tensor 'a' is given twice"),
    # shapes
    "no dimensions": (one(dims=()), "tensor 'a' has 0 dimensions; a GGUF tensor has 1 to 4"),
    "5 dimensions": (one(dims=(2, 1, 1, 1, 1)), "tensor 'a' has 5 dimensions"),
    "2^31 dimensions": (one(rank=2**31), "tensor 'a' has 2147483648 dimensions"),
    "size 0": (one(dims=(0,)), "tensor 'a' has the shape [0]: sizes must be positive"),
    "size 0 among others": (one(dims=(32, 0, 2)), "tensor 'a' has the shape [2, 0, 32]: sizes must be positive"),
    "size 2^63": (one(dims=(2**63,)), "tensor 'a' has the shape [9223372036854775808]"),
    "elements 2^64": (one(dims=(2**32, 2**32)), "elements fewer than 2^60 in all"),
    "elements wrap to 4": (one(dims=(2**62 + 1, 4)), "elements fewer than 2^60 in all"),
    "bytes 2^62": (one(dims=(2**59, 1), kind=0), "truncated: tensor 'a' ends at byte 2305843009213694"),
    "Q4_0 row of 16": (one(dims=(16, 2), kind=2), "tensor 'a' has the shape [2, 16]: Q4_0 stores rows in blocks"),
    "Q4_K row of 32": (one(dims=(32, 8), kind=12), "tensor 'a' has the shape [8, 32]: Q4_K stores rows in blocks"),
    "Q6_K row of 288": (one(dims=(288,), kind=14), "Q6_K stores rows in blocks of 256, which do not divide 288"),
    # types
    "type 4, withdrawn": (one(kind=4), "tensor 'a' has the type 4, which attar does not know: it was withdrawn"),
    "type 31, withdrawn": (one(kind=31), "tensor 'a' has the type 31, which attar does not know: it was withdrawn"),
    "type 9, of programs": (one(kind=9), "it belongs to running programs, not to files"),
    "type 15, of programs": (one(kind=15), "it belongs to running programs, not to files"),
    "type 42": (one(kind=42), "tensor 'a' has the type 42, which attar does not know"),
    "type 999": (one(kind=999), "tensor 'a' has the type 999, which attar does not know"),
    "type 2^32 - 1": (one(kind=2**32 - 1), "tensor 'a' has the type 4294967295"),
    # offsets and data
    "offset unaligned": (one(at=8, data=bytes(64)), "tensor 'a' begins at byte 8 of the data, which is no multiple of"),
    "offset not 0": (one(at=32, data=bytes(64)), "tensor 'a' leaves a hole of 32 bytes (begins at 32, not 0)"),
    "offset beyond the end": (one(at=1 << 40), "leaves a hole of 1099511627776 bytes"),
    "offset wraps at 2^64": (one(at=2**64 - 32), "leaves a hole of 18446744073709551584 bytes"),
    "overlap": (pack([], [info(), info("b")], bytes(40)), "tensor 'b' overlaps the one before it (begins at 0,"),
    "overlap by half": (
        pack([], [info(dims=(16,)), info("b", at=32)], bytes(96)), "tensor 'b' overlaps the one before it",
    ),
    "hole": (pack([], [info(), info("b", at=64)], bytes(96)), "tensor 'b' leaves a hole of 32 bytes"),
    "truncated by a byte": (GOOD[:-1], "truncated: tensor 'a' ends at byte 72, the file has 71"),
    "no data": (GOOD[:-8], "truncated: tensor 'a' ends at byte 72, the file has 64"),
    "second tensor cut": (pack([], [info(), info("b", at=32)], bytes(39)), "truncated: tensor 'b' ends at byte 136"),
}  # fmt: skip

ACCEPTED: dict[str, bytes] = {
    "plain": GOOD,
    "version 2": pack([], [info()], bytes(8), version=2),
    "padded at the end": GOOD + bytes(24),
    "alignment 8": pack([key("general.alignment", U32, u32(8))], [info()], bytes(8), alignment=8),
    "alignment 65536": pack([key("general.alignment", U32, u32(65536))], [info()], bytes(8), alignment=65536),
    "every scalar": pack(
        [key(f"k{kind}", kind, bytes([1]) + bytes(7)[: size - 1]) for kind, size in enumerate((1, 1, 2, 2, 4, 4, 4, 1))]
        + [key("k8", STR, text("\u00fc\0\n")), *(key(f"k{kind}", kind, bytes(8)) for kind in (10, 11, 12))],
        [info()], bytes(8),
    ),
    "key of 256 bytes": pack([key("k" * 256)], [info()], bytes(8)),
    "name of 64 bytes": one(name="n" * 64),
    "four dimensions": one(dims=(2, 1, 1, 1)),
    "unordered": pack([], [info("b", at=32), info()], bytes(40)),
    "one part": one(keys=[key("split.count", U16, b"\1\0")]),
    "Q4_K row of 256": one(dims=(256,), kind=12, data=bytes(144)),
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(REFUSED) >= 100


@pytest.mark.parametrize("kind", REFUSED)
def test_malformed_files_are_refused_with_the_reason(kind: str, write: Callable[[bytes], Path]) -> None:
    content, words = REFUSED[kind]
    path = write(content)
    with pytest.raises(CheckpointError) as caught:
        GgufFile(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert words in message
    assert len(message) < 1000  # a hostile header does not flood the terminal
    assert message.isprintable()


def test_refusals_take_little_memory(write: Callable[[bytes], Path]) -> None:
    tracemalloc.start()
    try:
        for content, _ in REFUSED.values():
            path, header = write(content), len(content)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(CheckpointError):
                GgufFile(path)
            assert tracemalloc.get_traced_memory()[1] - before < BYTES_PER_REFUSAL + 4 * header
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ACCEPTED)
def test_valid_files_are_accepted(kind: str, write: Callable[[bytes], Path]) -> None:
    file = GgufFile(write(ACCEPTED[kind]))
    assert len(file.names()) in (1, 2)
    for name in file.names():
        assert file.read(name).count_nonzero() == 0
    assert all(decoded(file.metadata[k]) is not None for k in file.metadata)


def test_the_header_is_capped(write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER", 1000)
    end = len(pack([key("a", STR, text(""))], alignment=1))
    assert GgufFile(write(pack([key("a", STR, text(bytes(1000 - end)))]))).metadata["a"] == "\0" * (1000 - end)
    with user_error("checkpoint_too_large"):
        GgufFile(write(pack([key("a", STR, text(bytes(1001 - end)))])))


def test_a_sparse_file_of_a_terabyte_is_judged_by_its_header(write: Callable[[bytes], Path]) -> None:
    path = write(one(dims=(2**38,)))
    os.truncate(path, 64 + 2**40)
    assert GgufFile(path).info("a").shape == (2**38,)
    os.truncate(path, 64 + 2**40 - 1)
    with user_error("checkpoint_incomplete"):
        GgufFile(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, words in (("pipe", "file_wrong_kind"), ("loop", "file_failed"), ("absent", "file_not_found")):
        with user_error(words):
            GgufFile(tmp_path / name)
    with user_error("file_wrong_kind"):
        GgufFile(tmp_path)


def test_a_file_that_shrinks_is_an_error_with_a_name(write: Callable[[bytes], Path]) -> None:
    path = write(GOOD)
    file = GgufFile(path)
    os.truncate(path, 68)
    with user_error("checkpoint_changed"):
        file.read("a")


def test_arrays_are_decoded_when_they_are_iterated_over(write: Callable[[bytes], Path]) -> None:
    file = GgufFile(write(pack([array("a", STR, 2, text("good") + text(b"\xff"))])))
    found = file.metadata["a"]
    assert (len(found), repr(found)) == (2, "an array of 2 string")
    assert "good" in found
    with user_error("gguf_malformed"):
        list(found)


@pytest.mark.parametrize("name", ["general.alignment", "split.count"])
def test_arrays_are_not_decoded_where_the_header_has_a_number(name: str, write: Callable[[bytes], Path]) -> None:
    path = write(pack([array(name, U64, 2**20, b"\xff" * 2**23)]))
    tracemalloc.start()
    try:
        with user_error("gguf_malformed"):
            GgufFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (
        peak < 4 * path.stat().st_size
    )  # the header thrice, while it grows; Python's numbers would be six times as much


def test_near_misses_are_looked_for_among_few_names(
    write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [info(f"blk.{i}.weight", at=32 * i) for i in range(1000)]
    file = GgufFile(write(pack([], many, bytes(32 * 1000 - 24))))
    seen: list[str] = []

    def matches(name: str, names: list[str], **_: object) -> list[str]:
        seen.extend(names)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", matches)
    with user_error("checkpoint_incomplete"):
        file.info("blk")
    assert len(seen) == NEAR < 1000


SMALL = pack(
    [
        key("general.architecture", STR, text("llama")), key("a.f", F32, struct.pack("<f", 1e-5)),
        array("a.list", STR, 2, text("x") + text("yz")), array("a.flags", BOOL, 2, b"\0\1"),
    ],
    [info("blk.0.w", (32, 2), 2), info("b", (3,), 0, at=64)],
    bytes(range(36)) + bytes(28) + bytes(12),
)  # fmt: skip
HEADER_END = len(SMALL) - 76


def test_truncation_at_every_byte_is_refused(write: Callable[[bytes], Path]) -> None:
    assert GgufFile(write(SMALL)).names() == ("blk.0.w", "b")
    for size in range(len(SMALL)):
        with pytest.raises(CheckpointError):
            GgufFile(write(SMALL[:size]))


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_refused_or_read_as_they_stand(seed: int, write: Callable[[bytes], Path]) -> None:
    """Nothing but a CheckpointError is ever raised, and what is accepted lies where the header says."""
    rng, refused, runs = random.Random(seed), 0, 200
    for _ in range(runs):
        damaged = bytearray(SMALL)
        for _ in range(rng.choice((1, 1, 2, 8))):
            bit = rng.randrange(8 * HEADER_END)
            damaged[bit // 8] ^= 1 << bit % 8
        try:
            file = GgufFile(write(bytes(damaged)))
            for name in file.metadata:
                assert decoded(file.metadata[name]) is not None
            for name in file.names():
                tensor = file.info(name)
                start = file.header.data + tensor.begin
                assert file.read(name).numpy().tobytes() == bytes(damaged[start : start + tensor.end - tensor.begin])
        except CheckpointError:
            refused += 1
    assert runs * 0.4 < refused < runs


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.binary(max_size=300))
def test_any_bytes_after_the_counts_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, rest: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(b"GGUF" + u32(3) + u64(1) + u64(1) + rest)
    try:
        GgufFile(path)
    except CheckpointError:
        return
    assert rest


# Round trips with the oracles

VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "a.negative": -3,
    "a.flag": True,
    "a.flags": [True, False],
    "a.long": Typed("u64", 2**63),
    "a.double": Typed("f64", 0.1),
    "tokenizer.ggml.tokens": ["<s>", "\u2581hello", "", "\U0001f600"],
    "tokenizer.ggml.scores": [0.0, -1.5, float("-inf"), 2.0],
    "tokenizer.ggml.token_type": [3, 1, 1, 6],
}


def make(path: Path, values: dict[str, Any] = VALUES) -> dict[str, torch.Tensor]:
    """Write `values` and a tensor of each type that is decoded, of random bytes: the bytes by name."""
    generator = torch.Generator().manual_seed(0)
    kinds = {f"blk.{i}.{kind.name}": (kind, (3, 2 * kind.elements)) for i, kind in enumerate(TYPES.values())}
    kinds["norm"] = (TYPES["F32"], (5,))
    kinds["experts"] = (TYPES["Q4_0"], (2, 3, 64))
    raw: dict[str, torch.Tensor] = {}
    with atomic_gguf(path, values, kinds, overwrite=True) as writer:
        for name, (kind, shape) in reversed(kinds.items()):
            raw[name] = torch.randint(
                0, 256, (*shape[:-1], kind.row_bytes(shape[-1])), generator=generator, dtype=torch.uint8
            )
            writer.write(name, raw[name])
    return raw


def decoded(value: Any) -> Any:
    return list(value) if isinstance(value, Array) else value


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Typed) else value


def test_what_we_write_we_read(tmp_path: Path) -> None:
    raw = make(tmp_path / "a.gguf")
    file = GgufFile(tmp_path / "a.gguf")
    assert set(file.names()) == set(raw)
    assert all(torch.equal(file.read(name), raw[name]) for name in raw)
    for name, value in VALUES.items():
        expected = np.float32(value).item() if name.endswith("epsilon") else plain(value)
        assert decoded(file.metadata[name]) == expected
    copied = {name: Typed(file.metadata.type_of(name), value) for name, value in file.metadata.items()}
    make(tmp_path / "b.gguf", copied)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_gguf_package_reads_what_we_write(tmp_path: Path) -> None:
    raw = make(tmp_path / "a.gguf")
    reader = oracle.GGUFReader(tmp_path / "a.gguf")
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} | {"norm": "F32", "experts": "Q4_0"} == {
        name: name.rpartition(".")[2] for name in raw
    } | {"norm": "F32", "experts": "Q4_0"}
    for tensor in reader.tensors:
        assert np.asarray(tensor.data).tobytes() == raw[tensor.name].numpy().tobytes()
    for name, value in VALUES.items():
        found = reader.get_field(name)
        assert found is not None
        expected = np.float32(value).item() if name.endswith("epsilon") else plain(value)
        assert found.contents() == expected


def test_we_read_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path, generator = tmp_path / "a.gguf", np.random.default_rng(0)
    writer = oracle.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "\u2581a", "b"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_add_bos_token(True)
    weights = generator.standard_normal((5, 64), dtype=np.float32)
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q8_0"):
        number = oracle.GGMLQuantizationType[kind]
        writer.add_tensor(kind, oracle.quantize(weights, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.header.alignment == 64
    assert file.metadata["general.architecture"] == "llama"
    assert list(file.metadata["tokenizer.ggml.tokens"]) == ["<s>", "\u2581a", "b"]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.metadata.type_of("tokenizer.ggml.scores") == "[f32]"
    for kind in file.names():
        assert file.info(kind).shape == (5, 64)
        expected = oracle.quantize(weights, oracle.GGMLQuantizationType[kind])
        assert file.read(kind).numpy().tobytes() == expected.tobytes()


READ_WITH_LLAMA_CPP = """
import ctypes, os, sys
from llama_cpp._ctypes_extensions import load_shared_library
import llama_cpp
base = os.path.join(os.path.dirname(llama_cpp.__file__), "lib")
ggml = ctypes.CDLL(os.path.join(base, "libggml-base.so"))
class Params(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]
ggml.gguf_init_from_file.restype = ctypes.c_void_p
ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
for name in ("gguf_get_n_tensors", "gguf_get_n_kv"):
    getattr(ggml, name).restype = ctypes.c_int64
    getattr(ggml, name).argtypes = [ctypes.c_void_p]
made = ctypes.c_void_p()
context = ggml.gguf_init_from_file(sys.argv[1].encode(), Params(False, ctypes.addressof(made)))
assert context and made.value
print(ggml.gguf_get_n_tensors(context), ggml.gguf_get_n_kv(context))
"""


def test_llama_cpp_reads_what_we_write(tmp_path: Path) -> None:
    python = ROOT / ".venv-llamacpp" / "bin" / "python"
    if not python.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    raw = make(tmp_path / "a.gguf")
    done = subprocess.run(
        [python, "-c", READ_WITH_LLAMA_CPP, str(tmp_path / "a.gguf")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(raw)), str(len(VALUES))]


# Writing


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.gguf", {"w": (TYPES["Q8_0"], (2, 32))}
    with pytest.raises(RuntimeError), atomic_gguf(path, {}, tensors):
        raise RuntimeError
    with pytest.raises(ValueError, match="1 tensors were never written: w"), atomic_gguf(path, {}, tensors):
        pass
    assert list(tmp_path.iterdir()) == []
    for overwrite in (False, True):
        with atomic_gguf(path, {}, tensors, overwrite) as writer:
            assert path.exists() == overwrite
            writer.write("w", torch.zeros(2, 34, dtype=torch.uint8))
    assert list(tmp_path.iterdir()) == [path]
    with user_error("output_exists"), atomic_gguf(path, {}, tensors):
        pass


def test_a_file_that_another_process_has_just_made_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, take_lock = tmp_path / "a.gguf", writer.take_lock

    def wait_for_another(partial: Path, target: Path) -> int:
        lock = take_lock(partial, target)
        target.write_bytes(b"theirs")
        return lock

    monkeypatch.setattr(writer, "take_lock", wait_for_another)
    with user_error("output_exists"), atomic_gguf(path, {}, {}):
        pytest.fail("nothing is written where the output exists")
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_is_never_replaced(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").mkdir()
    with (
        user_error("output_invalid"),
        atomic_gguf(tmp_path / "a.gguf", {}, {}, overwrite),
    ):
        pytest.fail("nothing is written where the output is a folder")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"": 1}, "a key cannot be written under an empty name"),
        ({"k" * 257: 1}, "is longer than 256 bytes"),
        ({"a": []}, "key 'a': an empty array has no type"),
        ({"a": [1, "b"]}, "key 'a': an array holds values of one type"),
        ({"a": [[1]]}, "key 'a': an array holds values of one type, none of them an array"),
        ({"a": None}, "key 'a': a NoneType cannot be stored"),
        ({"a": 2**32}, "key 'a': not a value of type u32"),
        ({"a": Typed("u8", 256)}, "key 'a': not a value of type u8"),
        ({"a": Typed("[u9]", [1])}, "'u9' is not a type of GGUF values"),
        ({"a": Typed("string", 3)}, "key 'a': not a value of type string"),
        ({"general.alignment": 13}, "general.alignment must be a power of two"),
    ],
)
def test_metadata_that_a_file_cannot_hold(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        plan("a.gguf", values, {})


@pytest.mark.parametrize(
    ("name", "kind", "shape", "words"),
    [
        ("n" * 64, "F32", (1,), "is longer than 63 bytes"),
        ("../a", "F32", (1,), "looks like a path"),
        ("a", "Q4_K", (2, 32), "tensor 'a' of shape [2, 32]: Q4_K stores rows in blocks of 256"),
        ("a", "F32", (), "it must have 1 to 4 dimensions"),
        ("a", "F32", (1, 1, 1, 1, 1), "it must have 1 to 4 dimensions"),
        ("a", "F32", (0, 4), "dimensions of 1 or more"),
    ],
)
def test_tensors_that_a_file_cannot_hold(name: str, kind: str, shape: tuple[int, ...], words: str) -> None:
    with user_error("gguf_inexpressible"):
        plan("a.gguf", {}, {name: (TYPES[kind], shape)})


def test_nothing_imports_torch_to_look_at_a_file(write: Callable[[bytes], Path]) -> None:
    code = (
        "import sys; from attar.checkpoints.gguf.file import GgufFile; "
        f"assert GgufFile({str(write(SMALL))!r}).names(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_bytes_after_the_last_tensor_are_not_read(
    write: Callable[[bytes], Path], caplog: pytest.LogCaptureFixture
) -> None:
    for content, more in ((GOOD, 24 + 7), (pack(), 1)):
        file = GgufFile(write(content + b"\xff" * more))
        assert file.names() == GgufFile(write(content)).names()
        assert f"{more - 24 if content == GOOD else more} bytes after the last tensor" in caplog.text
        caplog.clear()


def test_a_string_that_is_no_utf8_is_read_as_far_as_it_is(
    write: Callable[[bytes], Path], caplog: pytest.LogCaptureFixture
) -> None:
    file = GgufFile(write(pack([key("a", STR, text(b"caf\xe9")), key("b", STR, text("b"))])))
    assert file.metadata["b"] == "b"
    assert not caplog.text
    assert file.metadata["a"] == "caf\ufffd"
    assert "key 'a'" in caplog.text
