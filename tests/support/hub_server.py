"""A Hugging Face Hub on loopback: the part of its protocol that publishing models and reading data sets takes.

    with HubServer() as hub:            # hub.endpoint for HF_ENDPOINT, hub.token for HF_TOKEN
        hub.add_dataset("org/name", {"a.csv": b"..."})
        ...
        hub.repos["org/name"].commits   # what really happened

Repositories live in memory, those of data sets as "datasets/org/name". `hub.fault` is asked before every request and
may answer a status (or "drop" to cut the connection) instead of the server; `hub.after` may cut it once the work is
done, so that only the answer is lost.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from trainer_lib.base.yaml_text import YamlProblem, parse_yaml

LFS_SUFFIXES = (".safetensors", ".parquet", ".bin")
LFS_BYTES = 1 << 20
Fault = Callable[[str, str], "int | str | None"]


@dataclass(frozen=True)
class Blob:
    data: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        """git's name of it; for a large file that of the pointer file which stands for it."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        stored = pointer.encode() if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid


@dataclass(frozen=True)
class Commit:
    sha: str
    summary: str
    description: str
    files: dict[str, Blob]


@dataclass
class Repo:
    private: bool
    commits: list[Commit] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)

    def add(self, branch: str, summary: str, description: str, files: dict[str, Blob]) -> Commit:
        seed = f"{len(self.commits)} {summary} {sorted((path, blob.oid) for path, blob in files.items())}"
        commit = Commit(hashlib.sha1(seed.encode()).hexdigest(), summary, description, files)
        self.commits.append(commit)
        self.branches[branch] = commit.sha
        return commit

    def at(self, revision: str) -> Commit | None:
        sha = self.branches.get(revision, revision)
        return next((commit for commit in self.commits if commit.sha == sha), None)


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True


class HubServer:
    def __init__(self) -> None:
        self.token = "hf_" + "t" * 30  # made up
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fault: Fault = lambda method, path: None
        self.after: Fault = lambda method, path: None
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="hub server")

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add_dataset(self, name: str, files: dict[str, bytes]) -> Commit:
        """Commit these files, and no others, to the data set "organisation/name"."""
        repo = self.repos.setdefault(f"datasets/{name}", Repo(private=False))
        blobs = {path: Blob(data, lfs=path.endswith(LFS_SUFFIXES)) for path, data in files.items()}
        return repo.add("main", "data", "", blobs)

    def uploads(self) -> int:
        """Large files received so far."""
        return sum(method == "PUT" for method, _ in self.requests)


