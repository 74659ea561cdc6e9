"""Answers that want to run a script, load something, look like something else, or cost more than their length."""

from __future__ import annotations

RUN = "window.hit = 1"
ELSEWHERE = "//elsewhere.invalid/x"

PARTS = (
    f"[a](javascript:{RUN})",
    f"[a](JaVaScRiPt:{RUN})",
    f"[a](\tjava\nscript:{RUN})",
    f"<javascript:{RUN}>",
    f"[a](data:text/html,<script>{RUN}</script>)",
    f"[a](vbscript:{RUN})",
    f"[a]({ELSEWHERE})",
    "[a](file:///etc/passwd)",
    f"<script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'>",
    f"<svg onload='{RUN}'><style>@import '{ELSEWHERE}'</style></svg>",
    f"<iframe src='{ELSEWHERE}'></iframe>",
    f"![x](http:{ELSEWHERE})",
    f"![x](data:image/svg+xml,<svg onload='{RUN}'/>)",
    f"[![x](http:{ELSEWHERE})](javascript:{RUN})",
    f"[a](http:{ELSEWHERE} \"' onclick='{RUN}\")",
    f"http:{ELSEWHERE}\"onmouseover='{RUN}'",
    f'[a](http://u@x" onclick={RUN})',
    f"```<img src=x onerror={RUN}>\n<script>{RUN}</script>",
    f"| <b onclick='{RUN}'> | [a](javascript:{RUN}) |\n|--|--|\n| <img> | x |",
    "![[[[]]]]((((",
    "[[[[a](http://x.invalid)](http://y.invalid)](javascript:0)](",
    "*a **b *c **d* e** f* g** ***h***",
    "\u202ecod.exe\u202c \u2066x\u2069",
    "a\u2028# b\u2029- c",
    "\x00\x0b\ufeff\ud83d\ude00",
    "&lt;script&gt; &#106;avascript:",
    "- " * 40 + "x",
    "> " * 40 + "x",
    "> - " * 20 + "x\n" + ">" * 30,
    "1. a\n" * 3 + "   ```\n  x\n1. b",
    "````\n```\n~~~\n`````",
    "`a ``b ```c ` d`` e",
    "a|b\n-|-\nc|d|e\n\n|",
    "#" * 7 + " x\n# \n###### y ##\n---\n***",
    "__proto__ constructor",
    "Title\n===\n\n    four\n\tfive\r\n\r\nsix\r",
    "- a\n\n  b\n- c\n> d\ne\n\nf",
    "~~a *b~~ c* _d_e_ __f__g",
    f"[a](&#106;ava&#x73;cript&colon;{RUN})",
    f"[a](&#x2f;&#47;elsewhere.invalid) &lt;img src=x onerror={RUN}&gt;",
    "&#x202e;cod.exe &#8294;x &#0; &#xd83d; &#x110000; &#9999999; &constructor; &__proto__; &amp",
    f"    <img src=x onerror={RUN}>\n\n\t<script>{RUN}</script>\n  \n      &amp;\n   \nx",
    f"<img src=x onerror={RUN}>\nb\n== \n&#45;--\n-- \n\n---",
    "a\n-\n-\n- b\n  =\n\n      c\n    \n      d\n> e\n=\n-",
    "1.\ta\n\n\t\tb\n\t\t\n\t \tc\n2.     d\n>\t\te\n> -\t\tf",
    "```\n\ta\n\n    ```\n\n ```\n    b\nc\n    d\n | -\n    -|-\n    e|f\n    g",
)
"""Forty-eight short ones."""

AROUND = ("{}", "> {}", "- a\n  1. {}", "**{}**", "[{}](http://x.invalid)")

LONG = 100_000
COSTLY = (
    "*" * LONG,
    "`" * LONG,
    "[" * LONG,
    "![](" * (LONG // 4),
    "](" * (LONG // 2),
    "*a " * (LONG // 3),
    "a*" * (LONG // 2),
    "_a*" * (LONG // 3),
    "`a``" * (LONG // 4),
    "<" * LONG,
    "\\" * LONG,
    "~~" * (LONG // 2),
    "http://" * (LONG // 7),
    "> " * (LONG // 2),
    "- " * (LONG // 2),
    "#" * LONG,
    "-" * LONG + "x",
    "- " + " " * LONG + "x",
    "|" * LONG + "\n" + "|-" * (LONG // 2),
    "```\n" + "x" * LONG,
    "```\n" + "x\n" * (LONG // 2),
    "a\n" * (LONG // 2),
    "- a\n" * (LONG // 4),
    "> a\n" * (LONG // 4),
    "a | b\n--|--\n" + "c | d\n" * (LONG // 6),
    "\U0001f600" * (LONG // 2),
    "[a](" + "(" * LONG,
    "[a](http://x " + " " * LONG,
    "*[" * (LONG // 2) + "](http://x)*" * 50,
    "x" * 8191 + "\U0001f600" * 5000,
    "&" * LONG,
    "&#" * (LONG // 2),
    "&a" * (LONG // 2) + ";",
    "&amp;" * (LONG // 5),
    "a\n=\n" * (LONG // 4),
    "a\nb\n--\n" * (LONG // 8),
    "a\n" + "=" * LONG,
    "    a\n" * (LONG // 6),
    "    a\n\n" * (LONG // 7),
    "    a" + "\n" * LONG + "    b",
    "    a\n" + " " * LONG + "\n    b",
    "\t" * LONG + "x",
    "- a\n" + "\t" * LONG + "x",
)
"""Long ones, of characters that a slower reader would search for again and again."""


def answers() -> list[str]:
    """Return short ones, each part in each surrounding."""
    return [around.format(part) for around in AROUND for part in PARTS]
