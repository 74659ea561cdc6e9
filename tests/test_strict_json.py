"""The table of what is JSON here, against RFC 8259 and I-JSON; and that what is taken is what the library reads."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar import strict_json
from attar.strict_json import MAX_DEPTH, MAX_PARTS, MAX_QUOTES, PIECE, JSONError, loads, shown

GOOD: list[tuple[bytes, Any]] = [
    (b"{}", {}),
    (b" \r\n\t{} \n", {}),
    (b"[1, -0, 9223372036854775807, -9223372036854775808]", [1, 0, 2**63 - 1, -(2**63)]),
    (b"[1e-400, -0.0, 1.5E3]", [0.0, -0.0, 1500.0]),
    (b'"\\ud83d\\ude00"', "😀"),
    ('"\u0000\u202e\uffff😀"'.replace("\u0000", "\\u0000").encode(), "\u0000\u202e\uffff😀"),
    (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, None),
    (b'{"a": {"a": 1}, "b": {"a": 1}}', {"a": {"a": 1}, "b": {"a": 1}}),
    (b"null", None),
    (b"[true, false]", [True, False]),
]

BAD: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b" \n", "empty"),
    (b"\xef\xbb\xbf{}", "byte order mark"),
    ("{}".encode("utf-16"), "byte order mark"),
    ('{"a":1}'.encode("utf-16-le"), "line 1"),
    ('{"a":1}'.encode("utf-32-be"), "line 1"),
    (b'"\xff"', "UTF-8 at byte 1"),
    (b'"\xc0\xaf"', "UTF-8"),  # overlong
    (b'"\xed\xa0\x80"', "UTF-8"),  # CESU-8's half
    (b'"\xf4\x90\x80\x80"', "UTF-8"),  # beyond Unicode
    (b'"\xf0\x9f\x98"', "UTF-8"),
    (b"{} {}", "Extra data at line 1, column 4"),
    (b"{}x", "Extra data"),
    (b"{}\x00", "Extra data"),
    (b"[1,]", "line 1"),
    (b"{,}", "line 1"),
    (b'{"a":1,}', "line 1"),
    (b"{a:1}", "line 1"),
    (b"{'a':1}", "line 1"),
    (b'{"a" 1}', "line 1"),
    (b'{"a":}', "line 1"),
    (b'{"a":1', "line 1"),
    (b"[1", "line 1"),
    (b'"abc', "line 1"),
    (b'"a\nb"', "control character"),
    (b'"\x00"', "control character"),
    (b'"\\x41"', "escape"),
    (b'"\\u12"', "escape"),
    (b'"\\u00zz"', "escape"),
    (b"NaN", "NaN is not JSON"),
    (b"[Infinity]", "Infinity is not JSON"),
    (b'{"a": -Infinity}', "-Infinity is not JSON"),
    (b"nan", "line 1"),
    (b"[1e999]", "$[0] is too large"),
    (b'{"a":{"b":-1e400}}', "$.a.b is too large"),
    (b"[9223372036854775808]", "$[0] does not fit"),
    (b"[-9223372036854775809]", "$[0] does not fit"),
    (b'{"n":[0,[1,18446744073709551616]]}', "$.n[1][1] does not fit"),
    (b"1" * 5000, "too many digits"),
    (b"[" + b"9" * 4299 + b"]", "does not fit"),
    (b"01", "line 1"),
    (b"+1", "line 1"),
    (b"-", "line 1"),
    (b".5", "line 1"),
    (b"1.", "line 1"),
    (b"1e", "line 1"),
    (b"0x10", "line 1"),
    (b"1_000", "line 1"),
    (b"True", "line 1"),
    (b"undefined", "line 1"),
    (b"// no\n{}", "line 1"),
    (b"{} /* no */", "Extra data"),
    (b'{"a":1,"a":2}', "`a` is there twice"),
    (b'{"b":{"a":1,"c":2,"a":1}}', "`a` is there twice"),
    (b'{"a":1,"\\u0061":2}', "`a` is there twice"),
    (b'"\\ud800"', "lone surrogate, which is not Unicode, in the text at $"),
    (b'["\\udc00\\ud800"]', "at $[0]"),
    (b'{"a":{"\\ud83d":1}}', "at $.a"),
    (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "deeper than 64"),
    (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper than 64"),
    (b"[" * 100_000, "deeper than 64"),
    (b'{"a":' * 40_000, "deeper than 64"),
    (b"[" * 100_000 + b"]" * 100_000, "deeper than 64"),
    (b"[" + b"[]," * MAX_PARTS + b"0]", "more than 100000 lists, objects and keys"),
    (b"[" + b'{"a":0},' * (MAX_PARTS // 2) + b"0]", "more than 100000 lists, objects and keys"),
    (b"[" + b'"[",' * (MAX_QUOTES // 2 + 1) + b"0]", "or texts"),
    (b'"' + b"[" * MAX_PARTS + b'\\"' + b"[" * MAX_PARTS + b'",[', "Extra data"),
    (b'"\\' + b"[" * 2 * MAX_PARTS, "line 1"),
    (b"--boundary\r\nContent-Disposition: form-data\r\n\r\n{}", "line 1"),
]


@pytest.mark.parametrize("body, value", GOOD)
def test_json_is_read(body: bytes, value: Any) -> None:
    assert loads(body) == (json.loads(body) if value is None else value)


@pytest.mark.parametrize("body, says", BAD, ids=range(len(BAD)))
def test_what_is_not_json_is_refused_with_a_place(body: bytes, says: str) -> None:
    with pytest.raises(JSONError) as error:
        loads(body)
    assert says in str(error.value)
    assert len(str(error.value)) < 300


def test_brackets_in_text_are_text() -> None:
    text = '[{:"\\' * MAX_PARTS
    assert loads(json.dumps({"prompt": [text, text]}).encode()) == {"prompt": [text, text]}
    many = [[0] * 3] * (MAX_PARTS - 1)
    assert loads(json.dumps(many).encode()) == many


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)  # fmt: skip
def test_what_python_writes_is_read_back(value: Any) -> None:
    assert loads(json.dumps(value, ensure_ascii=False).encode()) == value


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_bytes_are_read_as_the_library_reads_them_or_refused(body: bytes) -> None:
    try:
        value = loads(body)
    except JSONError:
        return
    assert value == json.loads(body.decode())


def test_names_are_shown_short_and_without_control_characters() -> None:
    assert shown("a\n\x1b[31mb") == "a??[31mb"
    assert len(shown("x" * 1000)) == 67


def test_long_lists_of_numbers_are_read_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs while the parser does."""
    most, parse, integers = 0, json.loads, strict_json._integers()

    def parsed(text: str, **hooks: Any) -> Any:
        nonlocal most
        most = max(most, len(re.sub(r"\s", "", text)))
        return parse(text, **hooks)

    def watched(text: str) -> list[int]:
        nonlocal most
        most = max(most, len(text))
        return integers(text)

    monkeypatch.setattr(json, "loads", parsed)
    monkeypatch.setattr(strict_json, "_integers", lambda: watched)
    many = b",".join([b"1"] * 1_000_000)
    for body in (
        b'{"prompt":[%b]}' % many,
        b'{"prompt":[%b]}' % many.replace(b"1,1,1", b"1.0,-2"),
        b'{"prompt":[%b]}' % b",".join([b"[%b]" % many[:8191]] * 256),
        b'{"prompt":[%b,]}' % many,
        b'{"prompt":[%b,,%b]}' % (many, many),
    ):
        most = 0
        with contextlib.suppress(JSONError):
            loads(body)
        assert 0 < most < PIECE + 100
    for body in (b'{"prompt":[%b]}' % b",".join([b"[1,1]"] * 99_000), b'["[",%b]' % b",".join([b'"[1]"'] * 99_000)):
        assert loads(body) == parse(body)


