"""HTTP model server for embeddings, which records the number of items of each call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.features.merging.embedding_gateway import build_answer


@dataclass
class EmbeddingServer:
    url: str
    item_counts: list[int] = field(default_factory=list)
    """Number of items of each call, in the order of arrival."""


@contextmanager
def run_embedding_server() -> Iterator[EmbeddingServer]:
    """Run the server on a free port for the duration of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            texts = request["input"] if isinstance(request["input"], list) else [request["input"]]
            server.item_counts.append(len(texts))
            body = build_answer(texts, request["model"])
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.daemon_threads = True
        server = EmbeddingServer(f"http://127.0.0.1:{http_server.server_address[1]}")
        thread = Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            http_server.shutdown()
            thread.join()
