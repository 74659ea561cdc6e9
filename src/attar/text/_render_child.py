"""The process that renders chat templates: reads requests on stdin, writes answers on stdout, until stdin ends.

Started by `template.py` in a bare Python: it imports the standard library, jinja2 and the framing, and nothing else.
Templates come with models and are untrusted. The sandboxed environment keeps them from Python's internals; the limits
below keep them from the machine's memory, processor and files. A template that passes a limit costs this process, and
nothing else.

Once the limits are set no file can be opened, so modules that jinja2 and the codecs load at first use are loaded early.
On macOS, which does not enforce RLIMIT_AS, memory is bounded only by the deadline.

Frames go both ways (`protocol/framing.py`). Request: JSON. Answer, in UTF-8: `+` and the text, `-` and one sentence, or
`!` and one sentence and the end of this process.
"""

from __future__ import annotations

import datetime
import encodings.unicode_escape
import json
import pprint
import sys
import unicodedata
from collections import OrderedDict
from typing import Any, NoReturn

import jinja2
import jinja2.debug
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from attar.protocol.child_process import NO_FILES, allow_more_cpu, limit, memory_with, send
from attar.protocol.framing import read

IMPORTED_EARLY = (encodings.unicode_escape, jinja2.debug, pprint, unicodedata)

EXTRA_MEMORY = 256 << 20  # bytes of address space above what the idle process has
CPU_SECONDS = 1
MAX_OUTPUT = 4 << 20  # bytes of UTF-8
MAX_MESSAGE = 300  # characters of an error
KEPT_TEMPLATES = 8


class Generation(Extension):
    """The block `{% generation %}`, which marks an assistant's text for training. Its content is rendered as if
    unmarked."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which access to a forbidden attribute is an error at once rather than an undefined value."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"the attribute {attribute!r} of {type(obj).__name__} is not for templates")


class TooLong(Exception):
    """The rendered text passed MAX_OUTPUT."""


def make_environment() -> Sandbox:
    """Return Jinja set up like transformers' for chat templates, less the globals that no template needs."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    for unused in ("lipsum", "cycler", "joiner"):
        del environment.globals[unused]
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = to_json
    return environment


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON as text, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template: jinja2.Template, request: dict[str, Any]) -> bytes:
    day = datetime.datetime.fromisoformat(request["date"])
    pieces: list[bytes] = []
    size = 0
    for piece in template.generate(**request["variables"], strftime_now=day.strftime):
        pieces.append(piece.encode())
        size += len(pieces[-1])
        if size > MAX_OUTPUT:
            raise TooLong
    return b"".join(pieces)


def answer(environment: Sandbox, known: OrderedDict[str, jinja2.Template], body: bytes) -> bytes:
    try:
        request = json.loads(body)
        source = request["template"]
        if source not in known:
            known[source] = environment.from_string(source)
            if len(known) > KEPT_TEMPLATES:
                known.popitem(last=False)
        known.move_to_end(source)
        return b"+" + render(known[source], request)
    except TooLong:
        return b"-the chat template writes more than %d MiB" % (MAX_OUTPUT >> 20)
    except RecursionError:
        return b"-the chat template is nested too deeply"
    except UnicodeEncodeError:
        return b"-the chat template writes text with a lone surrogate, which is not Unicode"
    except MemoryError:
        raise
    except Exception as error:  # whatever a template provokes is the template's error
        # An OSError (some filters and codecs would load a file) names paths of this machine.
        words = "it may not open files" if isinstance(error, OSError) else " ".join(str(error)[:MAX_MESSAGE].split())
        place = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return b"-" + f"the chat template failed: {type(error).__name__}: {words}{place}".encode("utf-8", "replace")


def main() -> None:
    environment = make_environment()
    known: OrderedDict[str, jinja2.Template] = OrderedDict()
    limit({**NO_FILES, **memory_with(EXTRA_MEMORY)})
    send(b"+")
    while (body := read(sys.stdin.buffer)) is not None:
        allow_more_cpu(CPU_SECONDS)
        try:
            reply = answer(environment, known, body)
        except MemoryError:
            send(b"!the chat template needs more than %d MiB of memory" % (EXTRA_MEMORY >> 20))
            return  # memory that failed once is not trusted again: a new process follows
        send(reply)
