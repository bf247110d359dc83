"""The memory of all answers together is bounded, and every answer is eventually read."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from dispatcher.gateway.buffers import AnswerBuffer, AnswerBufferPool
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.gateway.transport import READ_AHEAD_BYTES, READ_BYTES
from dispatcher.requests.outcomes.outcome import Delivered, Failed, TooLate
from tests.gateway.scripted_server import Connection, Script, always, forward, serving
from tests.support import wait_until

MakeGateway = Callable[..., HttpGateway]
MB = 1_000_000


def chunked(connection: Connection, body: bytes) -> None:
    connection.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for start in range(0, len(body), 100_000):
        piece = body[start : start + 100_000]
        connection.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    connection.writer.write(b"0\r\n\r\n")


@pytest.mark.slow
@pytest.mark.serial  # 512 connections are opened at once, within the time that each may take
@pytest.mark.parametrize("form", ["length", "chunked"])
async def test_512_answers_of_a_megabyte_stay_within_the_bound_and_all_arrive(
    gateway_to: MakeGateway, form: str
) -> None:
    body = b"x" * MB
    places = asyncio.Semaphore(64)
    """Requests at the gateway. A busy machine could not open 512 connections in time."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.receive()
            if form == "length":
                await connection.answer(body)
            else:
                chunked(connection, body)
                await connection.writer.drain()

    async with serving(script) as server:
        gateway = gateway_to(server.url, max_response_bytes=4 * MB, max_buffered_bytes=20 * MB)
        highest = 0

        async def one() -> bool:
            nonlocal highest
            async with places:
                forwarded = await forward(gateway, within_s=3600.0)
            assert forwarded.memory is not None, forwarded.outcome
            highest = max(highest, gateway.buffers.used_bytes)
            await asyncio.sleep(0)  # like a queue that stores the result
            forwarded.memory.free_share()
            return forwarded.outcome == Delivered(200, body)

        assert all(await asyncio.gather(*(one() for _ in range(512))))
    print(f"{form}: {highest / MB:.1f} MB held at the most")
    assert highest <= 20 * MB
    assert gateway.buffers.used_bytes == 0


async def test_answer_is_read_although_others_use_all_memory(gateway_to: MakeGateway) -> None:
    """The first answers keep their memory, because their results cannot be written yet."""
    async with serving(always(body=b"x" * MB)) as server:
        gateway = gateway_to(server.url, max_response_bytes=MB, max_buffered_bytes=2 * MB)
        first, second = await forward(gateway), await forward(gateway)
        assert (first.outcome, second.outcome) == (Delivered(200, b"x" * MB),) * 2
        assert gateway.buffers.used_bytes == 2 * MB
        third = asyncio.create_task(forward(gateway))
        await wait_until(lambda: len(server.received) == 3, what="the third")
        for _ in range(100):
            await asyncio.sleep(0)
        assert not third.done(), "the bound is kept"
        wire = gateway._transports.current
        assert wire is not None
        (connection,) = wire.connector._acquired
        assert connection._payload is not None
        ahead = connection._payload.total_bytes
        assert 0 < ahead <= 2 * READ_AHEAD_BYTES + 2 * READ_BYTES, "the answer is not read beyond it"
        assert second.memory is not None
        second.memory.free_share()
        assert (await third).outcome == Delivered(200, b"x" * MB)


@pytest.mark.parametrize(("deadline_s", "timeout_s", "expected"), [(1.5, 300.0, TooLate), (30.0, 1.5, None)])
async def test_time_without_memory_counts_for_the_deadline_but_not_for_the_timeout(
    gateway_to: MakeGateway, deadline_s: float, timeout_s: float, expected: type | None
) -> None:
    async with serving(always(body=b"x" * MB)) as server:
        gateway = gateway_to(server.url, max_response_bytes=MB, max_buffered_bytes=MB, timeout_s=timeout_s)
        first = await forward(gateway)
        waiting = asyncio.create_task(forward(gateway, within_s=deadline_s))
        await wait_until(lambda: len(server.received) == 2, what="the second")
        if expected is None:
            await asyncio.sleep(1.3 * timeout_s)  # this time passes and ends no attempt
            assert first.memory is not None
            first.memory.free_share()
            assert (await waiting).outcome == Delivered(200, b"x" * MB)
        else:
            assert isinstance((await waiting).outcome, expected)
            assert gateway.buffers.used_bytes == MB


