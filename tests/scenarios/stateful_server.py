"""HTTP model server that keeps a running total for each sequence, behind one address with several servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from dispatcher.requests.headers import AFFINITY_TOKEN

CALL_S, ITEM_S = 0.005, 0.0001
"""Duration of a call, and of each of its items. A server runs one call at a time."""


@dataclass
class _SequenceState:
    last_index: int = -1
    total: int = 0


class _ModelServer:
    """One model server. It recognizes an item that it gets a second time by its index."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.states: dict[str, _SequenceState] = {}

    def add_value(self, name: str, index: int, value: int, is_first: bool, errors: list[str]) -> int:
        if is_first:
            self.states[name] = _SequenceState()
        state = self.states.get(name)
        if state is None:
            errors.append(f"{name}: turn {index} reached a server without its state")
            return -1
        if index > state.last_index + 1:
            errors.append(f"{name}: turn {index} after turn {state.last_index}")
        if index > state.last_index:
            state.last_index, state.total = index, state.total + value
        return state.total


@dataclass
class StatefulServer:
    url: str
    item_counts: list[int] = field(default_factory=list)
    """Number of items of each call, in the order of arrival."""
    errors: list[str] = field(default_factory=list)


@contextmanager
def run_stateful_server(servers: int) -> Iterator[StatefulServer]:
    """Run the server on a free port for the duration of the block."""
    models = [_ModelServer() for _ in range(servers)]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            indexes, values = (tensor["data"] for tensor in body["inputs"])
            ids, starts, _ = (
                each if isinstance(each, list) else [each]
                for each in (body["parameters"][f"sequence_{name}"] for name in ("id", "start", "end"))
            )
            server.item_counts.append(len(ids))
            if len(ids) != len(set(ids)):
                server.errors.append(f"two turns of a sequence in one call: {ids}")
            token = self.headers.get(AFFINITY_TOKEN) or str(len(server.item_counts) % len(models))
            model = models[int(token)]
            with model.lock:
                time.sleep(CALL_S + ITEM_S * len(ids))
                totals = [
                    model.add_value(*item, server.errors)
                    for item in zip(ids, indexes, values, starts, strict=True)
                ]
            output = {"name": "total", "datatype": "INT64", "shape": [len(totals)], "data": totals}
            self.answer(json.dumps({"outputs": [output]}).encode(), token)

        def answer(self, body: bytes, token: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header(AFFINITY_TOKEN, token)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.daemon_threads = True
        server = StatefulServer(f"http://127.0.0.1:{http_server.server_address[1]}")
        thread = Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            http_server.shutdown()
            thread.join()
