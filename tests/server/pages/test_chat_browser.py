"""The chat page in a real browser: hostile answers, what is kept, and how it looks in two schemes and three widths."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from tests.lab.browser import Browser, need_chromium
from tests.server.conftest import Running
from tests.server.pages.hostile_answers import COSTLY, LONG, answers

FOLDER = Path(__file__).parent
PROBE = (FOLDER / "chat_probe.js").read_text()
LOOK = (FOLDER.parents[1] / "lab" / "look.js").read_text()
KEY = "a-key-" + "k" * 32
WIDTHS = (320, 700, 1280)
MOST = 5e6  # bytes that the page keeps
KINDS = [
    "# A title\n\nSome *words* and `code`, [a link](http://x.invalid/" + "y" * 200 + ").\n\n"
    "```python\n" + "z" * 300 + "\n```\n\n| a | b |\n|---|--:|\n| " + "wide " * 60 + "| 2 |\n\n"
    "> quoted\n\n1. one\n   - two\n" + "w" * 200,
    '{"name": "Ada", "born": 1815}',
]  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need_chromium()
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, start: Callable[..., Running]) -> Browser:
    """The page of a new server, with its probes and an empty store."""
    visit(browser, start())
    return browser


def visit(browser: Browser, server: Running) -> None:
    browser.open("about:blank")
    browser.show(1280)
    browser.errors.clear()
    browser.requests.clear()
    browser.open(f"http://127.0.0.1:{server.port}/")
    browser.until("$('model').textContent.includes('tokens') || $('state').textContent")
    browser.run(PROBE)


def told(page: Browser, text: str, *deltas: dict[str, Any] | str, size: int = 7) -> None:
    said = [{"content": each} if isinstance(each, str) else each for each in deltas]
    page.run(f"told({json.dumps(text)}, {json.dumps(said)}, {size})")


def test_hostile_answers_are_text_however_they_are_cut(page: Browser) -> None:
    chance = random.Random(1)
    texts = answers()
    assert len(texts) == 240
    cuts = [[1], [2, 3], [chance.randint(1, 40) for _ in range(50)]]
    page.run(f"window.texts = {json.dumps(texts)}; window.cuts = {json.dumps(cuts)}")
    wrong = page.run("texts.map(text => [text, wrong(drawn(text, [1e9]))]).filter(each => each[1].length)")
    assert wrong == []
    differ = page.run("""texts.flatMap(text => {
        const whole = drawn(text, [1e9]).innerHTML;
        return cuts.filter(cut => drawn(text, cut).innerHTML !== whole).map(cut => [text, cut]);
    })""")
    assert differ == []


@pytest.mark.slow
def test_hostile_answers_load_and_run_nothing(page: Browser) -> None:
    texts = answers()
    for begin in range(0, len(texts), 20):
        page.run("turnTo(fresh())")
        for text in texts[begin : begin + 20]:
            told(page, text, *[text[at : at + 5] for at in range(0, len(text), 5)])
        assert page.run("talk.querySelectorAll('.assistant').length") == 20
        page.run("turnTo({ ...chat, items: store.read(chat.id) })")  # as kept, and as another visit shows it
        assert page.run("talk.querySelectorAll('.user').length") == 20
        assert page.run("[...talk.querySelectorAll('.assistant')].flatMap(wrong)") == []
    assert page.run("[typeof hit, document.scripts.length, document.images.length]") == ["undefined", 1, 0]
    own = page.run("location.origin")
    assert {each for each in page.requests if not each.startswith(own)} == set()
    assert {each.removeprefix(own) for each in page.requests} <= {"/", "/v1/models", "/v1/engine", "/favicon.ico"}
    assert [each for each in page.errors if "favicon" not in each and "404" not in each] == []


@pytest.mark.slow
def test_a_long_answer_costs_its_length(page: Browser) -> None:
    chance = random.Random(2)
    cuts = [chance.randint(1, 9000) for _ in range(99)]
    for text in COSTLY:
        page.run(f"window.text = {json.dumps(text)}")
        assert page.run("wrong(drawn(text, [1e9]))") == [], text[:40]
        assert page.run(f"drawn(text, {cuts}).innerHTML === drawn(text, [1e9]).innerHTML"), text[:40]
        whole, half = page.run("[work(text, 2000), work(text.slice(0, text.length >> 1), 2000)]")
        assert whole <= 2.2 * half + 2 * 8192, text[:40]
        assert page.run("work(text, 1e9)") <= 2 * LONG + 8192, text[:40]


EMPHASIS = {
    "**a *b***": "<strong>a <em>b</em></strong>",
    "*a **b***": "<em>a <strong>b</strong></em>",
    "***a** b*": "<em><strong>a</strong> b</em>",
    "***a* b**": "<strong><em>a</em> b</strong>",
    "___a__ b_": "<em><strong>a</strong> b</em>",
    "***a**": "*<strong>a</strong>",
    "**a***": "<strong>a</strong>*",
    "***a*": "**<em>a</em>",
    "***a _b***": "<strong><em>a _b</em></strong>",
    "*a ***b***": "*a <strong><em>b</em></strong>",
}


def test_emphasis_that_opens_or_closes_together(page: Browser) -> None:
    found = {text: page.run(f"drawn({json.dumps(text)}, [1e9]).innerHTML") for text in EMPHASIS}
    assert found == {text: f"<p>{html}</p>" for text, html in EMPHASIS.items()}


@pytest.mark.parametrize(
    ("text", "linked", "behind"),
    [
        ("(http://x.invalid/a_(b))", "http://x.invalid/a_(b)", ")"),
        ("http://x.invalid/a)**b**", "http://x.invalid/a", ")<strong>b</strong>"),
        ("http://x.invalid/(a)(b).", "http://x.invalid/(a)(b)", "."),
        ("http://x.invalid/(a", "http://x.invalid/(a", ""),
    ],
)
def test_a_bare_link_ends_before_a_bracket_that_it_did_not_open(
    page: Browser, text: str, linked: str, behind: str
) -> None:
    found = page.run(f"drawn({json.dumps(text)}, [1e9]).innerHTML")
    assert found.removesuffix("</p>").partition(f">{linked}</a>")[2] == behind
    assert found.count("<a ") == 1


def test_markdown(page: Browser) -> None:
    def drawn(text: str) -> Any:
        return page.run(f"drawn({json.dumps(text)}, [1e9]).innerHTML")

    assert drawn("a **b** _c_ ~~d~~ `e*f*` ***g***") == (
        "<p>a <strong>b</strong> <em>c</em> <del>d</del> <code>e*f*</code> <strong><em>g</em></strong></p>"
    )
    assert drawn("2 * 3 * 4 snake_case_name \\*x\\*") == "<p>2 * 3 * 4 snake_case_name *x*</p>"
    assert drawn("# A\n\n### B ##\ntext") == "<h3>A</h3><h5>B</h5><p>text</p>"
    assert drawn("1. a\n   - b\n   - c\n2. d") == (
        '<ol start="1"><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul></li><li><p>d</p></li></ol>'
    )
    assert drawn("> a\nb\n\nc\n***") == "<blockquote><p>a\nb</p></blockquote><p>c</p><hr>"
    assert drawn("a | b\n--|-:\n`c` | d\n\ne") == (
        '<div class="scroll"><table><thead><tr><th class="">a</th><th class="right">b</th></tr></thead><tbody><tr>'
        '<td class=""><code>c</code></td><td class="right">d</td></tr></tbody></table></div><p>e</p>'
    )
    link = '<a href="http://x.invalid/" title="http://x.invalid/" target="_blank" rel="noopener noreferrer">'
    assert drawn("[*a*](http://x.invalid)") == f"<p>{link}<em>a</em></a></p>"
    assert drawn("(see http://x.invalid/).") == f"<p>(see {link}http://x.invalid/</a>).</p>"
    assert drawn("![a](http://x.invalid)") == f"<p>{link}image: a</a></p>"
    assert page.run("drawn('```js\\na\\n\\n  b\\n```\\nc', [1e9]).querySelector('code').textContent") == "a\n\n  b"
    assert drawn("*A*\n===\n\nb\nc\n--\nd\n- \n=") == "<h3><em>A</em></h3><h4>b\nc</h4><h4>d</h4><p>=</p>"
    assert drawn("> a\n---\n- b\n  -\n- c\n===") == (
        "<blockquote><p>a</p></blockquote><hr><ul><li><h4>b</h4></li><li><p>c\n===</p></li></ul>"
    )
    assert drawn("a\n-") == "<p>a\n-</p>", "it may become a list"
    assert drawn("a\n- b") == "<p>a</p><ul><li><p>b</p></li></ul>"
    assert drawn("a\n-\nb") == "<h4>a</h4><p>b</p>"


@pytest.mark.parametrize(
    ("text", "codes", "words"),
    [
        ("    a\n\n\n      b  \n  \n\nc", ["a\n\n\n  b  "], ["c"]),
        ("a\n    b\n\n\tc\n\t\td\n # e", ["c\n\td"], ["a\nb", "e"]),
        ("- a\n\n      b\n\n    c\n-     d\n\n\t\te", ["b", "d\n\n  e"], ["a", "c"]),
        ("1. a\n\t- b\n\t\t- c\n\n\t\t\t d\n-\te", [], ["a", "b", "c", "d", "e"]),
        (">     a\n>\n>     b\n\n    c\n> \td", ["a\n\nb", "c", "d"], []),
        ("```make\na:\n\tb\n```\n- ```\n  a:\n  \tb\n\tc\n  ```", ["a:\n\tb", "a:\n\tb\n  c"], []),
        ("    a\n# b\n    c\n```\nd\n```\n    ```", ["a", "c", "d", "```"], ["b"]),
    ],
)
def test_code_by_indentation(page: Browser, text: str, codes: list[str], words: list[str]) -> None:
    page.run(f"window.made = drawn({json.dumps(text)}, [3])")
    assert page.run("[...made.querySelectorAll('pre code')].map(each => each.textContent)") == codes
    assert page.run("[...made.querySelectorAll('p, h3')].map(each => each.textContent)") == words


def test_references_of_characters(page: Browser) -> None:
    def shown(text: str) -> Any:
        return page.run(f"drawn({json.dumps(text)}, [1]).textContent")

    names = page.run("[...NAMED.keys()]")
    assert len(names) > 200
    assert {each: shown(f"a&{each};b") for each in names} == {each: f"a{html.unescape(f'&{each};')}b" for each in names}
    assert shown("&lt;b&gt; &quot;Q&amp;A&quot; it&#39;s &#x27;x&#X27; &#8212;") == "<b> \"Q&A\" it's 'x' \u2014"
    assert shown("&#0; &#xD800; &#x110000;") == "\ufffd \ufffd \ufffd"
    as_written = "AT&T &unknown; &amp &#; &#x; &#12345678; &; a&b;c &constructor;"
    assert shown(as_written) == as_written
    assert shown("`&amp;` \\&amp; &#42;a&#42;") == "&amp; &amp; *a*"
    assert shown("    &amp;\n\n```\n&lt;\n```").replace("codeCopy", " ") == " &amp; &lt;"
    assert shown("# a &lt; b\n\nc &gt; d\n==\n\na | b\n--|--\n&le; | &#124;") == "a < bc > dab\u2264|"
    assert page.run("drawn('[a](http://x.invalid/?a=1&amp;b=2)', [1e9]).querySelector('a').href") == (
        "http://x.invalid/?a=1&b=2"
    )


def test_code_is_copied_as_it_is(page: Browser) -> None:
    page.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    told(page, "code", "Look:\n\n```python\nif a < b:\n    pass\n```\n")
    page.run("talk.querySelector('.bar button').click()")
    page.until("talk.querySelector('.bar button').textContent === 'Copied'")
    assert page.run("copied") == "if a < b:\n    pass"
    page.run("[...talk.querySelectorAll('.acts:not(.own) button')].find(each => each.textContent === 'Copy').click()")
    page.until("copied.startsWith('Look')")
    assert page.run("copied") == "Look:\n\n```python\nif a < b:\n    pass\n```\n"


def test_an_answer_is_made_anew_and_a_message_edited(page: Browser) -> None:
    def shown() -> Any:
        return page.run("[...talk.querySelectorAll('.user, .assistant')].map(each => each.textContent)")

    told(page, "one", "first")
    told(page, "two", "second")
    assert page.run("talk.querySelectorAll('.again').length") == 1
    page.run('answering([{ content: "third" }], 5); talk.querySelector(".again").click()')
    page.until("!running")
    assert shown() == ["one", "first", "two", "third"]
    assert [each["content"] for each in page.run("asked.at(-1).messages")] == ["one", "first", "two"]
    page.run("[...talk.querySelectorAll('.acts.own button')].find(each => each.textContent === 'Edit').click()")
    assert page.run("[$('text').value, document.activeElement.id, $('editing').hidden]") == ["one", "text", False]
    page.press("Escape")
    assert page.run("[$('text').value, $('editing').hidden]") == ["", True]
    page.run("[...talk.querySelectorAll('.acts.own button')].find(each => each.textContent === 'Edit').click()")
    told(page, "other", "fourth")
    assert shown() == ["other", "fourth"]
    assert [each["content"] for each in page.run("asked.at(-1).messages")] == ["other"]
    # What fails changes nothing.
    page.run("refusing()")
    page.run("talk.querySelector('.again').click()")
    page.until("!running && talk.querySelector('.error') !== null")
    assert shown() == ["other", "fourth"]


def test_tools_reasoning_and_json_show_as_what_they_are(page: Browser) -> None:
    told(page, "json", '{"a": ', '[1, "<b>"]}')
    assert page.run("talk.querySelector('.assistant .bar span').textContent") == "JSON"
    assert json.loads(page.run("talk.querySelector('.assistant code').textContent")) == {"a": [1, "<b>"]}
    page.run("$('new').click()")
    told(page, "think", {"reasoning_content": "hm, "}, {"reasoning_content": "<i>"}, "so **it** is")
    assert page.run("talk.querySelector('.thought').textContent") == "Reasoninghm, <i>"
    assert page.run("talk.querySelector('.assistant strong').textContent") == "it"
    page.run("""$('new').click(); $("tools").value = '[{"type": "function", "function": {"name": "look"}}]'""")
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}
    second = {"index": 1, "id": "c2", "type": "function", "function": {"name": "<b>", "arguments": "{}"}}
    more = {"index": 0, "function": {"arguments": '{"at": 1}'}}
    told(page, "call", {"tool_calls": [first]}, {"tool_calls": [more]}, {"tool_calls": [second]})
    assert page.run("[...talk.querySelectorAll('.call p')].map(each => each.textContent)") == [
        "Calls look",
        "Calls <b>",
    ]
    assert page.run("$('text').placeholder") == "Result of look"
    told(page, "sunny", "not asked yet")
    assert page.run("$('text').placeholder") == "Result of <b>"
    told(page, '{"celsius": -3, "<b>": 1}', "It is sunny.")
    assert page.run("[...talk.querySelectorAll('.tool')].map(each => each.textContent)") == [
        "Result of looksunny",
        'Result of <b>JSONCopy{\n  "celsius": -3,\n  "<b>": 1\n}',
    ]
    sent = page.run("asked.at(-1)")
    assert sent["tools"][0]["function"]["name"] == "look"
    call, *results = sent["messages"][1:]
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in results] == [
        ("tool", "c1", "sunny"), ("tool", "c2", '{"celsius": -3, "<b>": 1}')
    ]  # fmt: skip
    page.run("$('tools').value = '[wrong'")
    told(page, "broken", "never")
    assert "list of tools is not JSON" in page.run("talk.querySelector('.error').textContent")
    assert page.run("$('text').value") == "broken"


def test_conversations_are_kept_within_bounds_and_deleted(page: Browser) -> None:
    size = "Object.entries(localStorage).reduce((sum, each) => sum + 2 * (each[0].length + each[1].length), 0)"
    write = "store.write({ id: '%d', at: %d, title: 'talk %d', items: [{ role: 'user', content: 'x'.repeat(%d) }] })"
    for number in range(12):
        assert page.run(write % (number, number, number, 300_000)) is True
        assert page.run(size) < MOST
    titles = page.run("store.list().map(each => each.title)")
    assert titles == [f"talk {number}" for number in range(11, 11 - len(titles), -1)], "the oldest make room"
    assert 5 <= len(titles) < 12
    assert page.run(write % (99, 99, 99, 2_400_000)) is False, "it is larger than all that may be kept"
    assert page.run("store.list().length") == len(titles)
    told(page, "first", "<b>one</b>")
    page.run("$('new').click()")
    told(page, "second", "two")
    assert page.run("store.list().slice(0, 2).map(each => each.title)") == ["second", "first"]
    page.run("$('past').querySelectorAll('li')[1].firstChild.click()")
    assert page.run("[...talk.querySelectorAll('.user, .assistant')].map(each => each.textContent)") == [
        "first", "<b>one</b>"
    ]  # fmt: skip
    told(page, "more", "three")
    assert page.run("store.list().slice(0, 2).map(each => each.title)") == ["first", "second"]
    page.run("$('past').querySelector('li').lastChild.click()")
    assert page.run("[store.list()[0].title, talk.querySelectorAll('.turn').length]") == ["second", 0]
    page.run("store.write = () => false")
    told(page, "lost", "four")
    assert "no room" in page.run("talk.querySelector('.turn.note').textContent")
    left = page.run("store.list().length")
    page.run("localStorage['attar.chat.damaged'] = 'x'; past(); $('forget').click()")
    assert page.run("[$('forget').textContent, store.list().length]") == ["Really delete all?", left]
    page.run("$('forget').click()")
    assert page.run("Object.keys(localStorage).filter(each => each.startsWith('attar.chat'))") == []
    assert page.run("talk.querySelectorAll('.turn').length") == 0


def test_a_conversation_that_was_deleted_while_its_answer_came_is_gone(page: Browser) -> None:
    told(page, "one", "two")
    page.run("silent()")
    page.run("$('text').value = 'three'; $('ask').requestSubmit(); $('past').querySelector('li').lastChild.click()")
    page.until("!running")
    assert page.run("[store.list().length, talk.querySelectorAll('.turn').length]") == [0, 0]


def test_a_key_is_asked_for_and_never_kept(browser: Browser, start: Callable[..., Running]) -> None:
    visit(browser, start(ServerOptions(port=0, keys=Keys.of([KEY]))))
    browser.until("!$('login').hidden")
    browser.run("$('key').focus()")
    browser.type(KEY)
    browser.press("Enter")
    browser.until("$('login').hidden && $('model').textContent.includes('tokens')")
    told(browser, "hello", "hi")
    assert KEY not in browser.run("JSON.stringify([{ ...localStorage }, { ...sessionStorage }])")


def test_a_rate_is_shown_of_what_took_a_while(page: Browser) -> None:
    told(page, "quick", "a", "b", "c")
    assert page.run("talk.querySelector('.note').textContent") == "3 tokens"
    page.run("const now = performance.now.bind(performance); performance.now = () => 1000 * now()")
    told(page, "slow", "a", "b", "c")
    note = page.run("[...talk.querySelectorAll('.note')].at(-1).textContent")
    assert re.fullmatch(r"3 tokens, \d+\.\d per second", note)


def test_an_example_is_asked(page: Browser) -> None:
    assert page.run("talk.querySelectorAll('.empty button').length") == 4
    page.run("answering([{ content: 'yes' }], 9); talk.querySelector('.empty button').click()")
    page.until("!running && talk.querySelector('.assistant') !== null")
    assert page.run("asked[0].messages[0].content === EXAMPLES[0]")
    assert page.run("talk.querySelector('.empty')") is None


def test_the_history_is_of_what_was_polled(page: Browser) -> None:
    page.run("""looks = []; for (const [at, rate] of [[0, 0], [30000, 5], [60000, null], [90000, 10], [120000, 2]])
        remember(at, rate === null ? null : { rate, running: 1, waiting: 3, used: 7 })""")
    assert page.run("$('rates').firstChild.getAttribute('d')") == "M0.0 34.0L60.0 18.5M180.0 3.0L240.0 27.8"
    assert page.run("$('rates').getAttribute('aria-label')") == (
        "Tokens per second, last 2 minutes: now rate 2; highest 10"
    )
    assert page.run("$('queue').getAttribute('aria-label')") == (
        "Requests, last 2 minutes: now running 1, waiting 3; highest 3"
    )
    page.run("remember(1000000, { rate: 1, running: 0, waiting: 0, used: 0 })")
    assert page.run("looks.length") == 1, "what is older than the chart is dropped"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_look(page: Browser, width: int, dark: bool) -> None:
    page.show(width, dark=dark)
    for filled in (False, True):
        if filled:
            call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"at": 1}'}}
            for text in KINDS:
                told(page, "a question " * 30 + "u" * 200, text)
            told(page, "call", {"reasoning_content": "hm"}, {"tool_calls": [call]})
            told(page, "12", "Well, `12`.")
            page.run("$('options').open = true; panel(true); edit(chat.items[0])")
        seen = page.run(LOOK)
        assert page.run("outside()") == []
        assert seen["wide"] <= 0
        assert (seen["pale"], seen["nameless"], seen["twice"]) == ([], [], [])
        assert (seen["unlabelled"], seen["small"]) == (0, 0)
    assert page.run("contrastOfBlocks()") >= 3
    assert [each for each in page.errors if "404" not in each] == []
