"""Batching policies compared: lists of them, a server that does not start, and one of each on the embedded model."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT
from attar.load import policies
from tests.cli.test_commands import last_json, refused
from tests.errors import user_error

SMALL = "--prompt 12 --gen 6 --spread 0.5 --requests 6 --clients 3"


def test_lists_are_parsed() -> None:
    assert policies.parse("none,continuous") == ("none", "continuous")


@pytest.mark.parametrize("text, code", [("static,quick", "name_unknown"), ("", "name_unknown"),
                                        ("static,static", "option_conflict")])  # fmt: skip
def test_wrong_lists(text: str, code: str) -> None:
    with user_error(code):
        policies.parse(text)


@pytest.mark.parametrize(
    "options, code",
    [
        ("--batching static", "option_missing"),
        ("--batching static --model demo --url http://127.0.0.1:1", "option_conflict"),
        ("--serve '--kv int8'", "option_unused"),
        ("--batching quick --model demo", "name_unknown"),
    ],
)
def test_options_that_do_not_go_together(options: str, code: str) -> None:
    done = CliRunner().invoke(app, ["bench-serve", *shlex.split(options), "--json"])
    refused(done, BAD_INPUT, code, as_json=True)


def test_a_server_that_does_not_start_says_why() -> None:
    with user_error("server_unreachable") as raised, policies.served("demo", ["--kv", "nonsense"]):
        pytest.fail("it started")
    assert "nonsense" in str(raised.value)


def test_a_server_that_is_late_is_ended() -> None:
    with user_error("server_unreachable"), policies.served("demo", [], limit=0.0):
        pytest.fail("it was in time")


@pytest.mark.slow
def test_each_policy_answers_the_same_requests() -> None:
    command = f"bench-serve --batching none,static,dynamic,continuous --model demo {SMALL} --json"
    report = last_json(CliRunner().invoke(app, shlex.split(command)))
    assert [run["policy"] for run in report["runs"]] == list(policies.POLICIES)
    assert {(run["succeeded"], run["output_tokens"]) for run in report["runs"]} == {
        (6, report["runs"][0]["output_tokens"])
    }
