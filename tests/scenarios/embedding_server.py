"""A model server for embeddings behind HTTP, which keeps how long each list was that it was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.dispatch.embedder import answer


@dataclass
class EmbeddingServer:
    url: str
    lists: list[int] = field(default_factory=list)
    """Items of each call, in the order in which they came."""


@contextmanager
def embedding_server() -> Iterator[EmbeddingServer]:
    """On a free port, for as long as it is used."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
            served.lists.append(len(texts))
            body = answer(texts, asked["model"])
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as listening:
        listening.daemon_threads = True
        served = EmbeddingServer(f"http://127.0.0.1:{listening.server_address[1]}")
        thread = Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield served
        finally:
            listening.shutdown()
            thread.join()
