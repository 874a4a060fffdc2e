"""Stands for Argilla's server, which needs Elasticsearch: accepts what the real client sends, and keeps it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

TIMES = {"inserted_at": "2026-11-27T00:00:00", "updated_at": "2026-11-27T00:00:00"}
USER, WORKSPACE, DATASET = (str(uuid4()) for _ in range(3))


class Server(ThreadingHTTPServer):
    """`sent` has the path and the body of each request that changes something."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sent: list[tuple[str, Any]] = []
        self.dataset: dict[str, Any] = {}
        self.parts: dict[str, list[Any]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def records(self) -> list[dict[str, Any]]:
        return [item for path, body in self.sent if "/records/bulk" in path for item in body["items"]]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        workspace = {"id": WORKSPACE, "name": "labels", **TIMES}
        known: dict[str, Any] = {
            "me": {"id": USER, "username": "ann", "role": "owner", "first_name": "Ann", "last_name": None, **TIMES},
            "workspaces": {"items": [workspace]},
            "datasets": {"items": []},
            WORKSPACE: workspace,
            DATASET: self.server.dataset,
        }
        last = path.split("/")[-1]
        self._send(known[last] if last in known else {"items": self.server.parts.get(last, [])})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        self.server.sent.append((self.path, body))
        last = self.path.split("/")[-1]
        if "/records/bulk" in self.path:
            items = [item | {"id": str(uuid4()), "status": "pending"} for item in body["items"]]
            self._send({"items": items, "updated_item_ids": []})
        elif last == "datasets":
            self.server.dataset = {**body, "id": DATASET, "workspace_id": WORKSPACE, **TIMES}
            self._send(self.server.dataset)
        elif last in (DATASET, "publish"):
            self._send(self.server.dataset)
        else:
            part = {**body, "id": str(uuid4()), "dataset_id": DATASET}
            self.server.parts.setdefault(last, []).append(part)
            self._send(part)

    do_PUT = do_PATCH = do_POST

    def _send(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def serve() -> Server:
    """Starts a server in a thread of this process."""
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
