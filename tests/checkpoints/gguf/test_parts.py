"""Models in several files: read from the first part, written as llama.cpp's gguf-split does, and refused."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.checkpoints import fingerprints, vocabulary
from attar.checkpoints.convert.run import convert
from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.gguf import writer as gguf_writer
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.file import GgufFile, GgufPart
from attar.checkpoints.gguf.parts import MAX_PARTS, part_name, part_paths
from attar.checkpoints.gguf.values import Typed
from attar.checkpoints.gguf.writer import atomic_gguf, plan_parts
from attar.checkpoints.inspect import inspect
from attar.checkpoints.receipts import receipt
from attar.checkpoints.strict_io import CheckpointError
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.formats.codecs.ggml import TYPES
from tests.checkpoints.gguf.test_families import CONFIGS, logits
from tests.errors import user_error
from tests.model.random_model import write as random_model

MOST = 70_000
"""Bytes of a part of the model below: its embedding alone has 24,576."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return random_model(tmp_path / "source", CONFIGS["qwen3"])


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> list[Path]:
    """A model in parts, all of the right names."""
    return part_paths(convert(source, tmp_path / "in" / "model.gguf", to="gguf", max_shard_bytes=MOST).path)


def test_parts_are_one_model(source: Path, parts: list[Path], tmp_path: Path) -> None:
    whole = convert(source, tmp_path / "whole.gguf", to="gguf").path
    first = parts[0]
    assert len(parts) > 3
    assert [path.name for path in parts][:2] == [f"model-0000{i}-of-{len(parts):05}.gguf" for i in (1, 2)]
    assert sorted(path.name for path in first.parent.iterdir()) == [path.name for path in parts]
    ours, theirs = GgufFile(first), GgufFile(whole)
    assert ours.names() == theirs.names()
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.names())
    assert ours.size == sum(path.stat().st_size for path in parts) == inspect(first).bytes
    found, expected = (logits(gguf_checkpoint.load(path, torch.float32)) for path in (first, whole))
    assert torch.equal(found, expected)
    assert fingerprints.fingerprints([str(first)]).keys() == {str(path) for path in parts}


