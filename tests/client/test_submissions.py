"""Submissions: many concurrent callers, hooks, limits, streams, cancellation and deadlines."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatcher.client import (
    BatchClient,
    HookError,
    Item,
    NoResultError,
    QueueUnreachableError,
    Result,
    TooManyPendingError,
)
from dispatcher.requests.request import Request, parse_member
from dispatcher.requests.result import encode_answer
from dispatcher.wire_format import ErrorCode
from tests.client.fake_dispatcher import POOL, FakeDispatcher, echo, fail_with
from tests.queue.factories import claim
from tests.queue.servers import Server
from tests.support import wait_until

REQUEST_COUNT = 10_000


@pytest.fixture
async def producer(one_redis: Server) -> AsyncIterator[BatchClient]:
    async with BatchClient(one_redis.url, pool=POOL) as created:
        yield created


async def test_ten_thousand_callers_share_four_connections(
    fake_dispatcher: FakeDispatcher, one_redis: Server, producer: BatchClient
) -> None:
    with one_redis.client() as raw:
        other_connections = {each["id"] for each in raw.client_list()}
        max_connections = 0
        waiting = [asyncio.create_task(producer.submit({"n": n})) for n in range(REQUEST_COUNT)]
        done = asyncio.gather(*waiting)
        async with fake_dispatcher.answer_continuously():
            while not done.done():
                max_connections = max(
                    max_connections, len({each["id"] for each in raw.client_list()} - other_connections)
                )
                await asyncio.wait([done], timeout=0.05)
        assert [result.json()["n"] for result in await done] == list(range(REQUEST_COUNT))
        assert max_connections <= 4 + 1, "one of which may be the connection of the dispatcher"
    assert len(set(fake_dispatcher.answered)) == REQUEST_COUNT


@pytest.mark.slow  # other load makes it fail
@pytest.mark.serial
async def test_client_adds_at_most_5_ms_to_an_answer_at_p99(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    """Time from the settlement by the dispatcher to the caller, one request after the other. The best of
    some tries counts, because other programs on the machine are not what is measured."""
    p99s_s = []
    for _ in range(4):
        timer_delays_s = await measure_timer_delays()
        times_s = []
        for n in range(200):
            waiting = asyncio.create_task(producer.submit({"n": n}))
            await wait_until(fake_dispatcher.answer_once, every_s=0.001)
            settled_at = time.perf_counter()
            await waiting
            times_s.append(time.perf_counter() - settled_at)
        times_s.sort()
        p99s_s.append(times_s[197] - 2 * timer_delays_s[197])
        print(
            f"median {times_s[100] * 1000:.1f} ms, p99 {times_s[197] * 1000:.1f} ms; "
            f"timer delays {timer_delays_s[100] * 1000:.1f}, p99 {timer_delays_s[197] * 1000:.1f} ms"
        )
        assert times_s[100] <= 0.005 + 2 * timer_delays_s[100]
        if times_s[197] <= 0.005:
            return
    assert min(p99s_s) <= 0.005


async def measure_timer_delays() -> list[float]:
    """Return the delays of short timers of this process, ascending. A result wakes up the server and this
    process."""
    times_s = []
    for _ in range(200):
        due = time.perf_counter() + 0.002
        await asyncio.sleep(0.002)
        times_s.append(time.perf_counter() - due)
    return sorted(times_s)


async def test_map_returns_results_in_order_and_stream_as_they_arrive(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    async with fake_dispatcher.answer_continuously():
        mapped = await producer.map({"n": n} for n in range(300))
        streamed = [result.json()["n"] async for result in producer.stream({"n": n} for n in range(300))]
    assert [result.json() for result in mapped] == [{"n": n} for n in range(300)]
    assert sorted(streamed) == list(range(300))
    assert streamed != sorted(streamed)


@pytest.mark.parametrize("ordered", [False, True], ids=["as they arrive", "in order"])
async def test_stream_reads_no_more_items_than_max_pending_allows(
    fake_dispatcher: FakeDispatcher, producer: BatchClient, ordered: bool
) -> None:
    read_numbers: list[int] = []

    def items() -> Iterator[Item]:
        for n in range(200):
            read_numbers.append(n)
            yield Item({"n": n})

    result_count = 0
    async with fake_dispatcher.answer_continuously():
        async for result in producer.stream(items(), max_pending=7, ordered=ordered):
            assert len(read_numbers) <= result_count + 7
            assert not ordered or result.json() == {"n": result_count}
            result_count += 1
    assert result_count == 200


async def test_items_can_come_from_an_asynchronous_iterator(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    async def items() -> AsyncIterator[Item]:
        for n in range(20):
            await asyncio.sleep(0)
            yield Item({"n": n})

    async with fake_dispatcher.answer_continuously():
        numbers = [
            result.json()["n"] async for result in producer.stream(items(), max_pending=3, ordered=True)
        ]
    assert numbers == list(range(20))


async def test_error_of_one_item_is_only_in_its_result(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    def before(item: Item) -> None:
        if item.id == "hook":
            raise RuntimeError("not that one")

    async def after(item: Item, result: Result) -> None:
        if item.id == "late":
            raise RuntimeError("nor this one")

    items: list[Any] = [
        Item({"n": 0}, id="good"),
        Item({}, id="hook"),
        Item(b"[1]", id="array"),
        Item({}, id="when", deadline="soon"),
        {"x": object()},
        "a string",
        Item({"n": 6}, id="late"),
        Item({}, id="priority", priority=12),
        {"n": 8},
    ]
    async with (
        fake_dispatcher.answer_continuously(),
        BatchClient(one_redis.url, pool=POOL, before=before, after=after) as client,
    ):
        results = await client.map(items)
    assert [result.code for result in results] == [
        *("", "HOOK_FAILED", "INVALID_REQUEST", "INVALID_REQUEST", "INVALID_REQUEST", "INVALID_REQUEST"),
        *("HOOK_FAILED", "INVALID_REQUEST", ""),
    ]
    assert results[6].status == 200, "the answer has arrived nevertheless"
    assert "not that one" in results[1].message
    assert "write 90s, 10m, 1h30m" in results[3].message
    assert "give a mapping or bytes, not str" in results[5].message
    with pytest.raises(HookError, match="nor this one"):
        results[6].raise_for_status()
    assert len(fake_dispatcher.answered) == 3


async def test_request_without_slicing_says_so_in_its_metadata(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    seen: dict[str, dict[str, str]] = {}

    def record_metadata(request: Request) -> bytes:
        seen[request.id] = dict(request.metadata)
        return echo(request)

    async with fake_dispatcher.answer_continuously(record_metadata):
        await producer.submit({}, id="default", metadata={"userid": "a"})
        await producer.submit({}, id="whole", metadata={"userid": "a", "slicing": "on"}, slicing=False)
        await producer.map([Item({}, id="item", slicing=False)])
        async with producer.sequence("chat") as chat:
            await chat.send({}, id="turn", slicing=False)
    assert seen == {
        "default": {"userid": "a"},
        "whole": {"userid": "a", "slicing": "off"},
        "item": {"slicing": "off"},
        "turn": {"slicing": "off"},
    }


async def test_hook_can_change_the_request(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    hook_calls: list[tuple[str, str]] = []

    async def before(item: Item) -> Item:
        return Item({"wrapped": item.body}, id=f"h-{item.id}")

    def after(item: Item, result: Result) -> None:
        hook_calls.append((item.id, result.id))

    async with (
        fake_dispatcher.answer_continuously(),
        BatchClient(one_redis.url, pool=POOL, before=before, after=after) as client,
    ):
        result = await client.submit({"n": 1}, id="1")
        handle = await client.enqueue({"n": 2}, id="2")
        await client.result(handle)
        await client.result(handle)
    assert (result.id, result.json()) == ("h-1", {"wrapped": {"n": 1}})
    assert hook_calls == [("h-1", "h-1"), ("h-2", "h-2")], "the hook runs once for each result"


async def test_exception_of_the_item_source_is_raised_after_the_earlier_results(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    def items() -> Iterator[dict[str, int]]:
        yield {"n": 1}
        yield {"n": 2}
        raise OSError("the disk is gone")

    async with fake_dispatcher.answer_continuously():
        stream = producer.stream(items(), max_pending=1)
        assert [(await anext(stream)).json()["n"] for _ in range(2)] == [1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            await anext(stream)


async def test_stream_that_is_left_early_leaves_no_task(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    async with fake_dispatcher.answer_continuously():
        stream = producer.stream(({"n": n} for n in range(10_000)), max_pending=50)
        async for _ in stream:
            break
        await stream.aclose()
    remaining_tasks = [task.get_name() for task in asyncio.all_tasks() if "stream" in task.get_name()]
    assert remaining_tasks == []


async def test_closing_the_client_during_a_stream_raises_once_and_reports_nothing_else(
    one_redis: Server,
) -> None:
    reported_errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported_errors.append(context))
    client = BatchClient(one_redis.url, pool=POOL)
    async with client:
        stream = client.stream([{"n": n} for n in range(20)])
        first = asyncio.ensure_future(anext(stream))
        await wait_until(lambda: client.pending == 20)
    with pytest.raises(QueueUnreachableError):
        await first
    await stream.aclose()
    del first, stream
    gc.collect()
    await asyncio.sleep(0)
    assert reported_errors == []


async def test_client_with_max_pending_requests_waits_or_raises(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    async with BatchClient(one_redis.url, pool=POOL, max_pending=3) as client:
        handles = [await client.enqueue({"n": n}) for n in range(3)]
        fourth = asyncio.create_task(client.enqueue({"n": 3}))
        await wait_until(lambda: client.is_reading)
        assert not fourth.done()
        await fake_dispatcher.answer_once()
        handles.append(await fourth)
        await fake_dispatcher.answer_once()
        results = await asyncio.gather(*(client.result(handle) for handle in handles))
        assert [result.json()["n"] for result in results] == [0, 1, 2, 3]
        further_handles = await client.enqueue_many([{"n": n} for n in range(3)])
        assert len(further_handles) == 3
    async with BatchClient(one_redis.url, pool=POOL, max_pending=3, when_full="raise") as client:
        await client.enqueue_many([{}, {}, {}])
        with pytest.raises(TooManyPendingError, match=r"3 requests are unanswered \(max_pending\)"):
            await client.enqueue({})
    async with BatchClient(one_redis.url, pool=POOL, max_pending=3, when_full="raise") as client:
        before = await fake_dispatcher.queue.count_requests()
        with pytest.raises(TooManyPendingError):
            await client.enqueue_many([{}, {}, {}, {}])
        assert await fake_dispatcher.queue.count_requests() == before, (
            "no request of a rejected call is submitted"
        )
        await client.enqueue({}, results="")


async def test_cancelled_caller_cancels_its_request(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    waiting = asyncio.create_task(producer.submit({}, id="r-1"))
    await wait_until(lambda: producer.pending)
    await wait_until(fake_dispatcher.queue.count_requests)
    (lease,) = (await claim(fake_dispatcher.queue)).leases
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    identifiers = [(request.id, request.token)]

    async def cancelled() -> bool:
        return bool(list(await fake_dispatcher.queue.check_cancelled(identifiers)))

    await wait_until(cancelled)


@pytest.mark.parametrize("closed", [False, True])
async def test_caller_cancelled_during_the_submission_cancels_its_request(
    fake_dispatcher: FakeDispatcher, one_redis: Server, closed: bool
) -> None:
    """The server has the request, or is about to get it, and the client does not know that yet."""
    with one_redis.client() as raw:
        async with BatchClient(one_redis.url, pool=POOL) as client:
            await client.enqueue({}, id="connected")
            raw.client_pause(10_000, all=False)  # pauses all writes
            waiting = asyncio.create_task(client.submit({}, id="r-1"))

            def is_blocked() -> bool:
                return any("eval" in str(each["cmd"]) and "b" in each["flags"] for each in raw.client_list())

            await wait_until(is_blocked)
            timer_delays_s = asyncio.create_task(
                client.submit({}, id="r-2")
            )  # waits for the call before it, so it is never sent
            await wait_until(lambda: client.pending == 3)
            waiting.cancel()
            timer_delays_s.cancel()
            assert all(
                isinstance(each, asyncio.CancelledError)
                for each in await asyncio.gather(waiting, timer_delays_s, return_exceptions=True)
            )
            if not closed:
                raw.client_unpause()
                await wait_until(lambda: bool(list(raw.scan_iter("*:cancel:r-1:*"))))
            else:
                asyncio.get_running_loop().call_later(0.2, raw.client_unpause)
        cancelled = sorted(key.split(b":")[-2] for key in raw.scan_iter("*:cancel:*"))
        assert cancelled == [b"connected", b"r-1"], "the first request is cancelled by closing the client"
        assert (await fake_dispatcher.queue.count_requests()).pending == 2, (
            "the request that was not sent is not in the queue"
        )


async def test_request_can_be_cancelled_by_its_handle(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    handle = await producer.enqueue({}, id="r-1")
    assert await producer.cancel(handle)
    await fake_dispatcher.answer_once(fail_with(ErrorCode.CANCELLED))
    assert (await producer.result(handle)).code == "CANCELLED"
    assert not await producer.cancel(handle)


@pytest.mark.parametrize(
    ("deadline", "seconds"),
    [
        (90, 90),
        ("90s", 90),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172_800),
        (timedelta(minutes=5), 300),
        (lambda: datetime.now(UTC) + timedelta(hours=2), 7200),
        (0.1, 1),
    ],
)
async def test_deadline_can_be_a_duration_or_a_time(
    producer: BatchClient, fake_dispatcher: FakeDispatcher, deadline: Any, seconds: float
) -> None:
    handle = await producer.enqueue({}, deadline=deadline() if callable(deadline) else deadline)
    assert abs(handle.deadline - time.time() - seconds) < 60


@pytest.mark.parametrize(
    "deadline",
    [
        "",
        "soon",
        "1 hour",
        "-5m",
        0,
        -1,
        1e12,
        float("nan"),
        datetime(2100, 1, 1),
        datetime(2001, 1, 1, tzinfo=UTC),
    ],
)
async def test_invalid_deadline_is_rejected(producer: BatchClient, deadline: Any) -> None:
    with pytest.raises(ValueError, match="deadline"):
        await producer.enqueue({}, deadline=deadline)


async def test_enqueue_many_submits_all_in_order_or_none(
    fake_dispatcher: FakeDispatcher, producer: BatchClient
) -> None:
    with pytest.raises(ValueError, match="item 2: the body is no JSON object"):
        await producer.enqueue_many([{}, {}, b"[]"])
    assert (await fake_dispatcher.queue.count_requests()).pending == 0
    handles = await producer.enqueue_many([Item({"n": n}, id=f"r-{n}") for n in range(2500)])
    assert [handle.id for handle in handles] == [f"r-{n}" for n in range(2500)]
    while await fake_dispatcher.answer_once():
        pass
    assert fake_dispatcher.answered == [f"r-{n}" for n in range(2500)], "they are claimed in that order"


async def test_bytes_are_sent_unchanged(fake_dispatcher: FakeDispatcher, producer: BatchClient) -> None:
    body = b'{ "prompt":"h\\u00e9",\n "n":1e2 }'
    async with fake_dispatcher.answer_continuously(
        lambda each: encode_answer(each.id, 200, each.payload, token=each.token)
    ):
        assert (await producer.submit(body)).text.encode() == body


async def test_missing_answer_raises_after_the_time_out(producer: BatchClient) -> None:
    with pytest.raises(NoResultError, match=r"no result for r-1 within 0\.1 s"):
        await producer.submit({}, id="r-1", timeout=0.1)
