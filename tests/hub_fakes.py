"""A hub on loopback that speaks the part of Hugging Face's protocol that downloads use, and caches laid out by hand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
OTHER_COMMIT = "b" * 40

CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'

FILES = {
    "config.json": CONFIG,
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": b"w" * 1000,
    "README.md": b"text",
    "pytorch_model.bin": b"p" * 10,
}


def index_of(*shards: str) -> bytes:
    """Return an index that names these files."""
    return json.dumps({"weight_map": {f"layer{number}": shard for number, shard in enumerate(shards)}}).encode()


@dataclass
class HubRepository:
    """One repository of the hub."""

    files: dict[str, bytes]
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str | None = None
    """Token that a request needs to see a gated repository."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the listing claims, where they differ from the files'."""
    absent: tuple[str, ...] = ()
    """Files that are listed and cannot be had."""


class HubServer(ThreadingHTTPServer):
    """Serves `repositories`. `requests` counts methods and paths; `ranges` lists the ranges that were asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, HubRepository] = {}
        self.requests: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.failures: list[int] = []
        """Statuses of the next answers, instead of the right ones."""
        self.cuts: dict[str, int] = {}
        """Bytes after which the next body of a file breaks off."""
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> set[str]:
        """Return the names of the files whose bodies were asked for."""
        return {entry.rpartition(f"/{COMMIT}/")[2] for entry in self.requests if entry.startswith("GET /org")}

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests[f"{self.command} {path}"] += 1
        if self.server.failures:
            self._reply(self.server.failures.pop(0), {}, b"")
            return
        for repo_id, repo in self.server.repositories.items():
            info, files = f"/api/models/{repo_id}", f"/{repo_id}/resolve/"
            if path == info or path.startswith((info + "/revision/", files)):
                if self.headers.get("Authorization") == "Bearer hf_invalid":
                    self._reply(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"")
                elif repo.token is not None and self.headers.get("Authorization") != f"Bearer {repo.token}":
                    self._reply(403, {"X-Error-Code": "GatedRepo"}, b"")
                elif path.startswith(files):
                    self._file(repo, *path.removeprefix(files).split("/", 1), has_body=has_body)
                else:
                    self._info(repo_id, repo, path.removeprefix(info).removeprefix("/revision/") or "main")
                return
        self._reply(404, {"X-Error-Code": "RepoNotFound"}, b"")

    def _info(self, repo_id: str, repo: HubRepository, revision: str) -> None:
        commit = repo.commits.get(revision, revision if revision in repo.commits.values() else None)
        if commit is None:
            self._reply(404, {"X-Error-Code": "RevisionNotFound"}, b"")
            return
        siblings = [
            {"rfilename": name, "size": repo.sizes.get(name, len(data)), "blobId": "0"}
            for name, data in repo.files.items()
        ]
        body = json.dumps({"id": repo_id, "sha": commit, "siblings": siblings}).encode()
        self._reply(200, {"Content-Type": "application/json"}, body)

    def _file(self, repo: HubRepository, commit: str, name: str, *, has_body: bool) -> None:
        data = repo.files.get(name)
        if data is None or name in repo.absent:
            self._reply(404, {"X-Error-Code": "EntryNotFound"}, b"")
            return
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, total = 200, len(data)
        if (given := self.headers.get("Range")) is not None:
            self.server.ranges.append(given)
            start = int(given.removeprefix("bytes=").partition("-")[0])
            status, data = 206, data[start:]
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        if not has_body:
            self._reply(status, headers, b"", length=len(data))
            return
        cut = self.server.cuts.pop(name, None)
        self._reply(status, headers, data[:cut], length=len(data))
        if cut is not None:
            self.close_connection = True

    def _reply(self, status: int, headers: dict[str, str], body: bytes, *, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


def write_snapshot(
    cache: Path,
    repo_id: str = "org/model",
    *,
    commit: str = COMMIT,
    revision: str | None = "main",
    files: dict[str, bytes] | None = None,
    missing: tuple[str, ...] = (),
) -> Path:
    """Lay out a snapshot as huggingface_hub does, with links to blobs; `missing` are links to blobs that are absent."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for name, data in (FILES if files is None else files).items():
        blob = repo / "blobs" / hashlib.sha256(data + name.encode()).hexdigest()
        link = snapshot / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
        if name not in missing:
            blob.write_bytes(data)
    if revision is not None:
        ref = repo / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    return snapshot
