"""Thousands who wait, hooks, bounds and streams."""

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
from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.requests.result import ErrorCode, encode_answer
from tests.client.answering import POOL, Answering, refusal
from tests.queue.made import claim
from tests.queue.servers import Server
from tests.support import wait_until

MANY = 10_000


@pytest.fixture
async def producer(one_redis: Server) -> AsyncIterator[BatchClient]:
    async with BatchClient(one_redis.url, pool=POOL) as made:
        yield made


async def test_ten_thousand_await_their_answers_over_four_connections(
    answering: Answering, one_redis: Server, producer: BatchClient
) -> None:
    with one_redis.client() as raw:
        others = {each["id"] for each in raw.client_list()}
        most = 0
        waiting = [asyncio.create_task(producer.submit({"n": n})) for n in range(MANY)]
        done = asyncio.gather(*waiting)
        async with answering.always():
            while not done.done():
                most = max(most, len({each["id"] for each in raw.client_list()} - others))
                await asyncio.wait([done], timeout=0.05)
        assert [result.json()["n"] for result in await done] == list(range(MANY))
        assert most <= 4 + 1, "of which one may be the dispatcher's"
    assert len(set(answering.served)) == MANY


@pytest.mark.serial
async def test_p99_of_what_the_client_adds_to_an_answer(answering: Answering, producer: BatchClient) -> None:
    """From the dispatcher's settlement to the caller, one after the other; the best of some tries counts, for
    what else runs on the machine is not what is measured."""
    p99s = []
    for _ in range(4):
        late = await lateness()
        times = []
        for n in range(200):
            waiting = asyncio.create_task(producer.submit({"n": n}))
            await wait_until(answering.once, every_s=0.001)
            settled_at = time.perf_counter()
            await waiting
            times.append(time.perf_counter() - settled_at)
        times.sort()
        p99s.append(times[197] - 2 * late[197])
        print(
            f"median {times[100] * 1000:.1f} ms, p99 {times[197] * 1000:.1f} ms; "
            f"the machine's own {late[100] * 1000:.1f}, p99 {late[197] * 1000:.1f} ms"
        )
        assert times[100] <= 0.005 + 2 * late[100]
        if times[197] <= 0.005:
            return
    assert min(p99s) <= 0.005


async def lateness() -> list[float]:
    """How late short timers of this process are, just now; ascending. A result wakes the server and us."""
    times = []
    for _ in range(200):
        due = time.perf_counter() + 0.002
        await asyncio.sleep(0.002)
        times.append(time.perf_counter() - due)
    return sorted(times)


async def test_map_has_the_results_in_order_and_stream_as_they_come(
    answering: Answering, producer: BatchClient
) -> None:
    async with answering.always():
        mapped = await producer.map({"n": n} for n in range(300))
        streamed = [result.json()["n"] async for result in producer.stream({"n": n} for n in range(300))]
    assert [result.json() for result in mapped] == [{"n": n} for n in range(300)]
    assert sorted(streamed) == list(range(300))
    assert streamed != sorted(streamed)


@pytest.mark.parametrize("ordered", [False, True], ids=["as they come", "in order"])
async def test_a_stream_takes_no_more_items_than_its_window_holds(
    answering: Answering, producer: BatchClient, ordered: bool
) -> None:
    taken: list[int] = []

    def items() -> Iterator[Item]:
        for n in range(200):
            taken.append(n)
            yield Item({"n": n})

    seen = 0
    async with answering.always():
        async for result in producer.stream(items(), max_pending=7, ordered=ordered):
            assert len(taken) <= seen + 7
            assert not ordered or result.json() == {"n": seen}
            seen += 1
    assert seen == 200


async def test_items_may_come_from_an_asynchronous_source(
    answering: Answering, producer: BatchClient
) -> None:
    async def items() -> AsyncIterator[Item]:
        for n in range(20):
            await asyncio.sleep(0)
            yield Item({"n": n})

    async with answering.always():
        found = [result.json()["n"] async for result in producer.stream(items(), max_pending=3, ordered=True)]
    assert found == list(range(20))


