"""A server that answers what ``huggingface_hub`` asks the Hub when a data set is uploaded, all in memory.

It keeps what it is given as the Hub does: contents of large files by digest, whether committed or not;
commits with a tree; branches and tags. Routes and forms are those that the client's source has
(``hf_api.py``, ``_commit_api.py``, ``lfs.py``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_ofthetest"
ATTRIBUTES = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
Tree = dict[str, bytes]


@dataclass
class Repository:
    """One repository: trees by commit id, branches and tags by name."""

    private: bool
    commits: dict[str, Tree] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: Tree, message: str) -> str:
        self.messages.append(message)
        text = repr(
            (self.messages, sorted((name, hashlib.sha1(blob).digest()) for name, blob in tree.items()))
        )
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = tree
        self.branches[branch] = oid
        return oid

    def tree(self, revision: str) -> Tree:
        return self.commits[self.branches.get(revision) or self.tags.get(revision) or revision]

    def files(self, revision: str) -> Tree:
        """What somebody put there, without the Hub's own file."""
        return {name: blob for name, blob in self.tree(revision).items() if name != ".gitattributes"}


@dataclass
class Hub:
    """The state of the server, and what was asked of it.

    Attributes:
        user: Whose token :data:`TOKEN` is.
        writable: Organisations that the user may write to.
        before_put: Called with the number of the upload of a large file before it is taken.
        hidden: Repositories that the user may not see.
        forget: A path that commits leave out, as if it were ignored.
        requests: Method and path of each.
    """

    user: str = "ada"
    writable: tuple[str, ...] = ("ada", "lab")
    before_put: Callable[[int], None] = lambda number: None
    hidden: tuple[str, ...] = ()
    forget: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    puts: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def create(self, name: str, private: bool, files: Tree | None = None) -> Repository:
        repository = self.repositories[name] = Repository(private)
        repository.commit("main", {".gitattributes": ATTRIBUTES, **(files or {})}, "initial commit")
        return repository


class Answer(Exception):
    """Ends a request with a status, and a code that the client understands."""

    def __init__(self, status: int, message: str = "", code: str = "") -> None:
        self.status, self.message, self.code = status, message, code


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith(".parquet")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
        body = self._body()
        status, content, headers = 200, b"{}", {}
        try:
            content = json.dumps(self._route(path, body)).encode()
        except Answer as answer:
            status = answer.status
            content = json.dumps({"error": answer.message}).encode()
            headers = {"X-Error-Code": answer.code, "X-Error-Message": answer.message}
        try:
            self.send_response(status)
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the client is dead
            self.close_connection = True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _route(self, path: str, body: bytes) -> Any:
        hub = self.hub
        if path.startswith("/large/"):  # signed links need no token
            return self._put(path.removeprefix("/large/"), body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Answer(401, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            return {"type": "user", "name": hub.user, "orgs": [{"name": name} for name in hub.writable[1:]]}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._require(match[1])
            return self._batch(json.loads(body))
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/([\w-]+)(?:/(.+))?)?", path):
            name, action, revision = match.groups()
            return self._repository(name, action or "revision", revision or "main", body)
        raise Answer(404, f"the test's hub does not know {self.command} {path}")

    def _create(self, wanted: dict[str, Any]) -> Any:
        name = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] not in self.hub.writable:
            raise Answer(403, f"You don't have the rights to create a dataset under {wanted['organization']}")
        if name in self.hub.repositories:
            raise Answer(409, "You already created this dataset repo")
        assert wanted["type"] == "dataset"
        # Versions of the client say it in one way or the other; neither means public.
        private = wanted.get("private", False) or wanted.get("visibility") == "private"
        self.hub.create(name, bool(private))
        return {"url": f"{self.hub.url}/datasets/{name}"}

    def _require(self, name: str) -> Repository:
        if name not in self.hub.repositories or name in self.hub.hidden:
            raise Answer(404, "Repository not found", "RepoNotFound")
        return self.hub.repositories[name]

    def _repository(self, name: str, action: str, revision: str, body: bytes) -> Any:
        repository = self._require(name)
        if action in ("preupload", "commit", "tag", "branch") and name.split("/")[0] not in self.hub.writable:
            raise Answer(403, "You don't have write access to this repository")
        if action == "revision":
            sha = repository.branches.get(revision, revision)
            return {"id": name, "sha": sha, "private": repository.private, "tags": [], "siblings": []}
        if action == "refs":
            kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags)}
            return {"converts": []} | {
                kind: [
                    {"name": ref, "ref": f"refs/{path}/{ref}", "targetCommit": oid}
                    for ref, oid in refs.items()
                ]
                for kind, (path, refs) in kinds.items()
            }
        if action == "tree":
            return [_entry(path, blob) for path, blob in sorted(repository.tree(revision).items())]
        if action == "branch":
            start = json.loads(body).get("startingPoint", "main") if body else "main"
            repository.branches[revision] = repository.branches.get(start, start)
            return {}
        if action == "tag":
            tag = json.loads(body)["tag"]
            if tag in repository.tags:
                raise Answer(409, "Tag already exists")
            repository.tags[tag] = repository.branches.get(revision, revision)
            return {}
        if action == "preupload":
            tree = repository.tree(revision)
            return {"files": [_mode(one["path"], tree) for one in json.loads(body)["files"]]}
        if action == "commit":
            return self._commit(name, repository, revision, body)
        raise Answer(404, f"the test's hub does not know {action}")

    def _commit(self, name: str, repository: Repository, branch: str, body: bytes) -> Any:
        tree, message = dict(repository.tree(branch)), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit", repository.branches[branch]) != repository.branches[branch]:
                    raise Answer(412, "A commit has happened since. Please refresh and try again.")
            elif line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                tree[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del tree[value["path"]]
        tree.pop(self.hub.forget, None)
        oid = repository.commit(branch, tree, message)
        return {
            "commitUrl": f"{self.hub.url}/datasets/{name}/commit/{oid}",
            "commitOid": oid,
            "success": True,
        }

    def _batch(self, wanted: dict[str, Any]) -> Any:
        assert wanted["operation"] == "upload"
        return {
            "transfer": "basic",
            "objects": [
                one
                if one["oid"] in self.hub.large
                else one | {"actions": {"upload": {"href": f"{self.hub.url}/large/{one['oid']}"}}}
                for one in wanted["objects"]
            ],
        }

    def _put(self, oid: str, body: bytes) -> Any:
        with self.hub.lock:
            self.hub.puts += 1
            number = self.hub.puts
        self.hub.before_put(number)
        if hashlib.sha256(body).hexdigest() != oid:
            raise Answer(400, "the content is not what its digest says")
        self.hub.large[oid] = body
        return {}


def _mode(path: str, tree: Tree) -> dict[str, Any]:
    mode = {"path": path, "uploadMode": "lfs" if is_large(path) else "regular", "shouldIgnore": False}
    if path in tree:
        mode["oid"] = hashlib.sha256(tree[path]).hexdigest() if is_large(path) else blob_id(tree[path])
    return mode


def _entry(path: str, blob: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(blob), "oid": blob_id(blob)}
    if is_large(path):
        entry["lfs"] = {"oid": hashlib.sha256(blob).hexdigest(), "size": len(blob), "pointerSize": 130}
    return entry


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers on a port of this machine while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
