"""`attar route` in front of attar's servers: the HTTP process of `attar serve`, whose engines are on other hosts.

Texts become tokens here, by the tokenizer of the first host that answers. So prompts are known by their tokens, and an
answer is continued on another host as by `attar serve --replicas`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import httpx2

from attar import env, faults
from attar.errors import UserError
from attar.server.engine_client.heartbeat import STUCK
from attar.server.fleet import wire
from attar.server.fleet.host_client import WAITS, HostClient, NoHost, client, fetch
from attar.server.fleet.router_key import PassedKeys, salt_secret
from attar.server.fleet.wire import Greeting, TokenizerFiles
from attar.server.http import sockets
from attar.server.http.security import is_loopback
from attar.server.options import ServerOptions
from attar.server.replicas.group import ReplicaGroup
from attar.server.serve import Server
from attar.text.tokenizer import Tokenizer
from attar.version import __version__

logger = logging.getLogger(__name__)


def check_urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of hosts without a slash at the end. Raises UserError for other forms, and for one that is
    given twice."""
    found: list[str] = []
    for each in urls:
        parts = urlsplit(each)
        try:
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            sound = False
        if not sound or parts.query or parts.fragment or parts.username or any(ord(letter) <= 32 for letter in each):
            message = f"{each[:160]!r} is no address of a host: write it like http://10.0.0.7:8000"
            raise UserError("address_invalid", message)
        if (url := each.rstrip("/")) in found:
            raise UserError("option_conflict", f"{url} is given twice")
        found.append(url)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            logger.warning("%s: keys and prompts go there unencrypted: use https, or a network of your own", url)
    return tuple(found)


async def greet(http: httpx2.AsyncClient, urls: Sequence[str], key: str) -> tuple[Greeting, Tokenizer]:
    """Wait for the first host that answers, and return its greeting and its tokenizer."""
    headers, told = {wire.KEY_HEADER.decode(): key}, dict[str, str]()
    while True:
        for url in urls:
            try:
                greeting: Greeting = await fetch(http, url + wire.HELLO, headers, Greeting, 1 << 20)
                if greeting.protocol != wire.PROTOCOL or greeting.version != __version__:
                    raise NoHost(f"it is attar {greeting.version[:40]}, and this is {__version__}")
                files = await fetch(http, url + wire.TOKENIZER, headers, TokenizerFiles, wire.MAX_TOKENIZER)
                return greeting, Tokenizer.of(
                    files.backend, files.bos_token, files.eos_token, files.chat_templates, files.eos_ids
                )
            except (NoHost, httpx2.HTTPError, OSError, UserError) as error:
                why = str(error) if isinstance(error, NoHost | UserError) else type(error).__name__
                if told.get(url) != why:
                    logger.warning("%s: %s", url, why)
                told[url] = why
        await asyncio.sleep(WAITS[-1])


def run(urls: Sequence[str], key: str, options: ServerOptions, started: Callable[[str], None]) -> None:
    """Route requests to the hosts at `urls`, with their router key, until told to stop.

    `options` are those of the router's own HTTP; what hosts greet with is added. Raises OSError where the address is
    not available, ValueError for unknown faults to be armed (`attar/faults.py`).
    """
    faults.arm_from(env.get().faults)
    sockets.allow(2 * options.max_requests)
    with sockets.listen(options.host, options.port) as listener:
        gc.freeze()
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_run(urls, key, options, listener, started))


async def _run(
    urls: Sequence[str], key: str, options: ServerOptions, listener: socket.socket, started: Callable[[str], None]
) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for each in (signal.SIGTERM, signal.SIGINT):  # until the server handles them
        loop.add_signal_handler(each, task.cancel)
    async with client() as http:
        greeting, tokenizer = await greet(http, urls, key)
        server = make(urls, key, options, http, greeting, tokenizer, listener)
        await server.run(started)


def make(
    urls: Sequence[str], key: str, options: ServerOptions, http: httpx2.AsyncClient, greeting: Greeting,
    tokenizer: Tokenizer, listener: socket.socket | None = None,
) -> Server:  # fmt: skip
    """Make the router's server, with the settings that its hosts greet with."""
    keys = PassedKeys(options.keys.hashes, salt_secret(key), greeting.keyed)
    date = None if greeting.template_date is None else datetime.date.fromisoformat(greeting.template_date)
    options = replace(
        options, keys=keys, aliases=greeting.aliases, sampling=greeting.sampling, reasoning=greeting.reasoning,
        template_date=date,
    )  # fmt: skip
    stuck = max(STUCK, options.deadline)
    clients = [HostClient(url, http, key, keys.credentials, stuck, greeting) for url in urls]
    labels = [urlsplit(url).netloc for url in urls]
    group = ReplicaGroup(clients, stuck, len(set(options.keys.hashes)), labels=labels)
    return Server(group, tokenizer, options, listener)