def test_parts_are_those_of_gguf_split(parts: list[Path]) -> None:
    """The metadata are in the first, and in each its place, by the types that gguf-split writes."""
    headers = [GgufPart(path).header for path in parts]
    total = sum(len(header.tensors) for header in headers)
    for index, header in enumerate(headers):
        own = {key: header.metadata[key] for key in header.metadata if key.startswith("split.")}
        assert own == {"split.no": index, "split.count": len(parts), "split.tensors.count": total}
        assert [header.metadata.type_of(key) for key in own] == ["u16", "u16", "i32"]
        assert len(header.metadata) == 3 or index == 0
        sizes = [-(-(tensor.end - tensor.begin) // 32) * 32 for tensor in header.tensors.values()]
        assert sum(sizes) <= MOST
        if index + 1 < len(headers):  # the next does not fit
            following = next(iter(headers[index + 1].tensors.values()))
            assert sum(sizes) + following.end - following.begin > MOST


def test_a_tensor_larger_than_a_part_has_one_of_its_own() -> None:
    tensors = {name: (TYPES["F32"], (size,)) for name, size in (("a", 100), ("b", 8), ("c", 8), ("d", 100))}
    plans = plan_parts("x.gguf", {"general.architecture": "llama"}, tensors, 64)
    assert [list(plan.slots) for plan in plans] == [["a"], ["b", "c"], ["d"]]
    with user_error("option_out_of_range"):
        plan_parts("x.gguf", {}, {f"{i}": (TYPES["F32"], (8,)) for i in range(MAX_PARTS + 1)}, 32)
    other = plan_parts("x.gguf", {"general.alignment": 64}, tensors, 64)
    assert all(plan.alignment == 64 for plan in other)


def own(path: Path) -> dict[str, int]:
    metadata = GgufPart(path).header.metadata
    return {key: metadata[f"split.{key}"] for key in ("no", "count", "tensors.count")}


def again(path: Path, part: Mapping[str, int], drop: int = 0) -> None:
    """Write a file's tensors again, all but the first `drop`, as another part."""
    file = GgufPart(path)
    kept = list(file.header.tensors.items())[drop:]
    metadata = {key: file.header.metadata[key] for key in file.header.metadata if key == "general.architecture"}
    typed = {f"split.{key}": Typed("u32", value) for key, value in part.items()}
    plan = gguf_writer.plan(path.name, metadata | typed, {name: (each.kind, each.shape) for name, each in kept})
    path.write_bytes(plan.header + bytes(plan.size - len(plan.header)))


def missing(parts: list[Path], other: list[Path]) -> None:
    parts[2].unlink()


def all_missing(parts: list[Path], other: list[Path]) -> None:
    for path in parts[1:]:
        path.unlink()


def link_to_nothing(parts: list[Path], other: list[Path]) -> None:
    parts[1].unlink()
    parts[1].symlink_to("nothing")


def folder(parts: list[Path], other: list[Path]) -> None:
    parts[1].unlink()
    parts[1].mkdir()


def doubled(parts: list[Path], other: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])


def doubled_under_another_number(parts: list[Path], other: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    again(parts[2], own(parts[1]) | {"no": 2})


def out_of_order(parts: list[Path], other: list[Path]) -> None:
    first, second = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(second)
    parts[2].write_bytes(first)


def foreign(parts: list[Path], other: list[Path]) -> None:
    shutil.copy(other[1], parts[1])


def whole_model(parts: list[Path], other: list[Path]) -> None:
    again(parts[1], {})


def truncated(parts: list[Path], other: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-64])


def tensor_less(parts: list[Path], other: list[Path]) -> None:
    again(parts[1], own(parts[1]), drop=1)


def more_than_names_say(parts: list[Path], other: list[Path]) -> None:
    again(parts[0], own(parts[0]) | {"count": len(parts) + 1})


def more_than_there_can_be(parts: list[Path], other: list[Path]) -> None:
    again(parts[0], own(parts[0]) | {"count": 65535})


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (missing, "checkpoint_incomplete", ["model-00003-of"]),
        (all_missing, "checkpoint_incomplete", ["model-00002-of", "parts are not beside it"]),
        (link_to_nothing, "checkpoint_incomplete", ["model-00002-of"]),
        (folder, "file_wrong_kind", ["model-00002-of"]),
        (doubled, "checkpoint_mismatch", ["model-00003-of", "part 2"]),
        (doubled_under_another_number, "checkpoint_mismatch", ["model-00003-of", "tensor", "model-00002-of"]),
        (out_of_order, "checkpoint_mismatch", ["model-00002-of", "part 3"]),
        (foreign, "checkpoint_mismatch", ["model-00002-of", "another model"]),
        (whole_model, "checkpoint_mismatch", ["model-00002-of", "whole model"]),
        (truncated, "checkpoint_incomplete", ["model-00002-of"]),
        (tensor_less, "checkpoint_mismatch", ["split.tensors.count"]),
        (more_than_names_say, "checkpoint_mismatch", ["NAME-00001-of"]),
        (more_than_there_can_be, "checkpoint_too_large", ["65535"]),
    ],
)
def test_parts_that_are_no_model_are_refused(
    spoil: Callable[[list[Path], list[Path]], None], code: Any, words: list[str], parts: list[Path], tmp_path: Path
) -> None:
    other = random_model(tmp_path / "other", CONFIGS["qwen2"])
    spoil(parts, part_paths(convert(other, tmp_path / "foreign.gguf", to="gguf", max_shard_bytes=MOST).path))
    with user_error(code, str(parts[0].parent), *words) as caught:
        GgufCheckpoint.open(parts[0])
    assert isinstance(caught.value, CheckpointError)


def test_another_part_names_the_first(parts: list[Path]) -> None:
    with user_error("file_wrong_kind", parts[0].name):
        GgufFile(parts[1])
    with user_error("file_wrong_kind", parts[0].name):
        vocabulary.tokenizer(parts[2])


def test_a_first_part_of_another_name_is_refused(parts: list[Path]) -> None:
    """No name is read from a file, so none can lead out of the folder."""
    for name in ("other.gguf", "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"):
        with user_error("checkpoint_mismatch", f"NAME-00001-of-{len(parts):05}.gguf"):
            GgufFile(shutil.copy(parts[0], parts[0].with_name("x")).rename(parts[0].with_name(name)))


