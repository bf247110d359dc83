"""The CPU limit that tests put on processes: what it leaves them, and that it ends."""

from __future__ import annotations

import sys
import time

import pytest

from tests.support import running, wait_until_sync
from tests.telemetry.throttle import cpu_limit

BUSY = "while True: pass"


def cpu_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)


@pytest.mark.parametrize("kind", ["cgroup", "signals"])
def test_busy_process_gets_its_share_and_all_of_it_afterwards(kind: str) -> None:
    with running(sys.executable, "-c", BUSY) as process:
        wait_until_sync(lambda: cpu_s(process.pid) > 0.05)
        try:
            with cpu_limit(0.2, kind) as limit:
                limit.hold(process.pid)
                began_at, before_s = time.monotonic(), cpu_s(process.pid)
                wait_until_sync(lambda: time.monotonic() - began_at > 1.0)
                share = (cpu_s(process.pid) - before_s) / (time.monotonic() - began_at)
        except OSError as error:
            pytest.skip(str(error))
        assert share < 0.35
        before_s = cpu_s(process.pid)
        wait_until_sync(lambda: cpu_s(process.pid) - before_s > 0.3)


def test_process_that_has_ended_is_no_trouble() -> None:
    with cpu_limit(0.2, "signals") as limit, running(sys.executable, "-c", BUSY) as process:
        limit.hold(process.pid)
        process.kill()
        process.wait()
