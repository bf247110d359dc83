"""Strangers at the admin port take what they can of a process with few descriptors, and the work goes on."""

from __future__ import annotations

import resource
import selectors
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.scenarios.processes import Stage
from tests.support import require_tool, wait_until_sync

FILES = 256
"""The process's descriptors."""


@contextmanager
def crowd(port: int, size: int) -> Iterator[list[socket.socket]]:
    """So many connections, each with half a request."""
    taken: list[socket.socket] = []
    try:
        for _ in range(size):
            one = socket.create_connection(("127.0.0.1", port), 10)
            taken.append(one)
            one.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        yield taken
    finally:
        for one in taken:
            one.close()


def dropped(crowd: list[socket.socket]) -> int:
    """How many of them were closed by the other side."""
    with selectors.DefaultSelector() as ready:
        for one in crowd:
            ready.register(one, selectors.EVENT_READ)
        return len(ready.select(0))


def test_half_requests_leave_descriptors_for_redis_gateway_and_files(stage: Stage) -> None:
    world = stage.world(slots=16, seconds=0.05)
    few = (require_tool("prlimit"), f"--nofile={FILES - 100}:{FILES}")
    one = stage.dispatcher(stage.settings(world, max_sys=16), before=few)
    assert resource.prlimit(one.child.pid, resource.RLIMIT_NOFILE) == (FILES, FILES), "all that it may have"
    with crowd(one.admin_port, 400) as strangers:
        wait_until_sync(lambda: dropped(strangers) >= 300, 10, what="most of them to be closed")
        assert len(list(Path(f"/proc/{one.child.pid}/fd").iterdir())) < FILES - 64
        stage.producer.submit(40)
        stage.producer.wait_for_all(timeout_s=20)
        assert one.claim_probe("/livez")[0] == 200
        one.reconfigure(budget={"reserve": 0.1})
        one.wait_for(config_generation=2)
    assert stage.producer.answers() == {"200": 40}