@pytest.mark.parametrize("keys", [{"count": 3}, {"count": 3, "no": 0}, {"count": 3, "no": 3, "tensors.count": 1}])
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, int], parts: list[Path]) -> None:
    again(parts[0], keys)
    with user_error("gguf_malformed", "split."):
        GgufFile(parts[0])


def test_no_part_is_opened_before_all_are_there(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    begin = GgufPart.__init__

    def counting(self: GgufPart, path: Path, *more: bool) -> None:
        opened.append(Path(path).name)
        begin(self, path, *more)

    monkeypatch.setattr(GgufPart, "__init__", counting)
    parts[-1].unlink()
    with user_error("checkpoint_incomplete"):
        GgufFile(parts[0])
    assert opened == [parts[0].name]


def test_names_of_parts() -> None:
    assert part_name(Path("a/b-00002-of-00003.gguf")) == ("b", 2, 3)
    for other in ("b.gguf", "b-00004-of-00003.gguf", "b-00000-of-00003.gguf", "b-1-of-3.gguf", "-00001-of-00002.gguf"):
        assert part_name(Path(other)) is None
    assert part_paths(Path("a/b-00002-of-00003.gguf")) == [Path("a/b-00002-of-00003.gguf")]
    assert part_paths(Path("a/b-00001-of-99999.gguf")) == [Path("a/b-00001-of-99999.gguf")]


# Written


def test_a_compressed_model_in_parts_keeps_its_receipt(source: Path, tmp_path: Path) -> None:
    request = CompressionRequest(source, tmp_path / "out.gguf", recipe="q8_0", max_shard_bytes=30_000)
    done = compress_request(request)
    parts = part_paths(done.path)
    assert len(parts) > 2
    assert done.bytes == sum(path.stat().st_size for path in parts)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        f"{parts[0].name}.receipt.json", *(path.name for path in parts)
    }  # fmt: skip
    assert receipt.verify(done.path, gguf_checkpoint.load(done.path, torch.float32)).ok
    whole = compress(source, tmp_path / "whole.gguf", recipe="q8_0").path
    ours, theirs = GgufFile(done.path), GgufFile(whole)
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.names())
    parts[1].write_bytes(parts[1].read_bytes()[:-1] + b"x")
    assert receipt.verify(done.path, None, probes="none").first_divergence == parts[1].name
    parts[1].unlink()
    assert receipt.verify(done.path, None, probes="none").first_divergence == parts[1].name


def test_outputs_replace_each_other_whole(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"

    def files() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if path.is_file()}

    first = convert(source, target, to="gguf", max_shard_bytes=MOST).path
    with user_error("output_exists", first.name):
        convert(source, target, to="gguf")
    convert(source, target, to="gguf", overwrite=True)
    assert files() == {"model.gguf"}
    with user_error("output_exists", "model.gguf"):
        convert(source, target, to="gguf", max_shard_bytes=MOST)
    assert convert(source, target, to="gguf", max_shard_bytes=MOST, overwrite=True).path == first
    assert files() == {path.name for path in part_paths(first)}
    first.unlink()  # parts without a first are of no model
    convert(source, target, to="gguf")
    assert files() == {"model.gguf"}
    with user_error("output_invalid"):
        convert(source, tmp_path / "model-00001-of-00002.gguf", to="gguf")


def test_a_set_that_is_not_whole_has_no_first_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    replace = Path.replace

    def failing(path: Path, to: Path) -> Path:
        if len(moved) == 2:
            raise OSError(errno.EIO, "no more")
        moved.append(to.name)
        return replace(path, to)

    def write() -> None:
        layout = dict.fromkeys("abc", (TYPES["F32"], (8,)))
        with atomic_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, layout, most=32) as writer:
            for name in layout:
                writer.write(name, torch.zeros(32, dtype=torch.uint8))

    monkeypatch.setattr(Path, "replace", failing)
    with user_error("file_failed", "x.gguf"):
        write()
    assert moved == ["x-00003-of-00003.gguf", "x-00002-of-00003.gguf"]
    monkeypatch.undo()
    write()  # what is left is of no model
    assert GgufFile(tmp_path / "x-00001-of-00003.gguf").names() == ("a", "b", "c")
