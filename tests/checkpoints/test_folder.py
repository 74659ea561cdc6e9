"""Model folders: shards against their index, what is carried to an output, and what is refused with which words."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as oracle
import torch

from attar.checkpoints import folder as checkpoint_folder
from attar.checkpoints.folder import INDEX, MAX_CONFIG, MAX_ENTRIES, Folder, read_json
from attar.checkpoints.strict_io import MAX_WIDE
from attar.formats.scheme import Part
from tests.errors import user_error

A, B = {"a": torch.arange(6.0).view(3, 2)}, {"b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(())}
SHARDS = {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": B}
ONE, TWO = SHARDS
WEIGHT_MAP = {name: shard for shard, tensors in SHARDS.items() for name in tensors}


def single(folder: Path, config: str = '{"model_type": "llama"}') -> Path:
    (folder / "config.json").write_text(config)
    oracle.save_file({**A, **B}, folder / "model.safetensors")
    return folder


def sharded(folder: Path, weight_map: Any = WEIGHT_MAP, **extra: Any) -> Path:
    (folder / "config.json").write_text("{}")
    for shard, tensors in SHARDS.items():
        oracle.save_file(tensors, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **extra}))
    return folder


@pytest.mark.parametrize("make", [single, sharded])
def test_tensors_are_found_in_whichever_file_holds_them(make: Any, tmp_path: Path) -> None:
    folder = Folder(make(tmp_path))
    assert set(folder.names()) == {"a", "b", "c"}
    assert folder.has("b")
    assert not folder.has("d")
    assert folder.info("b") == Part("bfloat16", (4,))
    for name, tensor in {**A, **B}.items():
        assert torch.equal(folder.read(name), tensor)
    assert torch.equal(folder.read_rows("a", 1, 3), A["a"][1:3])
    out = torch.empty(3, 2)
    assert folder.read("a", out) is out
    assert torch.equal(out, A["a"])


def test_the_hub_caches_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "1234").mkdir(parents=True)
    for file in list(sharded(tmp_path).glob("*.*")):
        file.rename(tmp_path / "blobs" / file.name)
        (tmp_path / "snapshots" / "1234" / file.name).symlink_to(Path("../../blobs", file.name))
    assert torch.equal(Folder(tmp_path / "snapshots" / "1234").read("a"), A["a"])


def test_a_single_file_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    (single(tmp_path) / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    folder = Folder(tmp_path)
    assert list(folder.files) == ["gptq_model-4bit-128g.safetensors"]
    oracle.save_file(A, tmp_path / "other.safetensors")
    with user_error("checkpoint_incomplete", "model.safetensors", "index.json"):
        Folder(tmp_path)


INDEX_REFUSED: list[tuple[Any, str]] = [
    ({**WEIGHT_MAP, "d": "model-00003-of-00003.safetensors"}, "checkpoint_incomplete"),
    (
        {**WEIGHT_MAP, "d": ONE},
        "checkpoint_mismatch",
    ),
    ({k: v for k, v in WEIGHT_MAP.items() if k != "c"}, "checkpoint_mismatch"),
    ({**WEIGHT_MAP, "c": ONE}, "checkpoint_mismatch"),
    ({**WEIGHT_MAP, "d": "../x.safetensors"}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": "/x.safetensors"}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": ".x.safetensors"}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": "sub/x.safetensors"}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": "x\n.safetensors"}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": "pytorch_model.bin"}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": ""}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": None}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": ["x.safetensors"]}, "checkpoint_malformed"),
    ({**WEIGHT_MAP, "d": INDEX}, "checkpoint_malformed"),
    ({}, "checkpoint_malformed"),
    ([], "checkpoint_malformed"),
    (None, "checkpoint_malformed"),
]


@pytest.mark.parametrize(("weight_map", "words"), INDEX_REFUSED)
def test_an_index_that_does_not_fit_its_shards_is_refused(weight_map: Any, words: str, tmp_path: Path) -> None:
    with user_error(words):
        Folder(sharded(tmp_path, weight_map))


def test_an_index_of_very_many_entries_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(tmp_path, dict.fromkeys((f"d{i}" for i in range(MAX_ENTRIES)), ONE))
    lengths: list[int] = []
    monkeypatch.setattr(checkpoint_folder, "parse_json", lambda text, *_: lengths.append(len(text)) or {})
    with user_error("file_too_large"):
        Folder(tmp_path)
    assert lengths == [2], "config.json alone"


@pytest.mark.parametrize("character", ["\U0001f600", "\u0441", "\\u0441"])
def test_long_json_is_ascii(character: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for length, refused in ((MAX_WIDE // 2, False), (MAX_WIDE, True)):
        path.write_text('{"a":"' + "x" * length + character + '"}', encoding="utf-8")
        if refused:
            with user_error("file_malformed"):
                read_json(path, MAX_CONFIG)
        else:
            assert len(read_json(path, MAX_CONFIG)["a"]) == length + 1
    path.write_text('{"a":"' + "x" * MAX_WIDE + '"}', encoding="utf-8")
    assert len(read_json(path, MAX_CONFIG)["a"]) == MAX_WIDE


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    oracle.save_file({**B, "a": A["a"]}, sharded(tmp_path) / TWO)
    with user_error("checkpoint_mismatch"):
        Folder(tmp_path)


def test_a_truncated_shard_is_found_at_opening(tmp_path: Path) -> None:
    os.truncate(sharded(tmp_path) / TWO, (tmp_path / TWO).stat().st_size - 1)
    with user_error("checkpoint_incomplete", "model-00002-of-00002.safetensors"):
        Folder(tmp_path)


def test_a_large_index_is_read_and_a_wrong_total_is_no_matter(tmp_path: Path) -> None:
    weight_map = {**WEIGHT_MAP, **{f"d{i}": ONE for i in range(100_000)}}
    with user_error("checkpoint_mismatch"):
        Folder(sharded(tmp_path, weight_map))
    assert Folder(sharded(tmp_path, metadata={"total_size": -1})).has("a")


def test_two_answers_to_where_the_weights_are_is_an_error(tmp_path: Path) -> None:
    single(sharded(tmp_path))
    with user_error("checkpoint_mismatch"):
        Folder(tmp_path)


CONFIG_REFUSED: list[tuple[bytes, str]] = [
    (b"", "file_malformed"),
    (b"[]", "file_malformed"),
    (b'"x"', "file_malformed"),
    (b"{", "file_malformed"),
    (b'\xef\xbb\xbf{"a":1}', "file_malformed"),
    (b'{"a":"\xff"}', "file_malformed"),
    (b'{"a":1} x', "file_malformed"),
    (b"{'a':1}", "file_malformed"),
    (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "file_malformed"),
    (b'{"a":' + b"9" * 5000 + b"}", "file_malformed"),
    (b" " * 16_000_001, "file_too_large"),
    (b'{"a":[' + b"[]," * 5_000_000 + b"[]]}", "file_too_large"),
]


@pytest.mark.parametrize(("text", "words"), CONFIG_REFUSED)
def test_a_config_that_is_no_json_is_refused(text: bytes, words: str, tmp_path: Path) -> None:
    (single(tmp_path) / "config.json").write_bytes(text)
    with user_error(words) as caught:
        Folder(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":2}', b'{"a":{"b":1,"b":1}}', b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}']
)
def test_a_config_is_read_as_python_reads_it_with_a_warning(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (single(tmp_path) / "config.json").write_bytes(text)
    assert repr(Folder(tmp_path).config) == repr(json.loads(text))
    assert str(tmp_path / "config.json") in caplog.text


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused_with_a_recipe_and_not_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")
    with user_error("file_unsafe"):
        Folder(tmp_path)
    assert not Path("canary").exists()


def test_other_kinds_of_folder_are_named(tmp_path: Path) -> None:
    with user_error("file_not_found"):
        Folder(tmp_path / "absent")
    with user_error("file_wrong_kind", "config.json"):
        Folder(tmp_path)
    (tmp_path / "x.gguf").touch()
    with user_error("file_wrong_kind"):
        Folder(tmp_path)
    (tmp_path / "checkpoint-500").mkdir()
    single(tmp_path / "checkpoint-500")
    with user_error("file_wrong_kind"):
        Folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with user_error("file_wrong_kind"):
        Folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with user_error("checkpoint_incomplete"):
        Folder(tmp_path)


def test_an_unknown_tensor_offers_the_nearest(tmp_path: Path) -> None:
    oracle.save_file({"model.norm.weight": torch.ones(2)}, single(tmp_path) / "model.safetensors")
    with user_error("checkpoint_incomplete"):
        Folder(tmp_path).read("norm.weight")


def test_what_belongs_to_the_model_is_carried_and_nothing_else(tmp_path: Path) -> None:
    wanted = {
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer.model.v3",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tools.jinja",
        "generation_config.json",
        "preprocessor_config.json",
        "qwen.tiktoken",
        "LICENSE",
        "NOTICE.txt",
    }
    left = {
        "modeling_llama.py",
        "pytorch_model.bin",
        "optimizer.pt",
        "training_args.bin",
        "README.md",
        "recipe.yaml",
        "receipt.json",
        "trainer_state.json",
        "tokenizer.model.py",
        "LICENSE.py",
        ".env",
        "original/tokenizer.model",
        "additional_chat_templates/x.py",
        "quantize_config.json",
    }
    single(tmp_path)
    for name in wanted | left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "vocab.txt").mkdir()  # a folder of a file's name
    assert Folder(tmp_path).carry_files() == tuple(sorted(wanted))


def test_a_link_out_of_the_folder_is_not_carried(tmp_path: Path) -> None:
    """Or what lies behind it, a private key perhaps, would be published with the output."""
    (tmp_path / "secret").write_text("x")
    for name, target in (("tokenizer.json", "../secret"), ("additional_chat_templates/a.jinja", "../../secret")):
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        single(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)
        with user_error("file_unsafe"):
            Folder(folder).carry_files()


def test_blobs_beside_a_folder_within_a_snapshot_are_carried_of_a_part_alone(tmp_path: Path) -> None:
    """Any output may lie in a folder of a folder that is called snapshots."""
    folder = tmp_path / "snapshots" / "x" / "out"
    folder.mkdir(parents=True)
    single(folder)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "77").write_text("77")
    (folder / "tokenizer.json").symlink_to("../../../blobs/77")
    with user_error("file_unsafe", "tokenizer.json"):
        Folder(folder).carry_files()
    assert Folder(folder, is_part=True).carry_files() == ("tokenizer.json",)


def test_links_within_a_model_are_carried(tmp_path: Path) -> None:
    """The folder's own, whatever it is reached through, and those of the Hub's cache."""
    folder = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    folder.mkdir(parents=True)
    single(folder)
    (folder / "LICENSE.md").write_text("x")
    (folder / "LICENSE").symlink_to("LICENSE.md")
    (folder.parent.parent / "blobs").mkdir()
    (folder.parent.parent / "blobs" / "77").write_text("77")
    (folder / "tokenizer.json").symlink_to("../../blobs/77")
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        found = Folder(path)
        assert found.carry_files() == ("LICENSE", "LICENSE.md", "tokenizer.json")
        out = tmp_path / f"out-{path.name}"
        out.mkdir()
        found.carry(found.carry_files(), out)
        copies = {each.name: each.read_text() for each in out.iterdir() if not each.is_symlink()}
        assert copies == {"LICENSE": "x", "LICENSE.md": "x", "tokenizer.json": "77"}


def test_folders_within_a_model_are_carried(tmp_path: Path) -> None:
    (tmp_path / "model" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "model" / "additional_chat_templates" / "a.jinja").write_text("x")
    (tmp_path / "out").mkdir()
    folder = Folder(single(tmp_path / "model"))
    folder.carry(folder.carry_files(), tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "a.jinja").read_text() == "x"


def test_hashes_are_of_the_files_and_progress_reaches_the_end(tmp_path: Path) -> None:
    seen = list[tuple[int, int]]()
    hashes = Folder(sharded(tmp_path)).source_hashes(lambda done, total: seen.append((done, total)))
    assert list(hashes) == ["config.json", INDEX, ONE, TWO]
    for name, digest in hashes.items():
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    total = sum((tmp_path / name).stat().st_size for name in SHARDS)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(sharded(tmp_path) / "pipe")
    for name in (INDEX, ONE, "config.json"):
        os.replace(tmp_path / name, tmp_path / "kept")
        os.link(tmp_path / "pipe", tmp_path / name)
        with user_error("file_wrong_kind"):
            Folder(tmp_path)
        os.replace(tmp_path / "kept", tmp_path / name)


def test_a_trained_checkpoint_opens(shared: Path) -> None:
    path = shared / "models" / "TinyStories-656K"
    if not path.is_dir():
        pytest.skip("the shared models are not at hand")
    folder, expected = Folder(path), oracle.load_file(path / "model.safetensors")
    assert set(folder.names()) == set(expected)
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in expected.items())
    assert "tokenizer.json" in folder.carry_files()
