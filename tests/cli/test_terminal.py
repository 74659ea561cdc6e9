"""What every command shares: sizes as users write them, and progress that leaves stdout alone."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator

import pytest

from attar.cli.terminal import Progress, dimmed, parse_bytes, print_pieces
from attar.text.answers.events import AnswerEvent, CallStart, ReasoningDelta, TextDelta
from tests.errors import user_error


@pytest.mark.parametrize(
    "text, size", [("0", 0), ("1e6", 10**6), ("5GB", 5 * 10**9), ("2 GiB", 2 << 30), ("512mib", 512 << 20), ("7b", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "1 TB", "-1", "nan", "inf", "1e30"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


def test_a_forgotten_unit_is_asked_for() -> None:
    with user_error("option_malformed"):
        parse_bytes("4")
    assert parse_bytes("4 B") == 4


def test_progress_off_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(quiet=False)
    bar("blocks", 0, 4)
    bar("blocks", 1, 4)
    assert capsys.readouterr().err == "", "too early to tell"
    bar.LINE_SECONDS = 0
    bar("blocks", 3, 4)
    assert capsys.readouterr().err == "blocks: 3 of 4, 0 s left\n"
    bar("evaluating", 10, 20)
    assert capsys.readouterr().err == "evaluating: 10 of 20\n", "no speed is known yet"
    quiet = Progress(quiet=True)
    quiet.LINE_SECONDS = 0
    quiet("blocks", 1, 4)
    assert capsys.readouterr().err == ""


def test_a_run_that_goes_on_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(quiet=False)
    for done in (2, 3):
        bar("blocks", done, 4)
    assert capsys.readouterr().err == "attar: going on where an earlier run stopped: 2 of 4 blocks were done\n"


def test_of_several_recipes_the_one_that_is_tried_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(quiet=False)
    bar.LINE_SECONDS = 0
    bar("recipes", 0, 2)
    bar("blocks", 0, 4)
    bar("recipes", 1, 2)
    bar("blocks", 0, 4)
    bar("recipes", 2, 2)
    bar("evaluating", 0, 9)
    assert capsys.readouterr().err.splitlines() == [
        "recipes: 0 of 2", "recipe 1 of 2, blocks: 0 of 4", "recipes: 1 of 2",
        "recipe 2 of 2, blocks: 0 of 4", "recipes: 2 of 2", "evaluating: 0 of 9",
    ]  # fmt: skip


def test_progress_on_a_terminal_leaves_stdout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    stdout = sys.stdout
    bar = Progress(quiet=False)
    bar("blocks", 2, 4)
    assert sys.stdout is stdout
    bar("blocks", 4, 4)
    bar("blocks", 1, 4)  # the next model
    bar.close()
    assert "blocks" in screen.getvalue()
    assert "left" in screen.getvalue()


def test_a_text_that_breaks_off_still_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """So that the JSON of the error has a line of its own."""

    def pieces() -> Generator[str, None, int]:
        yield "so "
        yield "far"
        raise ValueError

    with pytest.raises(ValueError):
        print_pieces(pieces())
    assert capsys.readouterr().out == "so far\n"


def test_reasoning_is_dim_on_a_terminal_and_apart_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def events() -> Generator[AnswerEvent, None, int]:
        yield from (ReasoningDelta("Hm."), TextDelta("Yes"), TextDelta(", it."), CallStart(0, "f"))
        return 7

    assert print_pieces(dimmed(events())) == 7
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Yes, it.\n", "Hm.")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert print_pieces(dimmed(events())) == 7
    assert capsys.readouterr().out == "\033[2mHm.\033[22m\n\nYes, it.\n"
