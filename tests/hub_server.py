"""A server that answers the Hugging Face hub's client as the hub does: one model, and which files were downloaded."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.serving import serving

NAME = "owner/tiny"
COMMIT, LATER = "a1" * 20, "b2" * 20


@dataclass
class Hub:
    """`main` is the commit that the branch of this name is at; every commit has the same files."""

    url: str
    main: str = COMMIT
    downloads: Counter[str] = field(default_factory=Counter)  # of each file
    revisions: set[str] = field(default_factory=set)  # that were asked for by name

    def reach(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Let this process ask this hub, and keep what it downloads in `cache`."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", self.url)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def environment(self, cache: Path) -> dict[str, str]:
        """What `reach` does, for processes that are still to be started."""
        return {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(cache)}


@contextmanager
def serve(model: Path) -> Iterator[Hub]:
    """A hub with the model of this folder under `NAME`."""
    contents = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    tree = [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in contents.items()
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{NAME}/tree/"):
                self.answer(json.dumps(tree).encode(), hub.main)
            elif path.startswith(f"/api/models/{NAME}"):
                hub.revisions.add(path.rpartition("/revision/")[2])
                self.answer(json.dumps({"id": NAME, "modelId": NAME, "sha": hub.main}).encode(), hub.main)
            elif path.startswith(f"/{NAME}/resolve/") and path.split("/")[5] in contents:
                commit, name = path.split("/")[4:6]
                hub.downloads[name] += self.command == "GET"
                self.answer(contents[name], commit)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def answer(self, body: bytes, commit: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        hub = Hub(f"http://127.0.0.1:{server.server_port}")
        yield hub
