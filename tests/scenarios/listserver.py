"""The stand-in for list calls as a process, and what it would answer to one body alone."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dispatcher.lab.standin.list_models import parse_call
from tests.support import running

DIMS = 8


class ListProcess:
    def __init__(self, url: str) -> None:
        self.url = url

    def control(self, **changes: Any) -> None:
        asked = urllib.request.Request(f"{self.url}/control", json.dumps(changes).encode(), method="POST")
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.status == 200

    def observed(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/observed", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def list_server(**config: Any) -> Iterator[ListProcess]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in config.items()]
    command = [sys.executable, "-m", "dispatcher.lab.standin.lists", *options]
    with running(*command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield ListProcess(json.loads(process.stdout.readline())["url"])


def alone(path: str, body: bytes, model: str = "m") -> Any:
    """What it answers to this body alone, as `comparable` has it."""
    answer = parse_call(path, body, model=model, dims=DIMS, index_last=True).make_answer(False)
    return comparable(json.loads(json.dumps(answer)))


def comparable(answer: Any) -> Any:
    """Less `usage`, which is shared out where calls are merged; in the order of the items' numbers, which a
    server that shuffles does not keep."""
    if not isinstance(answer, dict):
        return answer
    kept = {name: value for name, value in answer.items() if name not in ("usage", "meta")}
    for name in {"data", "results"} & kept.keys():
        kept[name] = sorted(kept[name], key=lambda item: item["index"])
    return kept