class _Error(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message or code)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, path))
        fault = self.hub.fault(self.command, path)
        if fault is not None:
            self._broken(fault)
            return
        try:
            status, headers, data = self._route([unquote(part) for part in path.strip("/").split("/")], body)
        except _Error as error:
            status, data = error.status, json.dumps({"error": str(error)}).encode()
            headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
        if (fault := self.hub.after(self.command, path)) is not None:
            self._broken(fault)
            return
        self._answer(status, headers, data)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _broken(self, fault: int | str) -> None:
        if isinstance(fault, int):
            self._answer(fault, {}, b'{"error": "injected"}')
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _route(self, parts: list[str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        match [self.command, *parts]:
            case ["PUT", "lfs", oid]:
                return self._put(oid, body)  # signed addresses carry no token
            case ["POST", "lfs", oid, "verify"]:
                return self._json({} if oid in self.hub.objects else _raise(404, "", "no such object"))
            case ["POST", "api", "validate-yaml"]:  # anybody may ask, and the vendor's own cards do without a token
                return self._validate(json.loads(body)["content"])
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise _Error(401, "", "Invalid credentials")
        match [self.command, *parts]:
            case ["POST", "api", "repos", "create"]:
                return self._create(json.loads(body))
            case ["POST", org, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                self._repo(f"{org}/{name.removesuffix('.git')}")
                return self._batch(json.loads(body)["objects"])
            case ["GET" | "HEAD", *address] if "resolve" in address[2:4]:
                return self._resolve(address)
            case ["GET" | "POST", "api", "models", org, name, *rest]:
                return self._repository(f"{org}/{name}", rest or ["revision", "main"], body)
            case ["GET", "api", "datasets", org, name, *rest]:
                return self._repository(f"datasets/{org}/{name}", rest or ["revision", "main"], body)
        raise _Error(404, "", f"not served here: {self.command} {self.path}")

    def _repository(self, repo_id: str, parts: list[str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        repo = self._repo(repo_id)
        match [self.command, *parts]:
            case ["POST", "preupload", revision]:
                return self._preupload(repo, revision, json.loads(body)["files"])
            case ["POST", "branch", branch]:
                return self._branch(repo, branch)
            case ["POST", "commit", revision]:
                return self._commit(repo_id, repo, revision, body)
            case ["GET", "revision", revision]:
                return self._info(repo_id, repo, revision)
            case ["GET", "tree", revision, *folder]:
                return self._tree(repo, revision, "/".join(folder))
        raise _Error(404, "", f"not served here: {self.command} {self.path}")

    def _repo(self, repo_id: str) -> Repo:
        return self.hub.repos.get(repo_id) or _raise(404, "RepoNotFound", "Repository not found")

    @staticmethod
    def _json(value: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
        return status, {}, json.dumps(value).encode()

    def _create(self, wanted: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            return self._json(url | {"error": "You already created this model repo"}, 409)
        repo = self.hub.repos[repo_id] = Repo(
            private=wanted.get("visibility") == "private" or bool(wanted.get("private"))
        )
        repo.add("main", "initial commit", "", {".gitattributes": Blob(b"*.safetensors filter=lfs\n", lfs=False)})
        return self._json(url)

    def _validate(self, readme: str) -> tuple[int, dict[str, str], bytes]:
        try:
            head = parse_yaml(readme.split("---\n")[1]) if readme.startswith("---\n") else {}
            assert isinstance(head, dict)
        except (YamlProblem, IndexError, AssertionError) as error:
            return self._json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return self._json({"errors": [], "warnings": []})

    def _preupload(self, repo: Repo, revision: str, files: list[dict[str, Any]]) -> tuple[int, dict[str, str], bytes]:
        commit = repo.at(revision) or _raise(404, "RevisionNotFound", "Invalid rev id")
        modes = []
        for file in files:
            large = file["size"] > LFS_BYTES or file["path"].endswith(LFS_SUFFIXES)
            known = commit.files.get(file["path"])
            modes.append(
                {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                | ({"oid": known.oid} if known else {})
            )
        return self._json({"files": modes})

    def _batch(self, objects: list[dict[str, Any]]) -> tuple[int, dict[str, str], bytes]:
        answers = []
        for wanted in objects:
            answer: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                href = f"{self.hub.endpoint}/lfs/{wanted['oid']}"
                answer["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            answers.append(answer)
        return self._json({"transfer": "basic", "objects": answers})

    def _put(self, oid: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Error(400, "", "digest mismatch")
        self.hub.objects[oid] = body
        return self._json({})

    def _branch(self, repo: Repo, branch: str) -> tuple[int, dict[str, str], bytes]:
        if branch in repo.branches:
            return self._json({"error": "Reference already exists"}, 409)
        repo.branches[branch] = repo.branches["main"]
        return self._json({})

    def _commit(self, repo_id: str, repo: Repo, revision: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        head = repo.at(revision) or _raise(404, "RevisionNotFound", "Invalid rev id")
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit", head.sha) != head.sha:
            raise _Error(412, "", "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
                case "lfsFile":
                    data = self.hub.objects.get(value["oid"])
                    files[value["path"]] = Blob(_raise(400, "", "object missing") if data is None else data, lfs=True)
                case "deletedFile":
                    del files[value["path"]]
        commit = repo.add(revision, header["summary"], header["description"], files)
        return self._json({"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{commit.sha}", "commitOid": commit.sha})

    def _info(self, repo_id: str, repo: Repo, revision: str) -> tuple[int, dict[str, str], bytes]:
        commit = repo.at(revision) or _raise(404, "RevisionNotFound", "Invalid rev id")
        names = [{"rfilename": path} for path in sorted(commit.files)]
        return self._json(
            {"id": repo_id, "sha": commit.sha, "private": repo.private, "tags": repo.tags, "siblings": names}
        )

    def _tree(self, repo: Repo, revision: str, folder: str) -> tuple[int, dict[str, str], bytes]:
        commit = repo.at(revision) or _raise(404, "RevisionNotFound", "Invalid rev id")
        below = f"{folder}/" if folder else ""
        inside = {path: blob for path, blob in sorted(commit.files.items()) if path.startswith(below)}
        if not inside:  # of a file as well
            raise _Error(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        folders = {path[:end] for path in inside for end in range(len(below), len(path)) if path[end] == "/"}
        items: list[dict[str, Any]] = [{"type": "directory", "path": path, "oid": "0", "size": 0} for path in folders]
        items += [_listed(path, blob) for path, blob in inside.items()]
        if parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() != "true":
            items = [item for item in items if "/" not in item["path"][len(below) :]]
        return self._json(sorted(items, key=lambda item: str(item["path"])))

    def _resolve(self, address: list[str]) -> tuple[int, dict[str, str], bytes]:
        at = address.index("resolve")
        repo, revision, path = self._repo("/".join(address[:at])), address[at + 1], "/".join(address[at + 2 :])
        commit = repo.at(revision) or _raise(404, "RevisionNotFound", "Invalid rev id")
        blob = commit.files.get(path) or _raise(404, "EntryNotFound", "Entry not found")
        headers = {"ETag": f'"{blob.etag}"', "X-Repo-Commit": commit.sha, "Content-Type": "application/octet-stream"}
        start, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        return (206, headers, blob.data[int(start) : int(end) + 1]) if start and end else (200, headers, blob.data)


class ImpatientTime:
    """The time module for a client that pauses seconds between its own retries."""

    sleep = staticmethod(lambda seconds: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def _listed(path: str, blob: Blob) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid}
    if blob.lfs:
        item["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}
    return item


def _raise(status: int, code: str, message: str) -> Any:
    raise _Error(status, code, message)


@pytest.fixture
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server of its own for the test, with the environment pointing at it but without its token."""
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        # huggingface_hub pauses 1, 2, 4, 8, 8 s between its own tries of a request that failed.
        monkeypatch.setattr("huggingface_hub.utils._http.time", ImpatientTime())
        yield server


@pytest.fixture
def hub(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The server, with its token in the environment too."""
    monkeypatch.setenv("HF_TOKEN", hub_server.token)
    return hub_server