async def test_attempt_without_an_answer_uses_no_memory(gateway_to: MakeGateway) -> None:
    async def cut(connection: Connection) -> None:
        await connection.receive()
        connection.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf")
        await connection.writer.drain()
        if connection.number:
            await connection.server.go_on.wait()

    async with serving(cut) as server:
        gateway = gateway_to(server.url)
        assert isinstance((await forward(gateway)).outcome, Failed)
        assert gateway.buffers.used_bytes == 0
        running = asyncio.create_task(forward(gateway))
        await wait_until(lambda: gateway.buffers.used_bytes == 1000, what="its first bytes")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert gateway.buffers.used_bytes == 0


@pytest.mark.parametrize("script", [always(body=b"x" * 50, status="500 Broken"), always(status="429 No")])
async def test_memory_of_an_answer_is_freed_or_passed_to_the_caller(
    gateway_to: MakeGateway, script: Script
) -> None:
    async with serving(script) as server:
        gateway = gateway_to(server.url)
        forwarded = await forward(gateway)
        if forwarded.memory is not None:
            forwarded.memory.free_share()
        assert gateway.buffers.used_bytes == 0


async def test_partly_read_answers_never_deadlock() -> None:
    """Each answer has been read in part, and there is no room for the rest of any."""
    buffers = AnswerBufferPool(limit_bytes=30, largest_bytes=10)
    holds = [AnswerBuffer(buffers) for _ in range(5)]
    for hold in holds:
        await hold.grow_to(4)
    highest = 0

    async def finish(hold: AnswerBuffer) -> None:
        nonlocal highest
        for size in (6, 8, 10):
            await hold.grow_to(size)
            highest = max(highest, buffers.used_bytes)
        await asyncio.sleep(0)
        hold.free_share()

    async with asyncio.timeout(5):
        await asyncio.gather(*(finish(hold) for hold in holds))
    assert highest <= 30
    assert buffers.used_bytes == 0


async def test_cancelled_wait_for_memory_lets_the_next_answer_continue() -> None:
    buffers = AnswerBufferPool(limit_bytes=20, largest_bytes=10)
    first, beyond, large, small = (AnswerBuffer(buffers) for _ in range(4))
    await first.grow_to(8)
    await beyond.grow_to(5)
    waits_large = asyncio.create_task(large.grow_to(9))
    waits_small = asyncio.create_task(small.grow_to(2))
    await asyncio.sleep(0)
    assert not waits_small.done(), "memory is granted in the order of the requests for it"
    waits_large.cancel()
    await asyncio.gather(waits_large, return_exceptions=True)
    await asyncio.wait_for(waits_small, 5)
    assert buffers.used_bytes == 15


async def test_bound_can_be_raised_and_answers_can_be_shared() -> None:
    buffers = AnswerBufferPool(limit_bytes=10, largest_bytes=10)
    beyond, waiting = AnswerBuffer(buffers), AnswerBuffer(buffers)
    await beyond.grow_to(10)
    waits = asyncio.create_task(waiting.grow_to(5))
    await asyncio.sleep(0)
    assert not waits.done()
    buffers.set_limits(20, 10)
    await asyncio.wait_for(waits, 5)
    beyond.split_into(2)
    beyond.free_share()
    assert buffers.used_bytes == 15
    beyond.free_share()
    beyond.free_share()
    assert buffers.used_bytes == 5
    waiting.split_into(0)
    assert buffers.used_bytes == 0


async def test_attempt_is_freed_without_the_garbage_collector(gateway_to: MakeGateway) -> None:
    async with serving(always(body=b"{}")) as server:
        gateway = gateway_to(server.url)
        await asyncio.create_task(forward(gateway))  # a connection refers to the attempt that opened it
        gc.disable()
        try:
            task = asyncio.create_task(forward(gateway))
            await task
            find_task = weakref.ref(task)
            del task
            await asyncio.sleep(0)  # the event loop refers to the task until this step ends
            assert find_task() is None
        finally:
            gc.enable()
