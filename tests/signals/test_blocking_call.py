"""A blocking call that hangs holds up nothing but its own next run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from dispatcher.signals.blocking_call import BlockingCalls, StillRunningError
from tests.support import wait_until


async def test_the_call_runs_beside_the_loop() -> None:
    assert await BlockingCalls("t").run(threading.get_ident, 5) != threading.get_ident()


async def test_what_the_call_raises_is_raised() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await BlockingCalls("t").run(fail, 5)


async def test_a_hanging_call_is_not_joined_by_a_second() -> None:
    calls, let_go = BlockingCalls("t"), threading.Event()
    with pytest.raises(TimeoutError):
        await calls.run(let_go.wait, 0.05)
    with pytest.raises(StillRunningError, match="hanging for 0 s"):
        await calls.run(let_go.wait, 0.05)
    let_go.set()

    async def free_again() -> bool:
        try:
            return await calls.run(lambda: True, 5)
        except StillRunningError:
            return False

    await wait_until(free_again, what="the thread came back")


async def test_a_cancelled_wait_leaves_the_thread_behind() -> None:
    calls, let_go, started = BlockingCalls("t"), threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        let_go.wait()

    waiting = asyncio.create_task(calls.run(call, 60))
    await wait_until(started.is_set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(StillRunningError):
        await calls.run(call, 5)
    let_go.set()


def test_a_process_ends_while_a_call_hangs() -> None:
    """The interpreter joins an executor's threads at its end; this one it leaves behind."""
    script = """
import asyncio, contextlib, time
from dispatcher.signals.blocking_call import BlockingCalls

async def main():
    with contextlib.suppress(TimeoutError):
        await BlockingCalls("t").run(lambda: time.sleep(600), 0.05)

asyncio.run(main())
print("ended")
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"ended\n"
    assert done.stderr == b""
    assert time.monotonic() - began < 60
