"""A hub on this machine: the part of the Hugging Face Hub's HTTP API that its Python clients use to read.

Repositories live in memory, with commits, branches and tags. Large files are served as the hub serves them: the
`resolve` address answers with a redirect to another host, which honours ranges. What goes wrong is up to the test:
repositories can be gated, connections can be cut in the middle of a file, and every request is logged.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".bin", ".gguf")
TOKEN = "hf_a_token_that_opens_everything"


@dataclass
class Repo:
    """One repository: its commits, oldest first, and what branches and tags stand for."""

    name: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], *refs: str) -> str:
        """Add a commit; `main` and the given tags stand for it from now on."""
        content = hashlib.sha1(f"{self.name} {len(self.commits)}".encode())
        for name, data in sorted(files.items()):
            content.update(name.encode() + hashlib.sha256(data).digest())
        sha = content.hexdigest()
        self.commits[sha] = dict(files)
        for ref in refs or ("main",):
            self.refs[ref] = sha
        return sha


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Hub:
    """The server's state, which a test may change between requests."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.log: list[tuple[str, str, str | None]] = []
        """Method, path and range of every request."""
        self.cuts: dict[str, tuple[int, int]] = {}
        """File name → how many downloads of it are still to be cut, and after how many bytes."""
        self.stalled: str | None = None
        """Say nothing where a path contains this."""
        self.down = False
        """Answer 503 to everything."""
        self.moved: dict[tuple[str, str], str] = {}
        """Old names of repositories, which the hub redirects."""
        self.url = self.cdn = ""

    def repo(self, name: str, kind: str = "models") -> Repo:
        return self.repos.setdefault((kind, name), Repo(name))

    def downloads(self, file: str) -> list[str | None]:
        """The ranges with which a file was downloaded, in order."""
        return [ranged for method, path, ranged in self.log if method == "GET" and path.endswith(f"/{file}")]

    @contextmanager
    def serve(self) -> Iterator[Hub]:
        server = _Server(("127.0.0.1", 0), _handler(self))
        port = server.server_address[1]
        # Two names for one machine: to the client they are the hub and the host that the large files come from.
        self.url, self.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no mistake of the server's."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


