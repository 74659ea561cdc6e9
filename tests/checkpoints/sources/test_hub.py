"""What a user may call a model. The network is never used: downloads are replaced, or answered from a made-up cache."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from attar.checkpoints.sources import hub
from tests.errors import user_error

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every download asked for; each gives the same folder."""
    seen: list[dict[str, Any]] = []
    folder = model(tmp_path / "downloaded")

    def fake(repo_id: str, **options: Any) -> str:
        seen.append({"repo_id": repo_id, **options})
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: ["pytorch_model.bin"])
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    monkeypatch.chdir(tmp_path)

    def install(error: Exception) -> None:
        def fake(*_: Any, **__: Any) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)

    return install


def http_error(kind: type[errors.HfHubHTTPError], message: str = "401 Client Error\nmore") -> errors.HfHubHTTPError:
    error = kind.__new__(kind)  # without a response of whichever HTTP client is installed
    Exception.__init__(error, message)
    return error


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    model(tmp_path / "org" / "name")
    assert hub.resolve("org/name") == Path("org/name")
    assert hub.resolve(tmp_path / "org") == tmp_path / "org"
    assert calls == []


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model(tmp_path / "m")
    assert hub.resolve("~/m") == tmp_path / "m"


@pytest.mark.parametrize(
    ("given", "argument", "repo", "revision"),
    [
        ("org/name", None, "org/name", None),
        ("org/name", "v2", "org/name", "v2"),
        ("org/name@refs/pr/3", None, "org/name", "refs/pr/3"),
        ("Qwen/Qwen3-0.6B@main", None, "Qwen/Qwen3-0.6B", "main"),
        ("org/name.gguf", None, "org/name.gguf", None),
        ("org/name.gguf@main", None, "org/name.gguf", "main"),
    ],
)
def test_a_hub_id_is_downloaded(
    given: str, argument: str | None, repo: str, revision: str | None, calls: list[dict[str, Any]]
) -> None:
    assert hub.resolve(given, revision=argument).name == "downloaded"
    assert [(call["repo_id"], call["revision"], call["local_files_only"]) for call in calls] == [
        (repo, revision, False)
    ]


def test_offline_asks_for_the_cache_alone(calls: list[dict[str, Any]]) -> None:
    hub.resolve("org/name", offline=True)
    assert calls[0]["local_files_only"] is True


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("tokenizer.model", True),
        ("merges.txt", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tools.jinja", True),
        ("LICENSE", True),
        ("pytorch_model.bin", False),
        ("modeling.py", False),
        ("model.pt", False),
        ("model.gguf", False),
        ("original/params.json", False),
        ("onnx/model.safetensors", False),
        ("consolidated.safetensors", False),
    ],
)
def test_only_data_is_asked_for(name: str, wanted: bool, calls: list[dict[str, Any]]) -> None:
    hub.resolve("org/name")
    allowed = any(fnmatch(name, pattern) for pattern in calls[0]["allow_patterns"])
    ignored = any(fnmatch(name, pattern) for pattern in calls[0]["ignore_patterns"])
    assert (allowed and not ignored) == wanted


def test_a_misspelt_path_offers_its_neighbours(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    model(tmp_path / "llama-small")
    for given in ("./llama-smal", "llama-smal", f"{tmp_path}/llama-smal"):
        with user_error("file_not_found"):
            hub.resolve(given)
    with user_error("file_not_found"):
        hub.resolve("gpt2")
    with user_error("file_not_found"):
        hub.resolve("./no/where")
    assert calls == []


def test_a_gguf_file_that_is_not_there_is_called_a_file(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    (tmp_path / "llama.gguf").write_bytes(b"GGUF")
    for given in ("nothing.gguf", "./nothing.gguf", f"{tmp_path}/Nothing.GGUF"):
        with user_error("file_not_found"):
            hub.resolve(given)
    with user_error("file_not_found", "lama.gguf", "llama.gguf"):
        hub.resolve(tmp_path / "lama.gguf")
    assert calls == []


def test_a_local_file_wins_over_a_repository_that_ends_in_gguf(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name.gguf").write_bytes(b"GGUF")
    assert hub.resolve("org/name.gguf") == Path("org/name.gguf")
    with user_error("file_not_found", "no such file", "name.gguf"):
        hub.resolve("org/nam.gguf")
    assert calls == []


def test_a_link_of_the_same_name_is_followed_to_what_lies_beside_its_file(tmp_path: Path) -> None:
    there, here = tmp_path / "there" / "model.gguf", tmp_path / "here"
    there.parent.mkdir()
    here.mkdir()
    there.touch()
    for name, expected in (("model.gguf", there), ("other.gguf", here / "other.gguf")):
        (here / name).symlink_to(there)
        assert hub.resolve(here / name) == expected


def test_a_file_of_the_hub_lies_within_its_repository(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    for part in (str(tmp_path), "", ".", "..", "a/../..", "a/."):
        (tmp_path / "x.gguf").write_bytes(b"GGUF")
        with user_error("file_not_found", "no such file"):
            hub.resolve(f"org/name/{part}/x.gguf")
    assert calls == []


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    with user_error("file_wrong_kind"):
        hub.resolve(model(tmp_path) / "model.safetensors")


def test_two_revisions_are_one_too_many(calls: list[dict[str, Any]]) -> None:
    with user_error("option_conflict"):
        hub.resolve("org/name@v1", revision="v2")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.GatedRepoError), "file_not_permitted"),
        (http_error(errors.RepositoryNotFoundError), "file_not_found"),
        (http_error(errors.RevisionNotFoundError), "file_not_found"),
        (errors.LocalEntryNotFoundError("x"), "download_failed"),
        (
            http_error(errors.HfHubHTTPError, "500 Server Error\nmore"),
            "download_failed",
        ),
        (OSError(28, "No space left on device"), "download_failed"),
        (RuntimeError(), "download_failed"),
    ],
)
def test_each_failure_of_the_hub_is_one_sentence(
    error: Exception, words: str, failing: Callable[[Exception], None]
) -> None:
    failing(error)
    with user_error(words) as caught:
        hub.resolve("org/name@v9")
    assert "\n" not in str(caught.value)


