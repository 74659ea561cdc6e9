"""Protobuf's text format: what is written is read back, and what is not of the format is refused."""

from __future__ import annotations

import contextlib
import random
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.integrations.triton_server import pbtxt
from attar.integrations.triton_server.pbtxt import (
    LEAST,
    MAX_BYTES,
    MAX_DEPTH,
    MOST,
    Hole,
    Message,
    Value,
    Word,
    load,
    parse,
    paths,
    write,
)
from tests.errors import user_error

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
SCALARS: st.SearchStrategy[Value] = st.one_of(
    st.integers(LEAST, MOST),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    NAMES.map(Word),
    NAMES.map(Hole),
)
MESSAGES = st.recursive(
    st.lists(st.tuples(NAMES, SCALARS), max_size=5).map(lambda fields: Message(tuple(fields))),
    lambda inner: st.lists(st.tuples(NAMES, SCALARS | inner), max_size=5).map(lambda fields: Message(tuple(fields))),
    max_leaves=20,
)


def depth(message: Message) -> int:
    return 1 + max((depth(value) for _, value in message.fields if isinstance(value, Message)), default=0)


@given(MESSAGES)
@settings(deadline=None)
def test_what_is_written_is_read_back(message: Message) -> None:
    if depth(message) <= MAX_DEPTH:
        text = write(message)
        assert parse(text) == message
        assert write(parse(text)) == text
        assert len(list(paths(message))) == sum(line.strip() != "}" for line in text.split("\n")[:-1])


@pytest.mark.parametrize(
    "text, fields",
    [
        ("", ()),
        ("# nothing\n  # at all", ()),
        ("a: 1", (("a", 1),)),
        ("a:1,b:2;c:3", (("a", 1), ("b", 2), ("c", 3))),
        ("a: -1 b: - 1 c: -\n# far\n1", (("a", -1), ("b", -1), ("c", -1))),
        ("a: 0x10 b: 017 c: 0 d: -0x1", (("a", 16), ("b", 15), ("c", 0), ("d", -1))),
        ("a: 1. b: .5 c: 1e3 d: 1.5f e: 10F", (("a", 1.0), ("b", 0.5), ("c", 1000.0), ("d", 1.5), ("e", 10.0))),
        ("a: true b: KIND_GPU c: inf", (("a", Word("true")), ("b", Word("KIND_GPU")), ("c", Word("inf")))),
        ("a: [1, 2] b: [] c: [3]", (("a", 1), ("a", 2), ("c", 3))),
        ("a { } b: { c: 1 }", (("a", Message()), ("b", Message((("c", 1),))))),
        ("a [ { }, { b: 1 } ]", (("a", Message()), ("a", Message((("b", 1),))))),
        ("a: 'x' \"y\"\n'z'", (("a", "xyz"),)),
        (r'a: "\n\t\"\'\\\x41\101\u00e9\U0001F600\xc3\xa9"', (("a", "\n\t\"'\\AAé😀é"),)),
        ('a: "# no comment }"', (("a", "# no comment }"),)),
        ("a: ${hole} b: '${hole}'", (("a", Hole("hole")), ("b", "${hole}"))),
    ],
)
def test_what_the_format_says(text: str, fields: tuple[tuple[str, Value], ...]) -> None:
    assert parse(text) == Message(fields)


