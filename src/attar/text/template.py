"""Chat templates: messages to prompt text, like transformers' `apply_chat_template`, but safely.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from Python's internals but not from the
machine: one expression can ask for gigabytes, or for hours inside a single C call that no Python signal interrupts; its
maintainers say to set limits in the operating system (pallets/jinja#2149). So templates are rendered by another
process, `_render_child.py`, under limits on memory, processor time, files and output, and this module kills it at a
deadline. One such process serves all renders, since starting Python costs a hundred times more than a render; after
any failure of its own it is replaced. It shares no memory with the caller; only JSON and text pass between them.

The date a template may print (`strftime_now`) is an argument, by default now in local time, as in transformers.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attar.errors import Code, UserError
from attar.protocol import framing

MAX_TEMPLATE = 1 << 20  # bytes
MAX_REQUEST = 16 << 20  # bytes: messages, tools and the template, as JSON
MAX_ANSWER = (4 << 20) + 1
RENDER_SECONDS = 1.2  # of which half on a processor; a render takes about a millisecond
STARVED_SECONDS = 10.0  # in any case: no template can wait for anything but a processor
START_SECONDS = 60.0  # importing jinja2 on a busy machine


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
    date: datetime.date | None = None,
    **extra: Any,
) -> str:
    """Return the prompt text of a conversation.

    messages: mappings with a "role" and, mostly, "content"; plain JSON values. tools: JSON schemas. extra: further
    variables for the template, such as `enable_thinking`. A special token that is None stays undefined. With a `date`
    the same messages give the same prompt on any day.

    Raises TemplateError for a template that fails, raises an error of its own, or exceeds a limit (1 MiB of template, 4
    MiB of text, 256 MiB of memory, 1.2 s), and for messages that are not JSON. Thread-safe; renders wait for each
    other.
    """
    if len(template) > MAX_TEMPLATE or len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE:
        raise TemplateError(f"the chat template is larger than {MAX_TEMPLATE >> 20} MiB")
    variables = {
        "messages": [_message(message) for message in messages],
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
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
    return _renderer.render(request)


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


class _Renderer:
    """The owner of the child process: started on first use, replaced after it was killed, closed at exit."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the child in a forked process: it belongs to the parent, whose answers must not be read here."""
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = _start()
        return self._child

    def render(self, request: bytes) -> str:
        with self._lock:
            child = self._running()
            reply = b"!"
            try:
                reply = _ask(child, request, RENDER_SECONDS)
            finally:
                if reply[:1] == b"!":  # also at Ctrl-C: an unread answer must not become the next one's
                    self.close()
        text = reply[1:].decode("utf-8", "replace")
        if reply[:1] != b"+":
            raise TemplateError(text)
        return text

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _start() -> subprocess.Popen[bytes]:
    # No site-packages and no environment: nothing runs before the child's own first line, and it knows no secrets.
    # Some Pythons find their own library only by LD_LIBRARY_PATH.
    program = "import sys; sys.path += sys.argv[1:]; from attar.text import _render_child; _render_child.main()"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, *_jinja_folders(), str(Path(__file__).parents[2])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
        start_new_session=True,  # Ctrl-C in a terminal is for the caller
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)  # of this end alone
    _ask(child, None, START_SECONDS)
    return child


def _jinja_folders() -> list[str]:
    """Return the folders that hold jinja2 and markupsafe, for a Python without site-packages."""
    folders: dict[str, None] = {}
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise TemplateError(f"chat templates need the package {name}: pip install jinja2", "package_missing")
        folders[str(Path(spec.origin).parents[1])] = None
    return list(folders)


def _ask(child: subprocess.Popen[bytes], request: bytes | None, seconds: float) -> bytes:
    """Send a request, if any, and read one answer.

    Raises TemplateError where none came by the deadline, or the child ended instead: in both cases it is gone.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    deadline = _Deadline(child.pid, seconds)
    try:
        if request is not None:
            _write(child.stdin.fileno(), framing.frame(request), deadline)
        return _read(child.stdout.fileno(), deadline)
    except (EOFError, BrokenPipeError, TimeoutError, framing.FrameTooLong) as error:
        child.kill()
        status = child.wait()
        if isinstance(error, TimeoutError) or status == -signal.SIGXCPU:
            raise TemplateError(f"the chat template took longer than {seconds:g} s") from error
        raise TemplateError(f"the chat template crashed its process (status {status})") from error


class _Deadline:
    """The deadline of a process: after `seconds`, if it had a processor for half of them.

    On a machine that is too busy for that it gets more, because a good template must not fail because of other load: up
    to `STARVED_SECONDS`.
    """

    def __init__(self, pid: int, seconds: float) -> None:
        self.pid, self.seconds = pid, seconds
        self._began, self._used = time.monotonic(), _processor_seconds(pid)

    def left(self) -> float:
        """Return the seconds to wait before asking again. Raises TimeoutError where there are none."""
        spent = time.monotonic() - self._began
        if spent < self.seconds:
            return self.seconds - spent
        used = _processor_seconds(self.pid)
        if used is None or self._used is None or spent >= max(self.seconds, STARVED_SECONDS):
            raise TimeoutError
        if (owed := self.seconds / 2 - (used - self._used)) <= 0:
            raise TimeoutError
        return max(owed, 0.01)


def _processor_seconds(pid: int) -> float | None:
    """Return the processor seconds of a process; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _write(fd: int, data: bytes, deadline: _Deadline) -> None:
    """Write to a pipe that does not block."""
    poll, view = select.poll(), memoryview(data)
    poll.register(fd, select.POLLOUT)
    while view:
        if poll.poll(1000 * deadline.left()):
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(fd, view) :]


def _read(fd: int, deadline: _Deadline) -> bytes:
    """One answer."""
    poll, data = select.poll(), bytearray()
    poll.register(fd, select.POLLIN)
    while wanted := framing.missing(data, MAX_ANSWER):
        if poll.poll(1000 * deadline.left()):
            more = os.read(fd, wanted)
            if not more:
                raise EOFError
            data += more
    if len(data) == framing.HEAD:
        raise EOFError
    return bytes(data[framing.HEAD :])


_renderer = _Renderer()
atexit.register(_renderer.close)
os.register_at_fork(after_in_child=_renderer.forget)