async def test_what_is_wrong_with_one_item_is_told_by_its_result_alone(
    answering: Answering, one_redis: Server
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
        answering.always(),
        BatchClient(one_redis.url, pool=POOL, before=before, after=after) as client,
    ):
        results = await client.map(items)
    assert [result.code for result in results] == [
        *("", "HOOK_FAILED", "INVALID_REQUEST", "INVALID_REQUEST", "INVALID_REQUEST", "INVALID_REQUEST"),
        *("HOOK_FAILED", "INVALID_REQUEST", ""),
    ]
    assert results[6].status == 200, "the answer is there all the same"
    assert "not that one" in results[1].message
    assert "write 90s, 10m, 1h30m" in results[3].message
    assert "give a mapping or bytes, not str" in results[5].message
    with pytest.raises(HookError, match="nor this one"):
        results[6].raise_for_status()
    assert len(answering.served) == 3


async def test_a_hook_may_change_what_is_submitted(answering: Answering, one_redis: Server) -> None:
    seen: list[tuple[str, str]] = []

    async def before(item: Item) -> Item:
        return Item({"wrapped": item.body}, id=f"h-{item.id}")

    def after(item: Item, result: Result) -> None:
        seen.append((item.id, result.id))

    async with (
        answering.always(),
        BatchClient(one_redis.url, pool=POOL, before=before, after=after) as client,
    ):
        result = await client.submit({"n": 1}, id="1")
        handle = await client.enqueue({"n": 2}, id="2")
        await client.result(handle)
        await client.result(handle)
    assert (result.id, result.json()) == ("h-1", {"wrapped": {"n": 1}})
    assert seen == [("h-1", "h-1"), ("h-2", "h-2")], "once for each"


