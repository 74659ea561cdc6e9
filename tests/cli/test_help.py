"""Rules of the command line: examples that parse, groups of few options, short metavars, short bodies."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import attar.cli
from attar.cli.commands import GROUPS
from attar.cli.main import app
from attar.cli.scheduling import KEYS
from attar.protocol.scheduler_config import SchedulerConfig
from tests.cli.test_commands import refused

MOST_OPTIONS, MOST_LINES, MOST_PARAMETERS = 8, 30, 8
METAVAR = re.compile(r"[A-Z]{1,9}([=:][A-Z]{1,5})?")
ROOT: Any = typer.main.get_command(app)


def tables(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words, command) of a command and of all below it."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from tables(each, (*path, name))


ALL = dict(tables(ROOT))
COMMANDS = {path: command for path, command in ALL.items() if not hasattr(command, "commands")}


def named(path: tuple[str, ...]) -> str:
    return " ".join(("attar", *path))


def shown(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    return result.stdout


def options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option"]


def test_the_table_is_whole() -> None:
    assert len(COMMANDS) == 24
    assert {path for path in COMMANDS if len(path) == 2} == {
        ("tritonserver", name) for name in ("import", "export", "fill")
    }


@pytest.mark.parametrize("path", ALL, ids=named)
def test_help_has_examples_that_parse(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    section = re.search(r"^  Examples:\n((?:    .+\n)+)", shown(path, monkeypatch), re.M)
    assert section, named(path)
    examples = [line.removeprefix("    ") for line in section[1].splitlines()]
    assert any(line.startswith(named(path)) for line in examples)
    for line in examples:
        assert len(line) <= 76, line
        program, *words = shlex.split(line.partition(" < ")[0].partition(" > ")[0])
        assert program == "attar"
        command, context = ROOT, None
        while hasattr(command, "commands"):
            context = typer.Context(command, parent=context, info_name=program)
            command = command.commands[words.pop(0)]
        command.make_context(program, words, parent=context)


@pytest.mark.parametrize("path", ALL, ids=named)
def test_usage_brackets_what_is_optional_once(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    help = shown(path, monkeypatch)
    assert not re.search(r"\[\[|\]\]|[{}<]", help.partition("Examples:")[0]), help
    for each in ALL[path].params:
        if each.param_type_name == "argument":
            usage = help.splitlines()[0]
            bracketed = any(f"[{each.metavar}{several}]" in usage for several in ("", "..."))
            assert bracketed is not each.required
            assert each.metavar in usage


@pytest.mark.parametrize("path", COMMANDS, ids=named)
def test_options_stand_in_groups_of_few(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Counter(each.rich_help_panel for each in options(COMMANDS[path]))
    assert found.keys() <= set(GROUPS)
    found[GROUPS[-1]] += 1  # --help
    assert max(found.values()) <= MOST_OPTIONS, found
    help = shown(path, monkeypatch)
    assert re.findall(r"^(\w[\w ]*):$", help.partition("Arguments:")[2] or help, re.M) == [
        group for group in GROUPS if group in found
    ]


@pytest.mark.parametrize("path", COMMANDS, ids=named)
def test_metavars_are_short_and_help_has_sentences(path: tuple[str, ...]) -> None:
    for each in COMMANDS[path].params:
        if not getattr(each, "is_flag", False):
            assert METAVAR.fullmatch(each.metavar), each.metavar
        assert each.help.endswith("."), each.help
        assert "default" not in each.help, "help writes defaults behind the text"
    purpose = COMMANDS[path].help.partition("\n")[0]
    assert purpose.endswith(".")


def test_sentences_of_help_are_short() -> None:
    texts = [each.help for command in ALL.values() for each in command.params]
    texts += [command.help.partition("Examples:")[0] for command in ALL.values()]
    counts = [
        len(sentence.split())
        for text in texts
        for paragraph in text.split("\n\n")
        for sentence in re.split(r"(?<=[.;:])\s+", " ".join(paragraph.split()))
        if sentence
    ]
    assert max(counts) <= 30
    assert sum(counts) / len(counts) <= 14


def test_bodies_are_short_and_functions_take_few_parameters() -> None:
    (folder,) = map(Path, attar.cli.__path__)
    functions = [
        (file.name, node)
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(functions) > 80
    callbacks = {command.callback.__name__ for command in COMMANDS.values()}
    assert {node.name for _, node in functions} >= callbacks
    for file, node in functions:
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        lines = node.end_lineno - body[0].lineno + 1 if body else 0
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        assert len(arguments) <= MOST_PARAMETERS, f"{file}: {node.name}"
        if node.name in callbacks:
            assert lines <= MOST_LINES, f"{file}: {node.name}"


def test_the_keys_of_the_scheduler_are_listed_with_defaults() -> None:
    for command in ("serve", "plan", "tritonserver export"):
        done = CliRunner().invoke(app, [*command.split(), "--scheduler", "help"])
        assert done.exit_code == 0, done.output
        assert re.findall(r"^[a-z-]+", done.stdout, re.M) == list(KEYS)
        for name in KEYS:
            assert f"[default: {getattr(SchedulerConfig(), name.replace('-', '_'))}]" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "given, says",
    [
        ("max-wait=3", "name_unknown"),
        ("policy", "option_malformed"),
        ("=3", "name_unknown"),
        ("max-waiting=many", "option_malformed"),
        ("max-waiting=1.5", "option_malformed"),
        ("max-waiting=0", "option_out_of_range"),
        ("policy=fifo", "name_unknown"),
        ("max-step-tokens=2", "option_conflict"),
    ],
)
def test_a_wrong_setting_of_the_scheduler_names_the_keys(given: str, says: str) -> None:
    for command in ("serve demo", "plan demo --bandwidth 1GB"):
        done = CliRunner().invoke(app, [*command.split(), "--scheduler", given, "--json"])
        refused(done, 2, says, as_json=True)


def test_a_setting_of_the_scheduler_is_given_once() -> None:
    twice = ["--scheduler", "max-waiting=3", "--scheduler", "max-waiting=4", "--json"]
    refused(CliRunner().invoke(app, ["serve", "demo", *twice]), 2, "option_conflict", as_json=True)