REFUSED = [
    ("a", "expected : or {"),
    ("a 1", "expected : or {"),
    ("a:", "expected a value"),
    ("a: ,", "expected a value"),
    ("1: 1", "expected the name of a field"),
    ("a: 1 }", "expected the name of a field"),
    ("a {", "the text ends where } is missing"),
    ("a { b: 1 ]", "expected the name of a field"),
    ("a: [1", "expected , or ]"),
    ("a: [1,]", "expected a value"),
    ("a: [1 2]", "expected , or ]"),
    ("a: [[1]]", "expected a value"),
    ("a < b: 1 >", "messages in < > are not read"),
    ("[ext.a]: 1", "names in [ ], extensions"),
    ("a: { [type/x] { } }", "names in [ ], extensions"),
    ("a: -b", "expected a number behind -"),
    ("a: --1", "expected a number behind -"),
    ("a: +1", "'+' begins nothing"),
    ("a: 08", "begins with 0 and is not octal"),
    ("a: 1x", "1 runs into x"),
    ("a: 1.2.3", "runs into ."),
    ("a: 0x", "0 runs into x"),
    ("a: 1e999", "past what a number can be"),
    (f"a: {MOST + 1}", "does not fit 64 bits"),
    (f"a: {LEAST - 1}", "does not fit 64 bits"),
    ("a: " + "9" * 10_000, "more than 64 characters"),
    ('a: "x', "does not end on its line"),
    ('a: "x\ny"', "does not end on its line"),
    ('a: "x\\"', "does not end on its line"),
    (r'a: "\q"', "stands for nothing"),
    (r'a: "\u12"', "stands for nothing"),
    (r'a: "\ud800"', "stands for nothing"),
    (r'a: "\U00110000"', "stands for nothing"),
    (r'a: "\400"', "stands for nothing"),
    (r'a: "\xff"', "not UTF-8"),
    ('a: "\ud800"', "not UTF-8"),
    ("a: 1\n\nb: $x", "line 3: '$' begins nothing"),
    ("a\x00: 1", "begins nothing"),
    ("\ufeffa: 1", "begins nothing"),
    ("a {" * (MAX_DEPTH + 1), "more than 16 deep"),
    ("a: [{" * (MAX_DEPTH + 1), "more than 16 deep"),
    ("#" * (MAX_BYTES + 1), f"longer than {MAX_BYTES} bytes"),
    ("#" + "é" * (MAX_BYTES // 2), f"longer than {MAX_BYTES} bytes"),
]


@pytest.mark.parametrize("text, says", REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_of_the_format_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "piece",
    ["a", "a:1 ", "a{", "{", "[", "a:[", '"', "'", "\\", '"\\', "#", "#\n", "-", "0", "${", "a:'x'", "'' ", "a:{}"],
)
@pytest.mark.parametrize("before", ["", "a: ", 'a: "'])
def test_no_text_takes_more_looks_than_it_has_characters(
    piece: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    plain = pbtxt._Reader._next

    def counted(reader: pbtxt._Reader) -> None:
        nonlocal looks
        looks += 1
        plain(reader)

    monkeypatch.setattr(pbtxt._Reader, "_next", counted)
    text = before + piece * (4096 // len(piece))
    with contextlib.suppress(ValueError):
        parse(text)
    assert 0 < looks <= len(text) + 1


@given(st.text(st.sampled_from("a1:{}[],;\"'\\#\n -.$x${}"), max_size=40))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except ValueError:
        return
    assert parse(write(found)) == found


def test_a_text_that_is_damaged_anywhere_is_read_or_refused() -> None:
    whole = write(parse('a: "b" c { d: [1, -2.5, X] e: ${f} } g: "\\001\\u00e9"'))
    drawn = random.Random(0)
    for at in range(len(whole)):
        for text in (whole[:at], whole[:at] + drawn.choice(string.printable) + whole[at + 1 :]):
            try:
                found = parse(text)
            except ValueError:
                continue
            assert parse(write(found)) == found


def test_fields_of_a_kind() -> None:
    found = parse('n: 3 s: "x" t: true f: 0 m { a: 1 } r: 1 r: 2 h: ${x} o: "${x}"')
    assert (found.count("n", 9), found.text("s"), found.flag("t"), found.flag("f")) == (3, "x", True, False)
    assert found.message("m") == Message((("a", 1),))
    assert (found.count("none", 9), found.text("none"), found.flag("none"), found.text("o")) == (None, "", None, "")
    assert found.message("none") == Message()
    for ask, says in (
        (lambda: found.one("r"), "r is given 2 times"), (lambda: found.one("h"), "h is still ${x}"),
        (lambda: found.count("n", 2), "n: expected a number from 0 to 2"), (lambda: found.count("s", 2), "s: expected"),
        (lambda: found.text("n"), "n: expected a string"), (lambda: found.flag("n"), "n: expected true or false"),
        (lambda: found.flag("s"), "s: expected true"), (lambda: found.message("n"), "n: expected { }, not a value"),
        (lambda: found.messages("r"), "r: expected { }"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            ask()
        assert says in str(caught.value)


def test_a_file_that_is_too_long_or_no_text_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text('a: "é"')
    assert parse(load(file)) == Message((("a", "é"),))
    file.write_bytes(b"a: 1 # \xff")
    with user_error("text_not_utf8"):
        load(file)
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with user_error("file_too_large"):
        load(file)
    assert pbtxt.MAX_BYTES < 1 << 40