async def test_what_a_source_raises_comes_after_the_results_before_it(
    answering: Answering, producer: BatchClient
) -> None:
    def items() -> Iterator[dict[str, int]]:
        yield {"n": 1}
        yield {"n": 2}
        raise OSError("the disk is gone")

    async with answering.always():
        stream = producer.stream(items(), max_pending=1)
        assert [(await anext(stream)).json()["n"] for _ in range(2)] == [1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            await anext(stream)


async def test_a_stream_that_is_left_leaves_no_task_behind(
    answering: Answering, producer: BatchClient
) -> None:
    async with answering.always():
        stream = producer.stream(({"n": n} for n in range(10_000)), max_pending=50)
        async for _ in stream:
            break
        await stream.aclose()
    left = [task.get_name() for task in asyncio.all_tasks() if "stream" in task.get_name()]
    assert left == []


async def test_closing_the_client_under_a_stream_is_raised_once_and_told_nowhere_else(
    one_redis: Server,
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
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
    assert complaints == []


async def test_a_full_client_waits_or_raises(answering: Answering, one_redis: Server) -> None:
    async with BatchClient(one_redis.url, pool=POOL, max_pending=3) as client:
        handles = [await client.enqueue({"n": n}) for n in range(3)]
        fourth = asyncio.create_task(client.enqueue({"n": 3}))
        await wait_until(lambda: client.is_reading)
        assert not fourth.done()
        await answering.once()
        handles.append(await fourth)
        await answering.once()
        found = await asyncio.gather(*(client.result(handle) for handle in handles))
        assert [result.json()["n"] for result in found] == [0, 1, 2, 3]
        more = await client.enqueue_many([{"n": n} for n in range(3)])
        assert len(more) == 3
    async with BatchClient(one_redis.url, pool=POOL, max_pending=3, when_full="raise") as client:
        await client.enqueue_many([{}, {}, {}])
        with pytest.raises(TooManyPendingError, match=r"3 requests are unanswered \(max_pending\)"):
            await client.enqueue({})
    async with BatchClient(one_redis.url, pool=POOL, max_pending=3, when_full="raise") as client:
        before = await answering.queue.count_requests()
        with pytest.raises(TooManyPendingError):
            await client.enqueue_many([{}, {}, {}, {}])
        assert await answering.queue.count_requests() == before, "all of them or none"
        await client.enqueue({}, results="")


async def test_cancelling_who_awaits_a_submission_cancels_the_request(
    answering: Answering, producer: BatchClient
) -> None:
    waiting = asyncio.create_task(producer.submit({}, id="r-1"))
    await wait_until(lambda: producer.pending)
    await wait_until(answering.queue.count_requests)
    (lease,) = (await claim(answering.queue)).leases
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    asked = [(request.id, request.token)]

    async def cancelled() -> bool:
        return bool(list(await answering.queue.check_cancelled(asked)))

    await wait_until(cancelled)


@pytest.mark.parametrize("closed", [False, True])
async def test_cancelling_while_the_submission_is_under_way_cancels_the_request(
    answering: Answering, one_redis: Server, closed: bool
) -> None:
    """The server has it, or is about to have it, and the client does not know that yet."""
    with one_redis.client() as raw:
        async with BatchClient(one_redis.url, pool=POOL) as client:
            await client.enqueue({}, id="connected")
            raw.client_pause(10_000, all=False)  # what writes is held up
            waiting = asyncio.create_task(client.submit({}, id="r-1"))

            def held_up() -> bool:
                return any("eval" in str(each["cmd"]) and "b" in each["flags"] for each in raw.client_list())

            await wait_until(held_up)
            late = asyncio.create_task(client.submit({}, id="r-2"))  # behind that call: it is never sent
            await wait_until(lambda: client.pending == 3)
            waiting.cancel()
            late.cancel()
            assert all(
                isinstance(each, asyncio.CancelledError)
                for each in await asyncio.gather(waiting, late, return_exceptions=True)
            )
            if not closed:
                raw.client_unpause()
                await wait_until(lambda: bool(list(raw.scan_iter("*:cancel:r-1:*"))))
            else:
                asyncio.get_running_loop().call_later(0.2, raw.client_unpause)
        cancelled = sorted(key.split(b":")[-2] for key in raw.scan_iter("*:cancel:*"))
        assert cancelled == [b"connected", b"r-1"], "the first one by the end of the client"
        assert (await answering.queue.count_requests()).pending == 2, "the one that was not sent is not there"


async def test_a_request_is_cancelled_by_its_handle(answering: Answering, producer: BatchClient) -> None:
    handle = await producer.enqueue({}, id="r-1")
    assert await producer.cancel(handle)
    await answering.once(refusal(ErrorCode.CANCELLED))
    assert (await producer.result(handle)).code == "CANCELLED"
    assert not await producer.cancel(handle)


@pytest.mark.parametrize(
    ("deadline", "within_s"),
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
async def test_a_deadline_is_said_in_the_callers_way(
    producer: BatchClient, answering: Answering, deadline: Any, within_s: float
) -> None:
    handle = await producer.enqueue({}, deadline=deadline() if callable(deadline) else deadline)
    assert abs(handle.deadline - time.time() - within_s) < 60


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
async def test_a_deadline_that_is_none_is_refused(producer: BatchClient, deadline: Any) -> None:
    with pytest.raises(ValueError, match="deadline"):
        await producer.enqueue({}, deadline=deadline)


async def test_many_are_submitted_in_order_or_not_at_all(answering: Answering, producer: BatchClient) -> None:
    with pytest.raises(ValueError, match="item 2: the body is no JSON object"):
        await producer.enqueue_many([{}, {}, b"[]"])
    assert (await answering.queue.count_requests()).pending == 0
    handles = await producer.enqueue_many([Item({"n": n}, id=f"r-{n}") for n in range(2500)])
    assert [handle.id for handle in handles] == [f"r-{n}" for n in range(2500)]
    while await answering.once():
        pass
    assert answering.served == [f"r-{n}" for n in range(2500)], "they leave in that order"


async def test_bytes_go_as_they_are(answering: Answering, producer: BatchClient) -> None:
    body = b'{ "prompt":"h\\u00e9",\n "n":1e2 }'
    async with answering.always(lambda each: encode_answer(each.id, 200, each.payload, token=each.token)):
        assert (await producer.submit(body)).text.encode() == body


async def test_no_answer_by_the_deadline_is_an_item_without_a_result(producer: BatchClient) -> None:
    with pytest.raises(NoResultError, match=r"no result for r-1 within 0\.1 s"):
        await producer.submit({}, id="r-1", timeout=0.1)