SMALL = {"FEW": 1, "PIECE": 7, "_NUMBERS": re.compile(strict_json._NUMBERS.pattern.replace(str(strict_json.LONG), "4"))}
NUMBERS = st.sampled_from(
    ["1", "0", "-3", "1.0", "2.5", "1e2", "9223372036854775807", "12345", " ", "\n", "01", "1.", ""]
)
LISTS = st.lists(NUMBERS, max_size=12).map(lambda parts: "[" + ",".join(parts) + "]")
TEXTS = st.text('[]1,\\"N ', max_size=12).map(lambda text: json.dumps(text + "[1,2,3]"))


@settings(max_examples=500, deadline=None)
@given(st.recursive(LISTS | TEXTS, lambda inner: st.lists(inner, max_size=4).map(lambda each: f"[{','.join(each)}]")))
def test_what_is_read_in_pieces_is_what_is_read_at_once(text: str) -> None:
    """Or both refuse it, perhaps for another of its faults."""

    def outcome() -> Any:
        try:
            return repr(loads(text.encode()))
        except JSONError:
            return JSONError

    at_once = outcome()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(strict_json, name, value)
        assert outcome() == at_once


@pytest.mark.parametrize(
    "more, says",
    [
        ("[NaN]", "NaN is not JSON"),
        ("[-Infinity]", "Infinity is not JSON"),
        ("[" + "1," * 400 + "1e999]", "$[1][400] is too large"),
        ("[" + "1," * 400 + "9223372036854775808]", "$[1][400] does not fit"),
        ("[" + "1," * 400 + "9" * 5000 + "]", "too many digits"),
        ("[" + "1,\n" * 400 + "]", "at line 401, column 1"),
        ("[1 2]", "line 1, column 40009"),
        ("{" + '"a":1,' * 2 + '"b":2}', "`a` is there twice"),
        ('"\\ud800"', "lone surrogate, which is not Unicode, in the text at $[1]"),
        ('"[' + "1," * 200 + '"', None),
        ('"\\\\",["\\"[' + "1," * 200 + ']"]', None),
        ("[" + "[1]," * 60_000 + "[" + "2," * 200 + "2]]", None),
        ("[" + "[1,2,3,4,5,6,7]," * 60_000 + "1]", "more than 400000 values"),
        ("[" + '"",' * (MAX_QUOTES // 2 + 1) + "1]", "or texts"),
    ],
)
def test_beside_a_long_list_all_else_is_as_strict(more: str, says: str | None) -> None:
    text = "[[" + "1," * 20_000 + "1]," + more + "]"
    if says is None:
        assert loads(text.encode()) == json.loads(text)
    else:
        with pytest.raises(JSONError) as error:
            loads(text.encode())
        assert says in str(error.value)
