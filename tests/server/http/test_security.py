"""Keys, salts, hosts, and what the server's process does on its own."""

from __future__ import annotations

import ast
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from soaks.served import Served

from attar.server.http.security import KEY_VARIABLE, Keys, checked_keys, find_keys, host_name, is_loopback, read_keys
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.errors import user_error

KEY, OTHER = "k" * 32, "o" * 40


def test_keys_are_lines_of_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n  {OTHER}  \n")
    with user_error("file_unsafe"):
        read_keys(file)
    file.chmod(0o600)
    assert read_keys(file) == (KEY, OTHER)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        read_keys(tmp_path / "link")
    environ = {KEY_VARIABLE: "x" * 32, "other": "y"}
    assert find_keys(None, dict(environ)) == ("x" * 32,)
    assert find_keys(file, environ) == (KEY, OTHER)
    assert environ == {"other": "y"}
    assert find_keys(None, {}) == ()


@pytest.mark.parametrize("lines", [[], [""], ["short"], ["k" * 31], ["k" * 20 + " " + "k" * 20], ["é" * 32]])
def test_keys_that_are_none(lines: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        checked_keys(lines, "the file")
    assert "é" not in str(error.value)
    assert "kkkk" not in str(error.value)


def test_salts_belong_to_keys_and_servers() -> None:
    keys = Keys.of([KEY, OTHER])
    one = keys.cache_salt({b"authorization": b"Bearer " + KEY.encode()})
    assert one == keys.cache_salt({b"x-api-key": KEY.encode()})
    assert one
    assert one != keys.cache_salt({b"authorization": b"bearer " + OTHER.encode()})
    assert one != Keys.of([KEY]).cache_salt({b"x-api-key": KEY.encode()})
    for wrong in (
        {},
        {b"x-api-key": b""},
        {b"authorization": KEY.encode()},
        {b"authorization": b"Basic " + KEY.encode()},
    ):
        assert keys.cache_salt(wrong) is None
    assert Keys().cache_salt({}) == b""
    assert KEY not in repr(keys)
    assert repr(keys.secret) not in repr(keys)


def test_addresses_that_others_reach_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        assert not is_loopback(host)
        with user_error("exposed_without_key"):
            ServerOptions(host=host)
        assert ServerOptions(host=host, keys=Keys.of([KEY])).names == frozenset()
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert is_loopback(host)
        assert "localhost" in ServerOptions(host=host).names
        assert ServerOptions(host=host, hosts=frozenset({"llm.example.org"})).names >= {"localhost", "llm.example.org"}
    public = ServerOptions(host="0.0.0.0", keys=Keys.of([KEY]), hosts=frozenset({"llm.example.org"}))
    assert public.names >= {"127.0.0.1", "llm.example.org"}, "who looks after a container asks by loopback"
    assert "2001:db8::1" in ServerOptions(hosts=frozenset({"2001:db8::1"})).names
    for name in (
        "[2001:db8::1]",
        "2001:DB8::1",
        "2001:db8:0::1",
        "",
        "*.example.org",
        "Example.org",
        "example.org:443",
        " example.org",
    ):
        with user_error("address_invalid"):
            ServerOptions(hosts=frozenset({name}))
    with user_error("address_invalid"):
        ServerOptions(origins=frozenset({"*"}))


def test_host_names_have_no_port() -> None:
    found = [host_name(host) for host in (b"LocalHost:80", b"[::1]:80", b"[::1]", b"a.b", b"", b"127.0.0.1.evil:1")]
    assert found == ["localhost", "::1", "::1", "a.b", "", "127.0.0.1.evil"]


WATCHED = """
import asyncio, json, sys
from pathlib import Path

seen = []

def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        seen.append([event, repr(arguments[-1] if event == "socket.connect" else arguments)])
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class"):
        seen.append([event, repr(arguments[0])])

from attar.server.options import ServerOptions
from attar.server.serve import Server
from attar.text.tokenizer import Tokenizer

tokenizer = Tokenizer.load(Path(sys.argv[2]))
sys.addaudithook(watch)
server = Server(Path(sys.argv[1]), tokenizer, ServerOptions(port=0))
asyncio.run(server.run(lambda url: print(url, flush=True)))
print(json.dumps(seen), flush=True)
"""


def listening(process: int) -> list[str]:
    """Addresses, in hexadecimal as the kernel shows them, of the TCP sockets at which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for table in tables for line in table.read_text().split("\n")[1:-1]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_the_server_listens_at_one_address_and_connects_to_nothing_but_its_engine(
    tokenizer: Tokenizer, demo: Path, tmp_path: Path
) -> None:
    path = tmp_path / "engine.sock"
    here = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{here.parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
    fake = [sys.executable, str(here / "fake_engine.py"), str(path), str(demo), "0"]
    engine = subprocess.Popen(fake, env=environment)
    server = subprocess.Popen([sys.executable, "-c", WATCHED, str(path), str(demo)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])

        def ask(method: str, target: str, body: object = None) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            data = None if body is None else json.dumps(body)
            connection.request(method, target, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            connection.close()
            return reply.status

        while ask("GET", "/readyz") != 200:
            assert engine.poll() is None
            assert server.poll() is None
            time.sleep(0.02)
        said = [{"role": "user", "content": "See http://example.org/x.png and file:///etc/passwd"}]
        for target, body in (
            ("/v1/chat/completions", {"messages": said, "max_tokens": 2}),
            ("/v1/messages", {"messages": said, "max_tokens": 2, "stream": True}),
            ("/v1/embeddings", {"input": "text"}),
        ):
            assert ask("POST", target, body) == 200
        for target in ("/", "/metrics", "/openapi.json", "/v1/engine"):
            assert ask("GET", target) == 200
        if sys.platform == "linux":
            assert listening(server.pid) == ["0100007F"]
        server.send_signal(signal.SIGTERM)
        seen = json.loads(server.stdout.read())
        assert {event for event, _ in seen} == {"socket.connect", "subprocess.Popen"}
        assert {what for event, what in seen if event == "socket.connect"} == {repr(str(path))}
        assert {what for event, what in seen if event == "subprocess.Popen"} == {repr(sys.executable)}  # renders
        assert server.wait(20) == 0
    finally:
        for process in (server, engine):
            process.kill()
            process.wait()


WATCH_ALL = """
import os, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"):
        shown = [each for each in arguments if isinstance(each, (str, bytes, tuple))]
        os.write(log, f"{os.getpid()} {event} {shown!r}\\n".encode())

log = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(log, f"{os.getpid()} started\\n".encode())
sys.addaudithook(watch)
"""


def test_neither_process_of_attar_serve_connects_to_anything_but_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine, which loads and runs the model, as well as the server: from their first line on."""
    seen = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(WATCH_ALL.replace("FILE", repr(str(seen))))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    served = Served("--threads", "1")
    try:
        connection = http.client.HTTPConnection("127.0.0.1", served.address.port, timeout=20)
        body = {"messages": [{"role": "user", "content": "See http://example.org/x.png"}], "max_tokens": 2}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
        lines = [line.split(" ", 2) for line in seen.read_text().splitlines()]
        assert {served.process.pid, served.engine()} <= {int(pid) for pid, what, *_ in lines if what == "started"}
        told = [(what, *rest) for _, what, *rest in lines if what != "started"]
        assert told
        assert {what for what, *_ in told} <= {"socket.connect", "socket.getaddrinfo"}
        for what, arguments in told:
            where = ast.literal_eval(arguments)[0]
            if what == "socket.connect":
                assert isinstance(where, str), where  # the path of a Unix socket
                assert where.endswith("/engine"), where
            else:
                assert where == "127.0.0.1", where  # its own
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
        assert "leaked" not in served.said(), "what is frozen at the end is no leak, and no news"
    finally:
        served.end()
