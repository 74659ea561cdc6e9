"""Chat templates: messages to prompt text, like transformers' `apply_chat_template`, but safely.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from Python's internals but not from the
machine: one expression can ask for gigabytes, or for hours inside a single C call that no Python signal interrupts; its
maintainers say to set limits in the operating system (pallets/jinja#2149). So templates are rendered by another
process, `_render_child.py`, under limits on memory, processor time, files and output (`limited_child.py`).

The date a template may print (`strftime_now`) is an argument, by default now in local time, as in transformers.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from attar.errors import Code, UserError
from attar.text.limited_child import LimitedChild

MAX_TEMPLATE = 1 << 20  # bytes
OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
       "template", "date", "raise_exception", "strftime_now")  # fmt: skip
"""Variables that no caller may set as further ones: they are arguments of `render_chat`, or a template's functions."""
_NAME = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?![\w'\"])")
MAX_REQUEST = 16 << 20  # bytes: messages, tools and the template, as JSON
RENDER_SECONDS = 1.2  # of which half on a processor; a render takes about a millisecond


class TemplateError(UserError):
    """A template could not be rendered: one sentence, fit for showing."""

    def __init__(self, message: str, code: Code = "template_failed") -> None:
        super().__init__(code, message)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str | None,
    eos_token: str | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    date: datetime.date | None = None,
    **extra: Any,
) -> str:
    """Return the prompt text of a conversation.

    messages: mappings with a "role" and, mostly, "content"; plain JSON values. tools: JSON schemas. extra: further
    variables for the template, such as `enable_thinking`. A special token that is None stays undefined. With a `date`
    the same messages give the same prompt on any day. With `continue_final_message` the text ends with the last
    message's content, and opens no turn, as in transformers.

    Raises TemplateError for a template that fails, raises an error of its own, or exceeds a limit (1 MiB of template, 4
    MiB of text, 256 MiB of memory, 1.2 s), and for messages that are not JSON. Thread-safe; renders wait for each
    other.
    """
    if len(template) > MAX_TEMPLATE or len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE:
        raise TemplateError(f"the chat template is larger than {MAX_TEMPLATE >> 20} MiB")
    said, mark = [_message(message) for message in messages], ""
    if continue_final_message:
        mark = _marked(said)
    variables = {
        "messages": said,
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None,
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        **{name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None},
        **extra,
    }
    try:
        content = {"template": template, "variables": variables, "date": (date or datetime.datetime.now()).isoformat()}
        request = json.dumps(content, ensure_ascii=False).encode()  # refuses lone surrogates
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"messages, tools and template variables must be plain JSON values: {error}") from error
    if len(request) > MAX_REQUEST:
        raise TemplateError(f"the conversation is larger than {MAX_REQUEST >> 20} MiB")
    text = _renderer.ask(request, RENDER_SECONDS)
    return _until(text, mark) if mark else text


def read_template(path: Path) -> str:
    """Return the chat template in a file. Raises TemplateError for a file that cannot be read, is too large, or is no
    text in UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE + 1)
        if len(data) > MAX_TEMPLATE:
            raise TemplateError(f"{path}: a chat template of more than {MAX_TEMPLATE >> 20} MiB")
        return data.decode()
    except OSError as error:
        raise TemplateError(f"{path}: {error.strerror}: it cannot be read as a chat template") from error
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path}: a chat template is text in UTF-8") from error


def reads(template: str, variable: str) -> bool:
    """Return whether a template names a variable, as a word that is no attribute and no text."""
    return variable in _names(template)


@lru_cache(8)
def _names(template: str) -> frozenset[str]:
    return frozenset(_NAME.findall(template))


@lru_cache(8)
def lists_only(template: str) -> bool:
    """Return whether a template leaves out content that is a text, and writes that of a list of parts: those of some
    vision-language models do."""
    if "type" not in template:
        return False
    word = "attar-content-form"
    forms: tuple[Any, ...] = (word, [{"type": "text", "text": word}])

    def writes(content: Any) -> bool:
        with contextlib.suppress(TemplateError):
            said = [{"role": "user", "content": content}]
            return word in render_chat(template, said, bos_token="", eos_token="", add_generation_prompt=False)
        return False

    as_text, as_list = (writes(form) for form in forms)
    return as_list and not as_text


def warm() -> None:
    """Start the rendering process, unless it runs, so that the first conversation does not wait for it.

    Its errors are ignored here; they are raised for a conversation.
    """
    with contextlib.suppress(TemplateError, OSError):
        _renderer.start()


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError('each message must be a mapping with a "role": {"role": "user", "content": "Hello"}')
    return dict(message)


def _marked(said: list[dict[str, Any]]) -> str:
    """Put a mark behind the last message's content, in place; return the mark. It ends with a space, which a template
    that trims the content drops. Raises TemplateError where there is no content to continue."""
    content = said[-1].get("content") if said else None
    texts = json.dumps(said, ensure_ascii=False)
    mark = next((chr(code) for code in range(0xFDEF, 0xFDCF, -1) if chr(code) not in texts), "") + " "
    if isinstance(content, str):
        said[-1]["content"] = content + mark
    elif isinstance(content, list) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        said[-1]["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        raise TemplateError("the last message has no text that could be continued")
    return mark


def _until(text: str, mark: str) -> str:
    """Return a rendered text up to the mark, without the spaces before it where the template trims."""
    before, found, behind = text.rpartition(mark.strip())
    if not found:
        raise TemplateError("the chat template leaves out the last message, so that it cannot be continued")
    return before if behind.startswith(" ") else before.rstrip()


def _error(message: str, code: Code | None) -> TemplateError:
    return TemplateError(message, code or "template_failed")


_renderer = LimitedChild("attar.text._render_child", ("jinja2", "markupsafe"), "chat template", _error)
atexit.register(_renderer.close)