_NAME = r"(?P<name>[\w.-]+(?:/[\w.-]+)?)"
_API = re.compile(rf"/api/(?P<kind>models|datasets)/{_NAME}(?:/(?P<what>revision|tree|paths-info)/(?P<rest>.+?))?/?")
_RESOLVE = re.compile(rf"/(?P<kind>datasets/)?{_NAME}/resolve/(?P<rest>.+)")
_CDN = re.compile(rf"/cdn/(?P<kind>models|datasets)/{_NAME}/(?P<rest>[0-9a-f]{{40}}/.+)")


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """The log is the hub's own."""

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            path = unquote(parts.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.log.append((self.command, path, self.headers.get("Range")))
            while hub.stalled is not None and hub.stalled in path:
                time.sleep(0.05)
            try:
                if hub.down:
                    raise Refused(503, "", "The hub is down.")
                for (kind, old), new in hub.moved.items():
                    for before in (f"/api/{kind}/{old}", f"/{kind}/{old}"):
                        after = path.removeprefix(before)
                        if path.startswith(before) and re.match(r"(/(revision|tree|paths-info|resolve)/|$)", after):
                            return self._redirect(before.replace(old, new) + after)
                if match := _API.fullmatch(path):
                    self._api(match, parse_qs(body.decode()) if body[:1] != b"{" else json.loads(body))
                elif match := _CDN.fullmatch(path):
                    commit, file = match["rest"].split("/", 1)
                    self._file(hub.repos[match["kind"], match["name"]].commits[commit][file], {}, file)
                elif match := _RESOLVE.fullmatch(path):
                    self._resolve("datasets" if match["kind"] else "models", match)
                else:
                    raise Refused(404, "", f"no such address: {path}")
            except Refused as refused:
                self._refuse(refused)

        def _redirect(self, path: str) -> None:
            self.send_response(307)
            self.send_header("Location", path)
            self._send(b"", "text/plain")

        def _refuse(self, refused: Refused) -> None:
            data = json.dumps({"error": str(refused)}).encode()
            self.send_response(refused.status)
            if refused.code:
                self.send_header("X-Error-Code", refused.code)
            self.send_header("X-Error-Message", str(refused))
            self._send(data, "application/json")

        def _send(self, data: bytes, kind: str) -> None:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _json(self, content: Any) -> None:
            self.send_response(200)
            self._send(json.dumps(content).encode(), "application/json")

        @property
        def _trusted(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def _repo(self, kind: str, name: str) -> Repo:
            repo = hub.repos.get((kind, name))
            if repo is None or (repo.private and not self._trusted):
                # Without a token the server does not reveal whether a repository exists.
                if self._trusted:
                    raise Refused(404, "RepoNotFound", "Repository not found")
                raise Refused(401, "RepoNotFound", "Invalid username or password.")
            return repo

        def _commit(self, repo: Repo, revision: str) -> str:
            commit = repo.refs.get(revision, revision)
            if commit not in repo.commits:
                raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return commit

        def _split(self, repo: Repo, rest: str) -> tuple[str, str]:
            """A revision, which may hold slashes, and the path after it."""
            for revision in sorted(repo.refs, key=len, reverse=True):
                if rest == revision or rest.startswith(f"{revision}/"):
                    return revision, rest[len(revision) + 1 :]
            revision, _, path = rest.partition("/")
            return revision, path

        def _api(self, match: re.Match[str], body: Mapping[str, Any]) -> None:
            repo = self._repo(match["kind"], match["name"])
            revision, path = self._split(repo, match["rest"] or "main")
            if match["what"] == "revision":
                revision, path = match["rest"], ""
            commit = self._commit(repo, revision)
            files = repo.commits[commit]
            if match["what"] == "tree":
                return self._json(_entries(files, path))
            if match["what"] == "paths-info":
                wanted = {name.strip("/") for name in body.get("paths", [])}
                return self._json([entry for entry in _entries(files, "") if entry["path"] in wanted])
            return self._json(
                {
                    "_id": commit[:24],
                    "id": match["name"],
                    "sha": commit,
                    "private": repo.private,
                    "gated": "manual" if repo.gated else False,
                    "disabled": False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "siblings": [{"rfilename": name} for name in sorted(files)],
                    "lastModified": "2024-01-01T00:00:00.000Z",
                    "createdAt": "2024-01-01T00:00:00.000Z",
                }
            )

        def _resolve(self, kind: str, match: re.Match[str]) -> None:
            repo = self._repo(kind, match["name"])
            revision, file = self._split(repo, match["rest"])
            commit = self._commit(repo, revision)
            if repo.gated and not self._trusted:
                raise Refused(401, "GatedRepo", f"Access to {match['name']} is restricted.")
            data = repo.commits[commit].get(file)
            if data is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("X-Error-Message", "Entry not found")
                self.send_header("X-Repo-Commit", commit)
                return self._send(b"Entry not found", "text/plain")
            if not file.endswith(LARGE):
                return self._file(data, {"X-Repo-Commit": commit}, file)
            self.send_response(302)
            self.send_header("Location", f"{hub.cdn}/cdn/{kind}/{match['name']}/{commit}/{file}")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(data).hexdigest()}"')
            return self._send(b"", "text/plain")

        def _file(self, data: bytes, headers: Mapping[str, str], file: str) -> None:
            start, status = 0, 200
            if ranged := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
                start, status = int(ranged[1]), 206
                stop = int(ranged[2]) + 1 if ranged[2] else len(data)
                headers = {**headers, "Content-Range": f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"}
                part = data[start:stop]
            else:
                part = data
            self.send_response(status)
            for name, value in {**headers, "ETag": f'"{_etag(data, file)}"', "Accept-Ranges": "bytes"}.items():
                self.send_header(name, value)
            left, after = hub.cuts.get(file.rpartition("/")[2], (0, 0))
            if self.command == "GET" and left:
                hub.cuts[file.rpartition("/")[2]] = (left - 1, after)
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                self.wfile.write(part[:after])
                self.wfile.flush()
                self.close_connection = True
                return
            self._send(part, "application/octet-stream")

    return Handler


def _etag(data: bytes, file: str) -> str:
    if file.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _entries(files: Mapping[str, bytes], under: str) -> list[dict[str, Any]]:
    """Files and folders below a path, at any depth, as the tree's address lists them."""
    under = f"{under.strip('/')}/" if under.strip("/") else ""
    folders = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
    found = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in sorted(folders)]
    for name, data in sorted(files.items()):
        entry: dict[str, Any] = {"type": "file", "oid": _etag(data, "plain"), "size": len(data), "path": name}
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        found.append(entry)
    return [entry for entry in found if entry["path"].startswith(under)]