def test_an_id_not_found_offers_local_neighbours(tmp_path: Path, failing: Callable[[Exception], None]) -> None:
    failing(http_error(errors.RepositoryNotFoundError))
    model(tmp_path / "models" / "llama")
    with user_error("file_not_found"):
        hub.resolve("models/lama")


def test_a_repository_of_pickles_gets_the_recipe(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    (tmp_path / "downloaded" / "model.safetensors").unlink()
    with user_error("checkpoint_incomplete"):
        hub.resolve("org/name")


@pytest.mark.parametrize("name", ["..", ".", "", "../other", "a/b", "/etc", "a\nb"])
def test_folders_of_vila_lie_within_the_repository(name: str, tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    config = {"llm_cfg": name, "vision_tower_cfg": "eyes[1]", "mm_projector_cfg": {}}
    (tmp_path / "downloaded" / "config.json").write_text(json.dumps(config))
    with user_error("file_unsafe", "llm_cfg"):
        hub.resolve("org/name", vila=True)
    assert len(calls) == 1
    (tmp_path / "downloaded" / "config.json").write_text(json.dumps(config | {"llm_cfg": "words"}))
    hub.resolve("org/name", vila=True)
    assert {each.rpartition("/")[0] for each in calls[-1]["allow_patterns"]} == {"words", "eyes[[]1]", "mm_projector"}


def test_the_cache_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    snapshot = model(cache / "models--org--name" / "snapshots" / COMMIT)
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text(COMMIT)
    assert hub.resolve("org/name", offline=True) == snapshot
    assert hub.resolve(f"org/name@{COMMIT}", offline=True) == snapshot
    with user_error("file_not_found", "local cache", "`hf download org/other`"):
        hub.resolve("org/other", offline=True)


@pytest.mark.parametrize("by_argument", [True, False])
def test_what_is_not_cached_is_not_said_to_be_absent(
    by_argument: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any snapshot is enough for `snapshot_download`, be it without the file."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", not by_argument)
    snapshot = cache / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").touch()
    (cache / "models--org--name" / "refs").mkdir()
    (cache / "models--org--name" / "refs" / "main").write_text(COMMIT)
    for name, fetch in (
        ("org/name", "`hf download org/name`"), ("org/name@main", "`hf download org/name --revision main`"),
        ("org/name/q/x.gguf", "`hf download org/name q/x.gguf`"), ("org/none/x.gguf", "`hf download org/none x.gguf`"),
    ):  # fmt: skip
        with user_error("file_not_found", "local cache", fetch) as caught:
            hub.resolve(name, offline=True if by_argument else None)
        assert "on the Hub" not in str(caught.value)


def test_demo_is_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.chdir(model(tmp_path / "elsewhere" / "demo").parent)
    with user_error("package_missing"):
        hub.resolve("demo")
    model(tmp_path / "data" / "demo")
    assert hub.resolve("demo") == tmp_path / "data" / "demo"
    assert hub.resolve("./demo") == Path("demo")


def test_nothing_heavy_is_imported_for_a_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from attar.checkpoints import folder; from attar.checkpoints.sources import hub; "
        "hub.resolve(sys.argv[1]); "
        "print([m for m in ('torch', 'huggingface_hub') if m in sys.modules])"
    )
    source = str(Path(hub.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env={"PYTHONPATH": source}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ["org/name", "org/name/x.gguf"])
def test_a_fresh_process_asks_the_hub(name: str, tmp_path: Path) -> None:
    """No test before has imported a part of huggingface_hub there, which the package loads as it is asked for."""
    script = (
        "import sys; from attar.checkpoints.sources import hub\n"
        "try: hub.resolve(sys.argv[1])\n"
        "except hub.CheckpointError as error: print(error.code)"
    )
    source = str(Path(hub.__file__).parents[3])
    settings = {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script, name], env=settings, capture_output=True, text=True)
    assert done.stdout.strip() == "file_not_found", done.stderr


def test_a_source_of_drafts_is_a_drafter_or_a_model(tmp_path: Path) -> None:
    assert hub.resolve_draft(None) is None
    assert hub.resolve_draft("suffix") == "suffix"
    assert hub.resolve_draft(str(tmp_path)) == str(tmp_path)
    for name in ("", "ngram"):
        with user_error("option_missing" if not name else "file_not_found", "suffix"):
            hub.resolve_draft(name)
