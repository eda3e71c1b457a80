"""A hub on this machine: the HTTP interface that huggingface_hub talks to, over folders."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class Hub:
    """What the hub holds and how it answers."""

    url: str
    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    """folder of each commit, by id"""
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    """status and X-Error-Code for files of an id"""
    refuse_listing: dict[str, tuple[int, str]] = field(default_factory=dict)
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    """bytes that the listing gives for a file, where they are not the file's own"""
    extra: list[str] = field(default_factory=list)
    """names in every listing that have no file"""
    hang_seconds: float = 0.0
    silent: dict[str, float] = field(default_factory=dict)
    """share of a file's bytes that come, by name; after them the line is open and nothing is said"""
    closed: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """Authorization headers that came"""

    def names(self) -> list[str]:
        """Files that were fetched, in order."""
        return [line.rsplit("/", 1)[-1] for line in self.requests if line.startswith("GET") and "/resolve/" in line]


@contextmanager
def hub_over(commits: dict[str, dict[str, Path]]) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}", commits)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closed.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(False)

    def do_GET(self):
        self._answer(True)

    def _answer(self, body: bool):
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.hang_seconds:
            time.sleep(hub.hang_seconds)
            return self.close_connection_now()
        if path.startswith("/api/models/"):
            return self._listing(hub, *_split(path.removeprefix("/api/models/"), "/revision/"))
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        return self._file(hub, name, revision, file, body)

    def close_connection_now(self):
        self.close_connection = True

    def _listing(self, hub: Hub, name: str, revision: str):
        if name in hub.refuse_listing:
            return self._refuse(*hub.refuse_listing[name])
        if name not in hub.commits:
            return self._refuse(404, "RepoNotFound")
        commit = _commit(hub, name, revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = [f for f in sorted(hub.commits[name][commit].iterdir()) if f.is_file()]
        siblings = [
            {"rfilename": f.name, "size": hub.claimed_sizes.get(f.name, f.stat().st_size), "blobId": "0" * 40}
            for f in files
        ] + [{"rfilename": extra, "size": 1} for extra in hub.extra]
        return self._send(json.dumps({"id": name, "sha": commit, "siblings": siblings, "tags": []}).encode())

    def _file(self, hub: Hub, name: str, revision: str, file: str, body: bool):
        if name in hub.refuse:
            return self._refuse(*hub.refuse[name])
        commit = _commit(hub, name, revision) if name in hub.commits else None
        if commit is None or not (hub.commits[name][commit] / file).is_file():
            return self._refuse(404, "EntryNotFound")
        content = (hub.commits[name][commit] / file).read_bytes()
        start = 0
        if (asked := self.headers.get("Range")) is not None:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if body and file in hub.silent:
            return self._fall_silent(content[: int(hub.silent[file] * len(content))], content, headers, start)
        return self._send(content, headers, body, start)

    def _fall_silent(self, sent: bytes, content: bytes, headers: dict, start: int):
        self._send(content, headers, False, start)
        self.wfile.write(sent[start:])
        self.wfile.flush()
        self.server.hub.closed.wait(60)
        self.close_connection = True

    def _send(self, content: bytes, headers: dict | None = None, body: bool = True, start: int = 0):
        self.send_response(206 if start else 200)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if body:
            self.wfile.write(content[start:])

    def _refuse(self, status: int, code: str):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _split(text: str, by: str) -> tuple[str, str]:
    left, _, right = text.partition(by)
    return left, right or "main"


def _commit(hub: Hub, name: str, revision: str) -> str | None:
    if revision in hub.commits[name]:
        return revision
    return {"main": COMMIT}.get(revision)
