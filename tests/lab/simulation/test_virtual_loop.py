"""Time, order and sockets of the event loop in virtual time, with the asyncio of this version of Python."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from dispatcher.lab.simulation.virtual_loop import StuckError, VirtualLoop, run_in_virtual_time


@pytest.mark.parametrize("name", ["_run_once", "_add_callback", "_process_events", "_write_to_self"])
def test_asyncio_has_the_methods_that_the_loop_replaces_or_calls(name: str) -> None:
    assert callable(getattr(asyncio.SelectorEventLoop, name, None)), f"adapt VirtualLoop to another {name}"


def test_timers_run_in_the_order_of_their_times_and_then_of_their_creation() -> None:
    found: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def note(name: str) -> Callable[[], None]:
            return lambda: found.append((name, loop.time()))

        loop.call_later(7200, note("late"))
        for name in "abcdefgh":
            loop.call_later(3600, note(name))
        loop.call_later(60, note("cancelled")).cancel()
        await asyncio.sleep(7200)

    run_in_virtual_time(main(), start=100.0)
    assert found == [*((name, 3700.0) for name in "abcdefgh"), ("late", 7300.0)]


def test_time_does_not_advance_while_callbacks_are_ready() -> None:
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main(), start=5.0) == 5.0


def test_stalled_loop_is_late() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_soon(loop.stall_loop, 3.0)
        await asyncio.sleep(1.0)
        return loop.time()

    assert run_in_virtual_time(main()) == 3.0


def test_sockets_are_read_when_nothing_else_is_to_be_done() -> None:
    async def main() -> bytes:
        ours, other = socket.socketpair()
        with ours, other:
            ours.setblocking(False)
            other.send(b"hello")
            return await asyncio.get_running_loop().sock_recv(ours, 10)

    assert run_in_virtual_time(main()) == b"hello"


def test_tasks_that_would_wait_without_end_are_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StuckError):
        run_in_virtual_time(main())


def test_loop_runs_again_after_it_was_stopped() -> None:
    loop = VirtualLoop()
    try:
        for expected in (1.0, 2.0):
            loop.run_until_complete(asyncio.sleep(1.0))
            assert loop.time() == expected
    finally:
        loop.close()
