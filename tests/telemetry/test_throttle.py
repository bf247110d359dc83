"""The CPU limit for tests limits a process, and ends."""

from __future__ import annotations

import sys
import time

import pytest

from tests.support import running_process, wait_until_sync
from tests.telemetry.throttle import cpu_limit

BUSY_LOOP = "while True: pass"


def read_cpu_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)


@pytest.mark.parametrize("kind", ["cgroup", "signals"])
def test_busy_process_gets_its_share_and_the_whole_cpu_afterwards(kind: str) -> None:
    with running_process(sys.executable, "-c", BUSY_LOOP) as process:
        wait_until_sync(lambda: read_cpu_s(process.pid) > 0.05)
        try:
            with cpu_limit(0.2, kind) as limit:
                limit.limit_process(process.pid)
                began_at, before_s = time.monotonic(), read_cpu_s(process.pid)
                wait_until_sync(lambda: time.monotonic() - began_at > 1.0)
                share = (read_cpu_s(process.pid) - before_s) / (time.monotonic() - began_at)
        except OSError as error:
            pytest.skip(str(error))
        assert share < 0.35
        before_s = read_cpu_s(process.pid)
        wait_until_sync(lambda: read_cpu_s(process.pid) - before_s > 0.3)


def test_limit_of_an_ended_process_can_be_removed() -> None:
    with cpu_limit(0.2, "signals") as limit, running_process(sys.executable, "-c", BUSY_LOOP) as process:
        limit.limit_process(process.pid)
        process.kill()
        process.wait()
