"""A loopback server that speaks the Hub's API: listings, ranges of files, and whole files."""

from __future__ import annotations

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a dict of files; `padding` bytes follow each weight file, and are never sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.sent, self.ranges, self.padding = 0, True, 0
        self.status: int | None = None
        self.whole: list[str] = []  # files that were sent whole


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body)

    def do_HEAD(self) -> None:
        """Answer what `huggingface_hub` asks before it downloads a file."""
        match = re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", self.path)
        if match is None or match[2] not in self.server.repos.get(match[1], {}):
            return self.answer(404, b"", x_error_code="EntryNotFound")
        text = self.server.repos[match[1]][match[2]]
        self.send_response(200)
        named = {
            "etag": f'"{hashlib.sha1(text).hexdigest()}"',
            "x-repo-commit": COMMIT,
            "content-length": str(len(text)),
        }
        for name, value in named.items():
            self.send_header(name, value)
        self.end_headers()
        return None

    def do_GET(self) -> None:
        hub = self.server
        if hub.status is not None:
            return self.answer(hub.status, b"{}")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^?]+))?(?:\?.*)?", self.path):
            if match[1] not in hub.repos:
                return self.answer(404, b"{}", x_error_code="RepoNotFound")
            files = [{"rfilename": name} for name in hub.repos[match[1]]]
            return self.answer(200, json.dumps({"id": match[1], "sha": COMMIT, "siblings": files}).encode())
        if match := re.fullmatch(rf"/api/models/([^/]+/[^/]+)/tree/{COMMIT}\?.*", self.path):
            tree = [
                {"type": "file", "path": name, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                for name, text in hub.repos[match[1]].items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        match = re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", self.path)
        if match is None or match[2] not in hub.repos.get(match[1], {}):
            return self.answer(404, b"", x_error_code="EntryNotFound")
        whole = hub.repos[match[1]][match[2]]
        size = len(whole) + (hub.padding if match[2].endswith(".safetensors") else 0)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if asked is None or not hub.ranges:
            hub.whole.append(match[2])
            return self.answer(200, whole)
        begin, last = int(asked[1]), min(int(asked[2]), size - 1)
        part = whole[begin : last + 1]
        self.answer(206, part, content_range=f"bytes {begin}-{last}/{size}")
        return None


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder and its subfolders, by their names in a repository."""
    found = sorted(each for each in folder.rglob("*") if each.is_file())
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in found}
