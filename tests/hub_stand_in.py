"""A stand-in for the model hub: a local HTTP server with the few routes that downloads use.

Repositories are folders. What a test wants to go wrong is said beforehand: a connection that is
cut in the middle of a file or before an answer, an answer that does not come, a status that a route
answers with a few times. Everything asked for is written down.

Routes: `/api/models/ID[/revision/REV]`, `/api/models/ID/tree/REV`, `/ID/resolve/REV/FILE`.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

REASONS = {
    401: "RepoNotFound",
    403: "GatedRepo",
    404: "RepoNotFound",
}
RESET = -1  # the connection is reset in place of an answer
SILENCE = -2  # no answer comes, until the hub stops or the asker goes away
SILENCE_S = 5


@dataclass(frozen=True)
class Request:
    """One request that arrived: method, path without the query, and who asked."""

    method: str
    path: str
    token: str | None

    @property
    def file(self) -> str | None:
        """The file that was asked for, if it was one."""
        _, found, rest = self.path.partition("/resolve/")
        return rest.partition("/")[2] if found else None


@dataclass
class Repository:
    """A repository: its folder, its commit, and the names that stand for the commit."""

    folder: Path
    commit: str
    branches: set[str] = field(default_factory=lambda: {"main"})
    gated: bool = False
    token: str | None = None

    def knows(self, revision: str) -> bool:
        """Whether that is a name of the commit."""
        return revision == self.commit or revision in self.branches

    def files(self) -> list[str]:
        """Paths of all files."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in found)


class HubStandIn:
    """The server; see the module's docstring.

    Attributes:
        url: What HF_ENDPOINT has to be.
        requests: Everything that was asked for, but for the library's question about agents.
        cut_after: Bytes of a file, by its name, after which the connection is cut, once.
        fail: What to answer with first, by a part of the path: a status, or RESET or SILENCE.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.repositories: dict[str, Repository] = {}
        self.cut_after: dict[str, int] = {}
        self.fail: dict[str, list[int]] = {}
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        stand_in = self

        class Handler(_Handler):
            hub = stand_in

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # A short poll, so that shutting down does not take half a second a test.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def publish(self, repo_id: str, folder: Path, **facts: Any) -> Repository:
        """Make a folder a repository."""
        commit = hashlib.sha1(repo_id.encode()).hexdigest()
        self.repositories[repo_id] = Repository(folder, commit, **facts)
        return self.repositories[repo_id]

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port: from now on there is no network."""
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def asked(self, method: str | None = None) -> list[str]:
        """Names of the files that were asked for, with HEAD or GET or either."""
        wanted = [r for r in self.requests if method in (None, r.method)]
        return [r.file for r in wanted if r.file is not None]

    def lookups(self) -> int:
        """How often a revision was resolved."""
        return sum("/tree/" not in r.path for r in self.requests if r.path.startswith("/api/"))


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def end_headers(self) -> None:
        """One connection a request: after `stop` nothing is left to talk on."""
        self.send_header("Connection", "close")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the stand-in keeps its own list."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":
            return self._json(404, {})
        token = self.headers.get("Authorization")
        with self.hub.lock:
            self.hub.requests.append(Request(self.command, path, token))
            failing = next((f for part, f in self.hub.fail.items() if part in path and f), None)
            status = failing.pop(0) if failing else None
        if status in (RESET, SILENCE):
            return self._hang_up(wait_s=SILENCE_S if status == SILENCE else 0)
        if status is not None:
            return self._json(status, {"error": "as the test ordered"})
        repo_id = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        repo = self.hub.repositories.get(repo_id)
        if repo is None or (repo.token and token != f"Bearer {repo.token}"):
            status = 403 if repo and repo.gated else 401
            return self._json(status, {"error": "no"}, error=REASONS[status])
        if path.startswith("/api/models/"):
            return self._describe(repo_id, repo, path.removeprefix(f"/api/models/{repo_id}"))
        revision, _, file = path.removeprefix(f"/{repo_id}/resolve/").partition("/")
        if not repo.knows(revision):
            return self._json(404, {"error": "no"}, error="RevisionNotFound")
        if file not in repo.files():
            return self._json(404, {"error": "no"}, error="EntryNotFound", commit=repo.commit)
        return self._file(repo, file)

    def _hang_up(self, wait_s: float) -> None:
        """End the connection without a word; the system tells the other side that it was reset."""
        self.hub.stopped.wait(wait_s)
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def _describe(self, repo_id: str, repo: Repository, rest: str) -> None:
        """The repository itself, or its list of files."""
        kind, _, revision = rest.strip("/").partition("/")
        if not repo.knows(revision or "main"):
            return self._json(404, {"error": "no"}, error="RevisionNotFound")
        files = repo.files()
        if kind == "tree":
            return self._json(200, [_listing(repo.folder / file, file) for file in files])
        siblings = [{"rfilename": file} for file in files]
        facts = {"id": repo_id, "modelId": repo_id, "sha": repo.commit, "siblings": siblings}
        return self._json(200, facts | {"private": False, "tags": [], "downloads": 0})

    def _file(self, repo: Repository, file: str) -> None:
        content = (repo.folder / file).read_bytes()
        start = 0
        wanted = self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.hub.lock:
            cut = self.hub.cut_after.pop(file, None)
        if cut is None:
            self.wfile.write(content[start:])
            return
        self.wfile.write(content[start : start + cut])
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _json(
        self, status: int, value: Any, *, error: str | None = None, commit: str | None = None
    ) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if error is not None:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", error)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _listing(path: Path, name: str) -> dict[str, Any]:
    content = path.read_bytes()
    digest = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": digest}


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """A stand-in that answers while the block runs."""
    hub = HubStandIn()
    hub.start()
    try:
        yield hub
    finally:
        if hub._thread.is_alive():
            hub.stop()


def point_to(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library, which reads its settings when it is imported, talk to another hub."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
