"""Importance matrices in both forms: written and read back, read by the `gguf` package, and hostile ones."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from attar.checkpoints.gguf.writer import atomic_gguf
from attar.checkpoints.sources import imatrix
from attar.checkpoints.sources.imatrix import Imatrix
from attar.checkpoints.strict_io import CheckpointError
from attar.formats.codecs.ggml import TYPES
from tests.checkpoints.hostile_files import Memory
from tests.errors import user_error

ROUNDED = 1e-6  # sums of squares are float32: a mean comes back to as much


@pytest.fixture
def matrix() -> Imatrix:
    generator = torch.Generator().manual_seed(0)
    means = {f"blk.{i}.attn_q.weight": torch.rand(64, generator=generator) for i in (3, 1)}
    return Imatrix(means, dict.fromkeys(means, 4096), 8, 512, ("a text.txt",))


@pytest.mark.parametrize("name", ["m.gguf", "m.imatrix", "m.dat"])
def test_both_forms_are_read_as_they_were_written(name: str, matrix: Imatrix, tmp_path: Path) -> None:
    imatrix.write(tmp_path / name, matrix)
    found = imatrix.read(tmp_path / name)
    assert found.means.keys() == matrix.means.keys()
    for key, mean in matrix.means.items():
        torch.testing.assert_close(found.means[key], mean, rtol=ROUNDED, atol=0)
    assert (found.chunks, found.datasets) == (8, ("a text.txt",))
    assert found.chunk == (0 if name.endswith(".dat") else 512)
    with user_error("output_exists"):
        imatrix.write(tmp_path / name, matrix)
    imatrix.write(tmp_path / name, matrix, overwrite=True)


def test_the_gguf_package_reads_the_newer_form(matrix: Imatrix, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    imatrix.write(tmp_path / "m.gguf", matrix)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.chunk_count").contents() == 8
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    for key, mean in matrix.means.items():
        assert found[f"{key}.counts"].shape == (1, 1)
        np.testing.assert_allclose(found[f"{key}.in_sum2"], mean[None].numpy() * 4096, rtol=ROUNDED)


def test_the_older_form_is_llama_cpps(tmp_path: Path) -> None:
    """Byte for byte: entries of (name, chunks, values times chunks), the chunks, and the text."""
    path, values = tmp_path / "m.dat", np.array([0.5, 2.0], np.float32)
    imatrix.write(path, Imatrix({"w": torch.from_numpy(values)}, {"w": 6}, 3, 2, ("t",)))
    entry = struct.pack("<i1sii", 1, b"w", 3, 2) + (values * 3).tobytes()
    assert path.read_bytes() == struct.pack("<i", 1) + entry + struct.pack("<ii1s", 3, 1, b"t")
    path.write_bytes(struct.pack("<i", 1) + entry)  # as older versions ended
    assert torch.equal(imatrix.read(path).means["w"], torch.from_numpy(values))


def test_the_older_form_is_whole_or_as_it_was(matrix: Imatrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.dat"
    imatrix.write(path, matrix)
    before = path.read_bytes()

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(imatrix, "sync_path", full)
    with user_error("disk_full"):
        imatrix.write(path, Imatrix({}, {}, 0, 0), overwrite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_no_prefix_of_the_older_form_is_read(matrix: Imatrix, tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    imatrix.write(path, matrix)
    whole = path.read_bytes()
    behind_entries = len(whole) - struct.calcsize("<ii") - len(b"a text.txt")
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        if length != behind_entries:
            with user_error("file_malformed"):
                imatrix.read(path)
    path.write_bytes(whole + b"\0")
    with user_error("file_malformed"):
        imatrix.read(path)


HOSTILE = {
    "a count of entries below zero": (struct.pack("<i", -1), "the number of entries is -1"),
    "more values than bytes": (struct.pack("<ii1sii", 1, 1, b"w", 1, 1 << 27), "'w' reaches beyond its end"),
    "a name too long": (struct.pack("<ii", 1, 1 << 30), "the length of the name of entry 0 is 1073741824"),
    "a name not UTF-8": (struct.pack("<ii1s", 1, 1, b"\xff"), "is not UTF-8"),
    "a name twice": (struct.pack("<i", 2) + 2 * struct.pack("<i1siif", 1, b"w", 1, 1, 1.0), "'w' is given twice"),
    "a NaN": (struct.pack("<ii1siif", 1, 1, b"w", 1, 1, float("nan")), "below zero or not finite"),
    "a value below zero": (struct.pack("<ii1siif", 1, 1, b"w", 1, 1, -1.0), "below zero or not finite"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_malformed_files_of_the_older_form_are_refused(kind: str, tmp_path: Path) -> None:
    data, words = HOSTILE[kind]
    (tmp_path / "m.dat").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        imatrix.read(tmp_path / "m.dat")


@pytest.mark.parametrize(
    "head, words",
    [
        (b"", "file_malformed"),
        (struct.pack("<ii1sii", 1, 1, b"w", 1, 1 << 20), "file_malformed"),
        (struct.pack("<ii1sii", 1, 1, b"w", 1, (1 << 28) - 9), "file_malformed"),
        (struct.pack("<ii1sii", 1, 1, b"w", 1, 1 << 28), "file_malformed"),
    ],
)
def test_a_gigabyte_that_is_no_importance_matrix_is_not_read(head: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(imatrix.MAX_BYTES)
        file.seek(-12, os.SEEK_END)
        file.write(b"\xff" * 12)
    with Memory() as memory, user_error(words):
        imatrix.read(path)
    assert memory.taken < 32 << 20


def newer(path: Path, **tensors: torch.Tensor) -> Path:
    layout = {name: (TYPES["F32"], tuple(tensor.shape)) for name, tensor in tensors.items()}
    with atomic_gguf(path, {"general.type": "imatrix"}, layout) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.view(torch.uint8))
    return path


def test_malformed_files_of_the_newer_form_are_refused(tmp_path: Path) -> None:
    one, ones = torch.ones(1, 1), torch.ones(1, 4)
    with user_error("checkpoint_incomplete"):
        imatrix.read(newer(tmp_path / "a.gguf", **{"w.in_sum2": ones}))
    with user_error("file_malformed"):
        imatrix.read(newer(tmp_path / "b.gguf", **{"w.in_sum2": torch.ones(2, 4), "w.counts": torch.ones(3, 1)}))
    with user_error("file_malformed"):
        imatrix.read(newer(tmp_path / "c.gguf", **{"w.in_sum2": ones, "w.counts": -one}))
    with user_error("file_malformed"):
        imatrix.read(newer(tmp_path / "d.gguf", **{"w.in_sum2": ones, "w.counts": 0 * one}))
    with atomic_gguf(tmp_path / "e.gguf", {"general.type": "model"}, {}):
        pass
    with user_error("file_wrong_kind"):
        imatrix.read(tmp_path / "e.gguf")
    with user_error("file_not_found"):
        imatrix.read(tmp_path / "f.gguf")


def test_stacked_experts_have_means_each(tmp_path: Path) -> None:
    """An expert that no row reached counts all columns alike."""
    sums, counts = torch.tensor([[2.0, 4.0], [9.0, 3.0], [0.0, 0.0]]), torch.tensor([[2.0], [3.0], [0.0]])
    found = imatrix.read(newer(tmp_path / "a.gguf", **{"w.in_sum2": sums, "w.counts": counts})).means["w"]
    assert found.tolist() == [[1.0, 2.0], [3.0, 1.0], [1.0, 1.0]]
    for name in ("b.gguf", "b.dat"):
        imatrix.write(tmp_path / name, imatrix.Imatrix({"w": found}, {"w": 3}, 1, 4))
        torch.testing.assert_close(imatrix.read(tmp_path / name).means["w"].flatten(), found.flatten())
