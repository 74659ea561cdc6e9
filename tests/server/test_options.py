"""Names of models and adapters: what each goes by, and which of them requests can ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attar.server.options import check_name, name_of, parse_adapters
from tests.errors import user_error


def test_a_folder_goes_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small" / "inner").mkdir(parents=True)
    (tmp_path / "current").symlink_to("small")
    (tmp_path / "blob").touch()
    (tmp_path / "model.gguf").symlink_to("blob")  # as in the Hub's cache
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "small")
    for given in (".", "./", "../small", "inner/..", str(tmp_path / "small"), "~/small/"):
        assert name_of(given) == "small", given
    assert name_of("..") == tmp_path.name
    assert name_of("../current/") == "current"
    assert name_of("~/model.gguf") == "model.gguf"
    with user_error("model_name_invalid"):
        name_of("/")


def test_a_name_that_is_no_unicode_is_text_for_clients(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"mod\xe8le")
    folder.mkdir()
    assert name_of(str(folder)) == "mod\ufffdle"


def test_a_hub_id_is_a_name_unless_it_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("acme/tiny", "acme/tiny@v2", "demo"):
        assert name_of(given) == given
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert name_of("acme/tiny") == "tiny"


def test_names_that_requests_can_ask_for() -> None:
    for name in ("a", "acme/tiny@v1.2", "gpt-4o:mini", "x" * 256):
        assert check_name(name) == name
    for name in ("", " ", "a b", "/a", "-a", "a\n", "é", "x" * 257):
        with user_error("model_name_invalid"):
            check_name(name)


def test_names_of_adapters(tmp_path: Path) -> None:
    tone, style = (str(tmp_path / name) for name in ("tone", "style"))
    for folder in (tone, style):
        Path(folder).mkdir()
        (Path(folder) / "adapter_config.json").write_text("{}")
    assert parse_adapters([f"a={tone}", f"b:1={style}"], "model") == (("a", tone), ("b:1", style))
    for given, sentence in (
        ([tone], "option_malformed"),
        ([f"a/b={tone}"], "option_malformed"),
        ([f"a={tone}", f"a={style}"], "option_conflict"),
        ([f"model={tone}"], "option_conflict"),
        (["a=nowhere"], "adapter_invalid"),
        ([f"a{i}={tone}" for i in range(65)], "option_out_of_range"),
    ):
        with user_error(sentence):
            parse_adapters(given, "model")
