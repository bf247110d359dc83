"""HTTP model server that keeps a running total for each sequence, behind one address with several servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from threading import Lock

from dispatcher.requests.headers import AFFINITY_TOKEN
from tests.scenarios.http_server import run_http_server

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

    def answer(body: bytes, headers: Message) -> tuple[int, dict[str, str], bytes]:
        request = json.loads(body)
        indexes, values = (tensor["data"] for tensor in request["inputs"])
        ids, starts, _ = (
            each if isinstance(each, list) else [each]
            for each in (request["parameters"][f"sequence_{name}"] for name in ("id", "start", "end"))
        )
        server.item_counts.append(len(ids))
        if len(ids) != len(set(ids)):
            server.errors.append(f"two turns of a sequence in one call: {ids}")
        token = headers.get(AFFINITY_TOKEN) or str(len(server.item_counts) % len(models))
        model = models[int(token)]
        with model.lock:
            time.sleep(CALL_S + ITEM_S * len(ids))
            totals = [
                model.add_value(*item, server.errors)
                for item in zip(ids, indexes, values, starts, strict=True)
            ]
        output = {"name": "total", "datatype": "INT64", "shape": [len(totals)], "data": totals}
        return 200, {AFFINITY_TOKEN: token}, json.dumps({"outputs": [output]}).encode()

    with run_http_server(answer) as url:
        server = StatefulServer(url)
        yield server
