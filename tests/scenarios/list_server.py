"""Stand-in server for list calls as a process, and its answers to single calls."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dispatcher.lab.standin.list_models import parse_call
from tests.support import running_process

DIMS = 8


class ListServer:
    def __init__(self, url: str) -> None:
        self.url = url

    def control(self, **changes: Any) -> None:
        request = urllib.request.Request(f"{self.url}/control", json.dumps(changes).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def observed(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/observed", timeout=10) as answer:
            observed: dict[str, Any] = json.load(answer)
        return observed


@contextmanager
def run_list_server(**config: Any) -> Iterator[ListServer]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in config.items()]
    command = [sys.executable, "-m", "dispatcher.lab.standin.lists", *options]
    with running_process(*command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield ListServer(json.loads(process.stdout.readline())["url"])


def answer_alone(path: str, body: bytes, model: str = "m") -> Any:
    """Return the normalized answer of the server to this body, sent as a call of its own."""
    answer = parse_call(path, body, model=model, dims=DIMS, index_last=True).make_answer(False)
    return normalize_answer(json.loads(json.dumps(answer)))


def normalize_answer(answer: Any) -> Any:
    """Remove `usage`, which merged calls divide among their members, and sort items by index.

    A server that shuffles does not return items in order.
    """
    if not isinstance(answer, dict):
        return answer
    normalized = {name: value for name, value in answer.items() if name not in ("usage", "meta")}
    for name in {"data", "results"} & normalized.keys():
        normalized[name] = sorted(normalized[name], key=lambda item: item["index"])
    return normalized
