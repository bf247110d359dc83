"""Clients that open many connections to the admin port cannot use up the descriptors of the process."""

from __future__ import annotations

import resource
import selectors
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.scenarios.processes import Stage
from tests.support import require_tool, wait_until_sync

MAX_DESCRIPTORS = 256
"""Hard limit on the file descriptors of the process."""


@contextmanager
def open_half_requests(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open this number of connections, and send half a request on each."""
    connections: list[socket.socket] = []
    try:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port), 10)
            connections.append(connection)
            connection.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        yield connections
    finally:
        for connection in connections:
            connection.close()


def count_closed(connections: list[socket.socket]) -> int:
    """Return the number of connections that the server has closed."""
    with selectors.DefaultSelector() as ready:
        for connection in connections:
            ready.register(connection, selectors.EVENT_READ)
        return len(ready.select(0))


def test_half_requests_leave_descriptors_for_redis_gateway_and_files(stage: Stage) -> None:
    world = stage.world(slots=16, seconds=0.05)
    limit_descriptors = (require_tool("prlimit"), f"--nofile={MAX_DESCRIPTORS - 100}:{MAX_DESCRIPTORS}")
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=16), command_prefix=limit_descriptors)
    assert resource.prlimit(dispatcher.child.pid, resource.RLIMIT_NOFILE) == (
        MAX_DESCRIPTORS,
        MAX_DESCRIPTORS,
    ), "the soft limit is raised to the hard limit"
    with open_half_requests(dispatcher.admin_port, 400) as connections:
        wait_until_sync(lambda: count_closed(connections) >= 300, 10, what="most of them to be closed")
        assert len(list(Path(f"/proc/{dispatcher.child.pid}/fd").iterdir())) < MAX_DESCRIPTORS - 64
        stage.producer.submit(40)
        stage.producer.wait_for_all(timeout_s=20)
        assert dispatcher.get_probe("/livez")[0] == 200
        dispatcher.reconfigure(budget={"reserve": 0.1})
        dispatcher.wait_for(config_generation=2)
    assert stage.producer.count_results() == {"200": 40}
