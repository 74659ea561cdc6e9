"""The proof that two commits put out the same bytes must fail where they do not."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import same_bytes
import same_bytes_cases
import same_bytes_models
import torch
from safetensors.torch import load_file, save_file

RECEIPT = {"seed": 0, "layers": [{"error": 0.5}], "versions": {"attar": "0.1.0", "torch": "2"}}
TEXT = {"greedy": [{"token_ids": [3, 5], "logprobs": [-0.25, -0.125]}]}


def put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a case leaves: a compressed folder and a text."""
    out = tmp_path / "old" / "out"
    out.mkdir(parents=True)
    save_file({"a.weight": torch.zeros(4), "b.weight": torch.ones(2, 2)}, out / "model.safetensors")
    put(out / "config.json", {"layers": 1})
    put(out / "receipt.json", RECEIPT)
    put(out.parent / "text.json", TEXT)
    (tmp_path / "input").write_text("not a part of it")
    (out.parent / "models").symlink_to(tmp_path)
    return out.parent


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """Edit a file of JSON in place."""
    value = json.loads(path.read_bytes())
    edit(value)
    put(path, value)


def flip(path: Path) -> None:
    """Change one bit of the last byte."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def retype(path: Path) -> None:
    """Store a tensor's bytes under another dtype."""
    tensors = load_file(path)
    save_file({**tensors, "a.weight": tensors["a.weight"].view(torch.int32)}, path)


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a byte of a tensor": (
        lambda new: flip(new / "out/model.safetensors"), ["out/model.safetensors: b.weight (1 of 2 tensors)"],
    ),
    "a tensor's dtype": (
        lambda new: retype(new / "out/model.safetensors"), ["out/model.safetensors: a.weight (1 of 2 tensors)"],
    ),
    "the metadata of tensors": (
        lambda new: save_file(
            load_file(new / "out/model.safetensors"), new / "out/model.safetensors", metadata={"format": "pt"}
        ),
        ["out/model.safetensors: its bytes (0 of 2 tensors)"],
    ),
    "a byte of another file": (lambda new: flip(new / "out/config.json"), ["out/config.json: its bytes"]),
    "a missing file": (
        lambda new: (new / "out/config.json").unlink(), ["out/config.json: only the old commit writes it"],
    ),
    "another file": (lambda new: put(new / "out/more.json", 1), ["out/more.json: only the new commit writes it"]),
    "a value of a receipt": (
        lambda new: change(new / "out/receipt.json", lambda value: value["layers"][0].update(error=0.5000000000000001)),
        ["out/receipt.json: layers.0.error was 0.5, is 0.5000000000000001"],
    ),
    "a key of a receipt": (
        lambda new: change(new / "out/receipt.json", lambda value: value.pop("seed")),
        ["out/receipt.json: seed was 0, is absent"],
    ),
    "another version in a receipt": (
        lambda new: change(new / "out/receipt.json", lambda value: value["versions"].update(torch="3")),
        ['out/receipt.json: versions.torch was "2", is "3"'],
    ),
    "a token": (
        lambda new: change(new / "text.json", lambda value: value["greedy"][0].update(token_ids=[3, 6])),
        ["text.json: greedy.0.token_ids.1 was 5, is 6"],
    ),
    "the sign of a log-probability": (
        lambda new: change(new / "text.json", lambda value: value["greedy"][0].update(logprobs=[-0.25, 0.125])),
        ["text.json: greedy.0.logprobs.1 was -0.125, is 0.125"],
    ),
    "a shorter text": (
        lambda new: change(new / "text.json", lambda value: value["greedy"][0].update(token_ids=[])),
        [
            "text.json: greedy.0.token_ids.0 was 3, is absent", "text.json: greedy.0.token_ids.1 was 5, is absent",
            "text.json: greedy.0.token_ids was absent, is []",
        ],
    ),
    "attar's own version": (
        lambda new: change(new / "out/receipt.json", lambda value: value["versions"].update(attar="0.2.0")), [],
    ),
    "nothing": (lambda new: None, []),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_named(left: Path, what: str) -> None:
    edit, named = CHANGES[what]
    new = Path(shutil.copytree(left, left.with_name("new"), symlinks=True))
    edit(new)
    old = same_bytes.describe(left)
    assert sorted(old) == ["out/config.json", "out/model.safetensors", "out/receipt.json", "text.json"]
    assert same_bytes.differences(old, same_bytes.describe(new)) == named


def test_hashes_of_receipts_may_differ_only_where_the_versions_do(left: Path) -> None:
    new = Path(shutil.copytree(left, left.with_name("new"), symlinks=True))
    for folder, known in ((left, "one"), (new, "other")):
        change(folder / "out/receipt.json", lambda value, known=known: value.update(converted={"receipts": [known]}))

    def found() -> list[str]:
        return same_bytes.differences(same_bytes.describe(left), same_bytes.describe(new))

    assert found() == ['out/receipt.json: converted.receipts.0 was "one", is "other"']
    change(new / "out/receipt.json", lambda value: value["versions"].update(attar="0.2.0"))
    assert found() == []


PROGRAM = """
import pathlib, sys
assert sys.argv[1] == {command!r}, sys.argv
pathlib.Path("out").write_text({text!r})
print("progress")
print('{{"value": 1}}')
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of three commits of a package that writes a file; tags `one`, `renamed` and `other`."""
    package = tmp_path / "repository" / "src" / "attar"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__all__ = ()\n")

    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *author, *words], cwd=package, check=True, capture_output=True)

    git("init", str(package.parent.parent))
    for tag, command, text in (("one", "go", "a"), ("renamed", "run", "a"), ("other", "run", "b")):
        (package / "__main__.py").write_text(PROGRAM.format(command=command, text=text))
        git("add", ".")
        git("commit", "--message", tag)
        git("tag", tag)
    return package.parent.parent


@pytest.mark.slow
def test_commits_are_compared_and_results_kept(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = same_bytes_cases.Spelling("attar go > it.json", "attar run > it.json")
    monkeypatch.setattr(same_bytes_cases, "cases", lambda real: [same_bytes_cases.Case("it", (step,))])
    (tmp_path / "work/inputs").mkdir(parents=True)
    shutil.copy(same_bytes_models.__file__, tmp_path / "work/inputs.program")

    def compare(old: str, new: str) -> tuple[int, dict[str, Any]]:
        words = [old, new, "--work", str(tmp_path / "work"), "--repo", str(repository), "--json"]
        status = same_bytes.main(words)
        return status, json.loads(capsys.readouterr().out)["cases"]["it"]

    status, first = compare("one", "renamed")
    assert (status, first["differences"]) == (0, [])
    status, again = compare("one", "other")
    assert (status, again["differences"]) == (1, ["out: its bytes"])
    assert again["seconds"][0] == first["seconds"][0], "the old commit ran again"
    status, failed = compare("renamed", "other")  # the old spelling, which it does not know
    assert status == 1
    assert "ended with 1" in failed["differences"][0]


def test_every_case_has_a_name_of_its_own_and_inputs_that_exist() -> None:
    cases = same_bytes_cases.cases(Path("/models"))
    assert len({case.name for case in cases}) == len(cases)
    assert set(same_bytes_cases.FAMILIES) == set(same_bytes_models.FAMILIES)
    words = {word for case in cases for side in ("old", "new") for step in case.spelt(side) for word in step.split()}
    models = {word.removeprefix("models/") for word in words if word.startswith("models/")}
    recipes = {Path(word).stem for word in words if word.startswith("recipes/")}
    assert models <= set(same_bytes_models.FAMILIES)
    assert recipes == set(same_bytes_models.RECIPES)
