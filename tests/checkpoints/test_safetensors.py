"""The header parser against a corpus of malformed files, random damage, and the safetensors package as oracle."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import safetensors.torch as oracle
import torch

from attar.checkpoints import safetensors as ours
from attar.checkpoints import strict_io
from attar.checkpoints.safetensors import TensorFile
from attar.checkpoints.strict_io import NEAR, CheckpointError
from attar.checkpoints.writer import ShardWriter, plan_files
from attar.formats.scheme import Part
from tests.errors import user_error

SECONDS_PER_REFUSAL = 1.0  # of the processor; what is held to is 0.2, and this machine may be busy


def pack(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file from a header (JSON text, bytes, or something to encode) and its data."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def one(data: bytes = b"\0" * 8, name: str = "a", **fields: Any) -> bytes:
    return pack({name: entry(**fields)}, data)


GOOD = one()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

REFUSED: dict[str, bytes] = {
    # too short, and lengths that lie
    "empty": b"",
    "one byte": b"\x08",
    "seven bytes": b"\x08" + bytes(6),
    "eight zeros": bytes(8),
    "length 0": bytes(8) + b"{}",
    "length 1": pack(b"{}", length=1),
    "length one past the file": pack(b"{}", length=3),
    "length 2^31": pack(b"{}", length=2**31),
    "length 2^63": pack(b"{}", length=2**63),
    "length 2^64 - 1": pack(b"{}", length=2**64 - 1),
    "length past the cap": pack(b"{}", length=ours.MAX_HEADER + 1),
    "length cuts the JSON": pack(b'{"a":{}}', length=5),
    # not the JSON it should be
    "list": pack("[]"),
    "string": pack('"a"'),
    "number": pack("12"),
    "leading space": pack(" {}"),
    "UTF-8 mark": pack(b"\xef\xbb\xbf{}"),
    "UTF-16": pack('{"a":1}'.encode("utf-16-le")),
    "bad UTF-8": pack(b'{"\xff":1}'),
    "overlong UTF-8": pack(b'{"\xc0\xaf":1}'),
    "NUL in JSON": pack(b'{"a\0":1}'),
    "NUL padding": pack(b"{}\0\0"),
    "unclosed": pack('{"a":'),
    "single quotes": pack("{'a':1}"),
    "trailing comma": pack('{"__metadata__":{},}'),
    "trailing comma after a tensor": pack('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},}', bytes(8)),
    "trailing comma in a tensor": pack('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],}}', bytes(8)),
    "no comma between tensors": pack(json.dumps({"a": entry(), "b": entry()}).replace("}, ", "} "), bytes(8)),
    "two values": pack("{}{}"),
    "comment": pack("{}//x"),
    "NaN": pack('{"__metadata__":NaN}'),
    "Infinity": pack('{"__metadata__":Infinity}'),
    "1e999": pack('{"__metadata__":1e999}'),
    "10,000 digits": pack('{"a":{"dtype":"F32","shape":[' + "9" * 10000 + '],"data_offsets":[0,8]}}', bytes(8)),
    "nested 100,000": pack('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "objects nested 50,000": pack('{"a":' * 50_000 + "1" + "}" * 50_000),
    "duplicate tensor": pack(
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "duplicate inner key": pack('{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "duplicate metadata key": pack('{"__metadata__":{"a":"1","a":"1"}}'),
    # metadata
    "metadata number": pack({"__metadata__": {"a": 1}}),
    "metadata nested": pack({"__metadata__": {"a": {"b": "c"}}}),
    "metadata null": pack({"__metadata__": None}),
    "metadata list": pack({"__metadata__": []}),
    "metadata as tensor": pack({"__metadata__": entry()}, bytes(8)),
    "metadata twice": pack('{"__metadata__":{},"__metadata__":{}}'),
    # entries
    "entry null": pack({"a": None}),
    "entry list": pack({"a": [1]}),
    "entry number": pack({"a": 1}),
    "entry empty": pack({"a": {}}),
    "no dtype": pack({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "no shape": pack({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "no offsets": pack({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "one key more": pack({"a": {**entry(), "code": "x"}}, bytes(8)),
    "one key less and one more": pack({"a": {"shape": [2], "data_offsets": [0, 8], "x": "y"}}, bytes(8)),
    "one key less and one twice": pack('{"a":{"shape":[2],"shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    # dtypes
    "dtype unknown": one(dtype="F31"),
    "dtype lower case": one(dtype="f32"),
    "dtype of torch": one(dtype="float32"),
    "dtype null": one(dtype=None),
    "dtype number": one(dtype=32),
    "dtype list": one(dtype=["F32"]),
    "dtype complex": one(dtype="C64", shape=[1]),
    "sub-byte, odd count": one(dtype="F4", shape=[3]),
    # shapes
    "shape with a leading zero": pack('{"a":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}', bytes(8)),
    "shape with a comma at its end": pack('{"a":{"dtype":"F32","shape":[2,],"data_offsets":[0,8]}}', bytes(8)),
    "shape null": one(shape=None),
    "shape number": one(shape=2),
    "shape string": one(shape="2"),
    "shape float": one(shape=[2.0]),
    "shape bool": one(shape=[True, 2]),
    "shape nested": one(shape=[[2]]),
    "shape negative": one(shape=[-2]),
    "shape two negatives": one(shape=[-1, -2]),
    "shape too small": one(shape=[1]),
    "shape too large": one(shape=[3]),
    "rank 0 with two elements": one(shape=[]),
    "rank 17": one(shape=[2] + [1] * 16),
    "rank 65": one(shape=[2] + [1] * 64),
    "rank 1,000,000": one(shape=[1] * 1_000_000),
    "product overflows to 16 bytes": one(shape=[4194305, 4194305, 211106198978564], data=bytes(16), offsets=[0, 16]),
    "product 2^64 overflows to 0": one(shape=[2**32, 2**32], data=b"", offsets=[0, 0]),
    "size 2^63": one(shape=[2**63]),
    "zero times 2^62": one(shape=[0, 2**62], data=b"", offsets=[0, 0]),
    "dim 0 with data": one(shape=[0]),
    # offsets
    "offsets null": one(offsets=None),
    "offsets three": one(offsets=[0, 4, 8]),
    "offsets one": one(offsets=[8]),
    "offsets float": one(offsets=[0.0, 8.0]),
    "offsets exponent": pack('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8e0]}}', bytes(8)),
    "offsets bool": one(offsets=[False, 8]),
    "offsets string": one(offsets=["0", "8"]),
    "offsets negative": one(offsets=[-8, 0]),
    "offsets reversed": one(offsets=[8, 0]),
    "offsets beyond the end": one(offsets=[8, 16]),
    "offsets 2^64": one(offsets=[2**64, 2**64 + 8]),
    "span shorter than the shape": one(offsets=[0, 4]),
    # tilings
    "hole at the start": one(offsets=[4, 12], data=bytes(12)),
    "hole between": pack({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
    "overlap": pack({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
    "same place twice": pack({"a": entry(), "b": entry()}, bytes(8)),
    "empty tensor inside another": pack({"a": entry(), "b": entry(shape=[0], offsets=[4, 4])}, bytes(8)),
    "empty tensor past the end": pack({"a": entry(), "b": entry(shape=[0], offsets=[12, 12])}, bytes(8)),
    "truncated by one byte": GOOD[:-1],
    "no data at all": GOOD[:-8],
    "one byte too many": GOOD + b"\0",
    "data without tensors": pack("{}", b"\0"),
    # names
    "name empty": one(name=""),
    "name 1,025 bytes": one(name="a" * 1025),
    "name 1 MB": one(name="a" * 1_000_000),
    "name 513 umlauts": one(name="\u00fc" * 513),
    "name with ..": one(name="../a"),
    "name ..": one(name=".."),
    "name with inner ..": one(name="a/../../b"),
    "name absolute": one(name="/etc/passwd"),
    "name with NUL": one(name="a\0b"),
    "name with newline": one(name="a\nb"),
    "name with ANSI": one(name="\x1b[31mred"),
    "name with DEL": one(name="a\x7f"),
    "name right to left": one(name="a\u202eb"),
    "name lone surrogate": pack('{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    # other formats
    "pickle 2": b"\x80\x02}q\x00." + bytes(64),
    "pickle 4": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}." + bytes(64),
    "zip": b"PK\x03\x04" + bytes(64),
    "ELF": b"\x7fELF\x02\x01\x01" + bytes(64),
    "GGUF": b"GGUF\x03\x00\x00\x00" + bytes(64),
    "NumPy": b"\x93NUMPY\x01\x00" + bytes(64),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(64),
    "web page": b"\n<!DOCTYPE html><html><body>Not found</body></html>",
    "LFS pointer": LFS,
    "JSON error": b'{"error":"Repository not found"}',
}

ACCEPTED: dict[str, bytes] = {
    "plain": GOOD,
    "no tensors": pack("{}"),
    "only metadata": pack({"__metadata__": {"format": "pt"}}),
    "padding": pack('{"__metadata__":{}}     '),
    "whitespace": pack(
        ' { "a" : { "dtype" : "F32" ,\n"shape":[ 2 , 1 ] , "data_offsets" : [ 0 , 8 ]\t} } '[1:], bytes(8)
    ),
    "whitespace alone": pack("{ }"),
    "keys in another order": pack('{"a":{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}}', bytes(8)),
    "metadata at the end": pack({"a": entry(), "__metadata__": {"dtype": "x", "b{": '"}\\'}}, bytes(8)),
    "metadata in the middle": pack(
        {"a": entry(), "__metadata__": {"format": "pt"}, "b": entry(shape=[0], offsets=[8, 8])}, bytes(8)
    ),
    "three megabytes of metadata": pack({"__metadata__": {"a": "x" * 3_000_000}, "a": entry()}, bytes(8)),
    "marks and backslashes": pack({'"\\': entry(), "__metadata__": {'"\\"': '\\\\"\\', ":{": "{,"}}, bytes(8)),
    "escapes in a name": pack('{"\\u0441\\/":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "scalar": one(shape=[], data=bytes(4), offsets=[0, 4]),
    "rank 16": one(shape=[2] + [1] * 15),
    "empty": one(shape=[0, 3], data=b"", offsets=[0, 0]),
    "empty ones at one place": pack({"a": entry(), **{n: entry(shape=[0], offsets=[8, 8]) for n in "bcd"}}, bytes(8)),
    "out of order": pack({"a": entry(offsets=[8, 16]), "b": entry()}, bytes(16)),
    "name 1,024 bytes": one(name="a" * 1024),
    "name of another script": one(name="\u0441\u043b\u043e\u0439"),
    "name of dots": one(name="..."),
    "name with slash": one(name="a/b..c"),
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return path

    return write


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(REFUSED) >= 80


@pytest.mark.parametrize("kind", REFUSED)
def test_malformed_files_are_refused_quickly_with_their_name(kind: str, write: Callable[[bytes], Path]) -> None:
    path = write(REFUSED[kind])
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        TensorFile(path)
    assert time.process_time() - start < SECONDS_PER_REFUSAL
    message = str(caught.value)
    assert message.startswith(str(path))
    assert len(message) < 1000  # a hostile header does not flood the terminal
    assert message.isprintable()


@pytest.mark.parametrize("kind", ACCEPTED)
def test_valid_files_are_accepted_as_the_oracle_does(kind: str, write: Callable[[bytes], Path]) -> None:
    path = write(ACCEPTED[kind])
    file, expected = TensorFile(path), oracle.load_file(path)
    assert set(file.names()) == set(expected)
    for name in expected:
        assert torch.equal(file.read(name), expected[name])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated by one byte", "truncated: expected 8 bytes of tensors, the file has 7; download or copy it again"),
        ("seven bytes", "truncated: 7 bytes"),
        ("length one past the file", "truncated: expected 3 bytes of header, the file has 2"),
        ("one byte too many", "1 bytes after the last tensor"),
        ("dtype unknown", "tensor 'a': dtype 'F31' is unknown: attar reads BOOL, U8"),
        ("duplicate tensor", "key 'a' is given twice"),
        ("hole between", "tensor 'b' leaves a hole of 4 bytes"),
        ("overlap", "tensor 'b' overlaps"),
        ("LFS pointer", "git lfs pull"),
        ("pickle 2", "save_pretrained"),
        ("zip", "save_pretrained"),
        ("web page", "is a web page"),
        ("GGUF", "is a GGUF file"),
        ("JSON error", "is JSON text"),
    ],
)
def test_messages_say_what_to_do(kind: str, words: str, write: Callable[[bytes], Path]) -> None:
    with pytest.raises(CheckpointError) as caught:
        TensorFile(write(REFUSED[kind]))
    assert words in str(caught.value)


def many(count: int, more: str = "") -> bytes:
    header = ",".join(f'"{i}":{{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    return pack("{" + header + more + "}")


def in_no_order(count: int) -> bytes:
    """Tensors all of other sizes, anywhere but in order, and a hole before the last."""
    found = {f"model.experts.{i}": (i, (i * (i - 1) // 2, i * (i + 1) // 2)) for i in range(1, count)}
    names = random.Random(0).sample(list(found), len(found))
    entries = {name: entry("U8", (found[name][0],), found[name][1]) for name in names}
    return pack({**entries, "z": entry(offsets=(count**2, count**2 + 8))})


def wide(size: int) -> str:
    """Text of which one character makes four bytes of every other."""
    return "x" * (size - 4) + "\U0001f600"


LAST = '"t":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}'
COSTLY: dict[str, Callable[[], bytes]] = {
    "300,000 tensors": lambda: many(300_000),
    "empty tensors and a hole": lambda: many(90_000, f",{LAST}"),
    "tensors in no order and a hole": lambda: in_no_order(40_000),
    "names of escapes": lambda: pack(
        "{"
        + "".join(f'"\\u0041{i}":{{"dtype":"I8","shape":[0],"data_offsets":[0,0]}},' for i in range(60_000))
        + LAST
        + "}"
    ),
    "empty objects": lambda: pack("{" + ",".join(f'"{i}":{{}}' for i in range(65_000)) + "}"),
    "nothing but structure": lambda: pack('{"a":[' + "[]," * 2_000_000 + "[]]}"),
    "a wide character": lambda: pack(f'{{"__metadata__":{{"a":"{wide(ours.MAX_HEADER - 200)}"}},{LAST}}}'),
    "a wide character in metadata": lambda: pack(f'{{"__metadata__":{{"a":"{wide(3_900_000)}"}},{LAST}}}'),
    "a wide character in a name": lambda: pack(f'{{"{wide(ours.MAX_HEADER - 200)}":1,{LAST}}}'),
    "as many wide characters in names as may be": lambda: pack(
        "{"
        + "".join(f'"{i:05}{wide(1000)}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},' for i in range(3_900))
        + f"{LAST}}}"
    ),
    "wide characters in names": lambda: pack(
        "{"
        + "".join(f'"{i:05}{wide(1000)}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},' for i in range(15_000))
        + f"{LAST}}}"
    ),
    "metadata of short keys": lambda: pack(
        '{"__metadata__":{' + ",".join(f'"{i:x}":""' for i in range(99_990)) + f"}},{LAST}}}"
    ),
    "too many keys of metadata": lambda: pack(
        '{"__metadata__":{' + ",".join(f'"{i:x}":""' for i in range(300_000)) + f"}},{LAST}}}"
    ),
    "whitespace": lambda: pack("{" + " " * (ours.MAX_HEADER - 200) + f"{LAST}}}"),
    "whitespace at the end": lambda: pack(f"{{{LAST}}}" + " " * (ours.MAX_HEADER - 200)),
}
"""Made when they are wanted, for they are large. What each may cost, `test_hostile` says."""


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_the_number_of_tensors_is_capped(
    excess: int, write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "MAX_TENSORS", 1000)
    path = write(many(1000 + excess))
    if excess <= 0:
        assert len(TensorFile(path).names()) == 1000 + excess
    else:
        with user_error("checkpoint_too_large"):
            TensorFile(path)


def test_a_file_of_100_000_tensors_is_read(write: Callable[[bytes], Path]) -> None:
    assert len(TensorFile(write(many(100_000))).names()) == 100_000


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("300,000 tensors", "checkpoint_too_large"),
        ("empty tensors and a hole", "checkpoint_malformed"),
        ("tensors in no order and a hole", "checkpoint_malformed"),
        ("a wide character", "checkpoint_malformed"),
        ("a wide character in metadata", "checkpoint_malformed"),
        ("as many wide characters in names as may be", "checkpoint_malformed"),
        ("wide characters in names", "checkpoint_too_large"),
        ("too many keys of metadata", "checkpoint_too_large"),
    ],
)
def test_what_would_cost_much_is_refused_for_what_it_is(kind: str, words: str, write: Callable[[bytes], Path]) -> None:
    with user_error(words):
        TensorFile(write(COSTLY[kind]()))


SMALL = pack(
    json.dumps({"__metadata__": {"format": "pt"}, "a": entry(), "b.c": entry("BF16", (3, 1), (8, 14))}), bytes(14)
)
HEADER_END = 8 + int.from_bytes(SMALL[:8], "little")


def test_truncation_at_every_byte_of_the_header_is_refused(write: Callable[[bytes], Path]) -> None:
    for size in range(len(SMALL)):
        with pytest.raises(CheckpointError):
            TensorFile(write(SMALL[:size]))


def test_flipped_bits_are_refused_or_harmless(write: Callable[[bytes], Path]) -> None:
    rng, refused = random.Random(7), 0
    for _ in range(200):
        damaged = bytearray(SMALL)
        for _ in range(rng.choice((1, 1, 2, 8))):
            bit = rng.randrange(8 * HEADER_END)
            damaged[bit // 8] ^= 1 << bit % 8
        path = write(bytes(damaged))
        try:
            file = TensorFile(path)
        except CheckpointError:
            refused += 1
            continue
        # Accepted: then the oracle accepts it too, and sees the same tensors.
        expected = oracle.load_file(path)
        assert {name: tuple(t.shape) for name, t in expected.items()} == {n: file.info(n).shape for n in file.names()}
    assert 100 < refused < 200


@hypothesis.given(st.binary(max_size=200))
@hypothesis.settings(max_examples=150, deadline=None)
def test_no_bytes_as_a_header_raise_anything_but_a_checkpoint_error(text: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        slots, _ = ours.parse_header(b"{" + text, 8, "x")
        assert sum(slot.part.bytes for slot in slots.values()) == 8


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LOOSE = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@hypothesis.given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__", "\n"]),
        LOOSE
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "I8", "BF16", "x"]) | SCALARS,
                "shape": st.lists(st.integers(-1, 4) | SCALARS, max_size=2) | LOOSE,
                "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | LOOSE,
            }
        ),
    )
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_any_json_as_a_header_is_refused_or_tiles_the_data(header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    try:
        slots, metadata = ours.parse_header(text, 16, "x")
    except CheckpointError:
        return
    at = 0
    for slot in slots.values():
        assert slot.begin == at
        at = slot.end
    assert at == 16
    assert all(isinstance(value, str) for value in metadata.values())


DTYPES = [getattr(torch, name) for name in ours.DTYPES.values()]
TENSORS = st.dictionaries(
    st.text("abc.xyz0_", min_size=1, max_size=12).filter(lambda name: name != ".."),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31)),
    max_size=6,
)


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


@hypothesis.given(TENSORS)
@hypothesis.settings(max_examples=40, deadline=None)
def test_what_the_oracle_writes_is_read_bit_for_bit(spec: dict[str, tuple[torch.dtype, list[int], int]]) -> None:
    tensors = {name: random_tensor(*args) for name, args in spec.items()}
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as temporary:
        oracle.save_file(tensors, temporary.name, metadata={"format": "pt"})
        file = TensorFile(temporary.name)
    assert set(file.names()) == set(tensors)
    assert file.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert same_bits(file.read(name), tensor)
        assert same_bits(file.read(name, torch.empty_like(tensor)), tensor)
        assert file.info(name).bytes == tensor.nbytes
        if tensor.dim():
            middle = tensor.shape[0] // 2
            rows = [file.read_rows(name, 0, middle), file.read_rows(name, middle, tensor.shape[0])]
            assert all(same_bits(a, b) for a, b in zip(rows, (tensor[:middle], tensor[middle:]), strict=True))


@hypothesis.given(TENSORS)
@hypothesis.settings(max_examples=40, deadline=None)
def test_what_we_write_the_oracle_and_we_read_bit_for_bit(
    spec: dict[str, tuple[torch.dtype, list[int], int]],
) -> None:
    tensors = {name: random_tensor(*args) for name, args in spec.items()}
    parts = {name: Part(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(folder, plan_files(parts)) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.finish()
        path = Path(folder, "model.safetensors")
        expected, file = oracle.load_file(path), TensorFile(path)
        assert expected.keys() == set(file.names()) == tensors.keys()
        for name, tensor in tensors.items():
            assert same_bits(expected[name], tensor)
            assert same_bits(file.read(name), tensor)


def test_near_misses_are_looked_for_among_few_names(
    write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, names, **_: seen.extend(names) or [])
    many = {f"t{i}": entry("U8", [1], [i, i + 1]) for i in range(2 * NEAR)}
    with user_error("checkpoint_incomplete"):
        TensorFile(write(pack(many, bytes(len(many))))).info("t")
    assert len(seen) == NEAR


def test_an_unknown_name_offers_the_nearest(write: Callable[[bytes], Path]) -> None:
    file = TensorFile(write(one(name="model.embed_tokens.weight")))
    with user_error("checkpoint_incomplete"):
        file.read("embed_tokens.weight")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickle_suffixes_are_refused_unopened(suffix: str, tmp_path: Path) -> None:
    with user_error("file_unsafe"):
        TensorFile(tmp_path / f"absent{suffix}")


def test_only_regular_files_are_opened_and_links_are_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for name, words in {
        "fifo": "file_wrong_kind",
        "folder": "file_wrong_kind",
        "loop": "file_failed",
        "absent": "file_not_found",
        "a\0b": "value_invalid",
    }.items():
        with user_error(words):
            TensorFile(tmp_path / name)
    with user_error("file_wrong_kind"):
        TensorFile("/dev/zero")
    (tmp_path / "blob").write_bytes(GOOD)
    (tmp_path / "link.safetensors").symlink_to("blob")
    assert TensorFile(tmp_path / "link.safetensors").names() == ("a",)


def test_a_sparse_terabyte_costs_nothing_to_open(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(pack({"a": entry("I8", (1 << 40,), (0, 1 << 40))}))
    with user_error("checkpoint_incomplete"):
        TensorFile(path)
    try:
        os.truncate(path, path.stat().st_size + (1 << 40))
    except OSError:
        pytest.skip("this file system holds no file of a terabyte")
    assert TensorFile(path).read_rows("a", 1 << 39, (1 << 39) + 4).tolist() == [0, 0, 0, 0]


def test_a_file_that_shrinks_is_an_error_not_a_crash(write: Callable[[bytes], Path]) -> None:
    path = write(GOOD)
    file = TensorFile(path)
    os.truncate(path, len(GOOD) - 4)
    with user_error("checkpoint_changed"):
        file.read("a")


def test_refusal_leaves_no_descriptor_open(write: Callable[[bytes], Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for content in (REFUSED["overlap"], REFUSED["zip"], REFUSED["empty"]):
        with pytest.raises(CheckpointError):
            TensorFile(write(content))
    file = TensorFile(write(GOOD))
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_read_one_file_at_once(tmp_path: Path) -> None:
    tensors = {str(i): torch.full((64, 64), i, dtype=torch.int32) for i in range(16)}
    oracle.save_file(tensors, tmp_path / "x.safetensors")
    file, wrong = TensorFile(tmp_path / "x.safetensors"), []

    def work(seed: int) -> None:
        for i in random.Random(seed).choices(range(16), k=100):
            if not (file.read(str(i)) == i).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_sha256_reports_its_progress(write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_io, "_CHUNK", 16)
    path, seen = write(GOOD), list[int]()
    assert TensorFile(path).sha256(seen.append) == hashlib.sha256(GOOD).hexdigest()
    assert sum(seen) == len(GOOD)
    assert len(seen) > 1


def test_a_file_is_hashed_once(write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And progress reaches its end all the same."""
    file, seen = TensorFile(write(GOOD)), list[int]()
    digest = file.sha256()
    monkeypatch.setattr(file, "fill", lambda *_: pytest.fail("it was read again"))
    assert file.sha256(seen.append) == digest
    assert seen == [len(GOOD)]
