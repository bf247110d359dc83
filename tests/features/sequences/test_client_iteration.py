"""Iteration over the results of a sequence, while its requests are submitted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dispatcher.client import BatchClient, Handle, Result, SequenceAbortedError, TooManyPendingError
from dispatcher.features.sequences.client import OpenSequence
from dispatcher.requests.request import Request
from dispatcher.requests.result import encode_failure
from dispatcher.wire_format import ErrorCode
from tests.client.fake_dispatcher import NAMES, POOL, echo
from tests.features.sequences.fake_sequence_dispatcher import FakeSequenceDispatcher
from tests.queue.factories import OwnerAndAdmin, queues
from tests.queue.servers import Server
from tests.support import wait_until


@pytest.fixture
async def queue(one_redis: Server) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(one_redis.url, "a", names=NAMES) as (created,):
        yield created


@pytest.fixture
def dispatcher(queue: OwnerAndAdmin) -> FakeSequenceDispatcher:
    return FakeSequenceDispatcher(queue)


@pytest.fixture
async def client(one_redis: Server) -> AsyncIterator[BatchClient]:
    async with BatchClient(one_redis.url, pool=POOL) as created:
        yield created


def get_number(result: Result) -> Any:
    return result.json()["n"]


async def read_numbers(sequence: OpenSequence) -> list[Any]:
    return [get_number(result) async for result in sequence]


def fail_first(request: Request) -> bytes:
    if request.payload == b'{"n":0}':
        return encode_failure(request.id, ErrorCode.RETRIES_EXHAUSTED, "no answer to 0", token=request.token)
    return echo(request)


async def test_each_result_is_yielded_while_later_requests_wait(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with client.sequence() as chat:
        handles = [await chat.enqueue({"n": n}, last=n == 2) for n in range(3)]
        results = aiter(chat)
        for n in range(3):
            await dispatcher.answer_once()
            assert get_number(await anext(results)) == n
            assert [each.done for each in handles] == [at <= n for at in range(3)]
        assert await anext(results, None) is None, "the iteration ends after the last request"
    assert dispatcher.indexes[chat.id] == [0, 1, 2]


async def test_sequence_without_an_id_has_a_random_id(client: BatchClient) -> None:
    sequences = [client.sequence() for _ in range(2)]
    assert sequences[0].id != sequences[1].id
    assert [len(each.id) for each in sequences] == [32, 32]
    assert [each.next_index for each in sequences] == [0, 0]


async def test_another_task_submits_during_the_iteration(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), client.sequence("chat-7") as chat:
        reading = asyncio.create_task(read_numbers(chat))
        for n in range(20):
            await chat.enqueue({"n": n}, last=n == 19)
        assert await reading == [*range(20)]


async def test_next_request_is_made_of_the_previous_result(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    found = []
    async with dispatcher.answer_continuously(), client.sequence("chat-7") as chat:
        await chat.enqueue({"n": 1})
        async for result in chat:
            found.append(get_number(result))
            if found[-1] >= 8:
                break
            await chat.enqueue({"n": 2 * found[-1]})
    assert found == [1, 2, 4, 8]


async def test_next_iteration_continues_with_the_next_result(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), client.sequence("chat-7") as chat:
        for n in range(4):
            await chat.enqueue({"n": n}, last=n == 3)
        async for result in chat:
            assert get_number(result) == 0
            break
        assert await read_numbers(chat) == [1, 2, 3]


async def test_interrupted_wait_loses_no_result(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with client.sequence("chat-7", max_pending=1) as chat:
        await chat.enqueue({"n": 0})
        interrupted = asyncio.create_task(anext(aiter(chat)))
        await wait_until(lambda: client.is_reading)
        interrupted.cancel()
        await asyncio.wait([interrupted])
        second = asyncio.create_task(chat.enqueue({"n": 1}, last=True))
        async with dispatcher.answer_continuously():
            assert await read_numbers(chat) == [0, 1]
        await second


async def test_results_of_send_are_not_yielded_again(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), client.sequence("chat-7") as chat:
        await chat.enqueue({"n": 0})
        await chat.send({"n": 1})
        await chat.send_many([{"n": 2}, {"n": 3}])
        await chat.enqueue({"n": 4}, results="batch-results:{other}")
        await chat.enqueue({"n": 5}, last=True)
        assert await read_numbers(chat) == [0, 5]


async def test_failed_requests_are_results(client: BatchClient, dispatcher: FakeSequenceDispatcher) -> None:
    async with (
        dispatcher.answer_continuously(fail_first),
        client.sequence("chat-7", on_error="abort") as chat,
    ):
        for n in range(3):
            await chat.enqueue({"n": n}, last=n == 2)
        results = [result async for result in chat]
    assert [each.code for each in results] == ["RETRIES_EXHAUSTED", *["SEQUENCE_ABORTED"] * 2]
    with pytest.raises(SequenceAbortedError, match="no answer to 0"):
        results[2].raise_for_status()


async def test_cancel_during_the_iteration_cancels_the_other_requests(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    codes = []
    async with client.sequence("chat-7") as chat:
        for n in range(4):
            await chat.enqueue({"n": n})
        await dispatcher.answer_once()  # the first request is answered, the others wait
        async for result in chat:
            codes.append(result.code)
            if len(codes) == 1:
                assert await chat.cancel()
                await dispatcher.answer_once()
    assert codes == ["", *["CANCELLED"] * 3]


async def test_exception_in_the_loop_cancels_the_other_requests(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    handles: list[Handle] = []

    async def raise_in_loop() -> None:
        async with client.sequence("chat-7") as chat:
            handles.extend([await chat.enqueue({"n": n}) for n in range(3)])
            await dispatcher.answer_once()
            async for _ in chat:
                raise KeyError("no such thing")

    with pytest.raises(KeyError):
        await raise_in_loop()
    async with dispatcher.answer_continuously():
        codes = [(await client.result(each)).code for each in handles]
    assert codes == ["", "CANCELLED", "CANCELLED"]


async def test_iteration_ends_when_the_block_is_left(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously():
        async with client.sequence("chat-7") as chat:
            reading = asyncio.create_task(read_numbers(chat))
            await chat.enqueue({"n": 0})
            await chat.enqueue({"n": 1})
        assert await reading == [0, 1]


async def test_iteration_includes_the_request_that_is_submitted_during_the_cancellation(
    one_redis: Server, dispatcher: FakeSequenceDispatcher
) -> None:
    is_waiting, may_continue = asyncio.Event(), asyncio.Event()

    async def delay(_: Any) -> None:
        is_waiting.set()
        await may_continue.wait()

    async with BatchClient(one_redis.url, pool=POOL, before=delay) as client:
        chat = client.sequence("chat-7")
        late = asyncio.create_task(chat.enqueue({"n": 0}))
        await is_waiting.wait()
        await chat.cancel()
        reading = asyncio.create_task(anext(aiter(chat)))
        may_continue.set()
        async with dispatcher.answer_continuously():
            assert (await reading).id == (await late).id


async def test_submission_waits_while_too_many_results_are_unread(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    submitted = max_ahead = 0
    found: list[Any] = []

    async def submit(chat: OpenSequence) -> None:
        nonlocal submitted, max_ahead
        for n in range(30):
            await chat.enqueue({"n": n}, last=n == 29)
            submitted += 1
            max_ahead = max(max_ahead, submitted - len(found))

    async with dispatcher.answer_continuously(), client.sequence("chat-7", max_pending=3) as chat:
        submitting = asyncio.create_task(submit(chat))
        async for result in chat:
            found.append(get_number(result))
            await wait_until(lambda: submitted == min(30, len(found) + 3))
        await submitting
    assert found == [*range(30)]
    assert max_ahead <= 4, "three that wait to be read, and the one that the iteration waits for"


async def test_cancel_ends_the_wait_for_space(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), client.sequence("chat-7", max_pending=1) as chat:
        await chat.enqueue({"n": 0})
        results = aiter(chat)
        await anext(results)
        await chat.enqueue({"n": 1})
        blocked = asyncio.create_task(chat.enqueue({"n": 2}))
        await asyncio.sleep(0)
        assert not blocked.done()
        await chat.cancel()
        await asyncio.wait([blocked])
        assert "it was cancelled" in str(blocked.exception())


async def test_program_that_does_not_iterate_may_submit_more(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), client.sequence("chat-7", max_pending=2) as chat:
        await chat.enqueue({"n": 0})
        async for _ in chat:
            break
        handles = [await chat.enqueue({"n": n}) for n in range(1, 5)]
        assert [get_number(await client.result(each)) for each in handles] == [1, 2, 3, 4]
        with pytest.raises(TooManyPendingError, match="more than 2 requests"):
            await read_numbers(chat)


async def test_max_pending_of_a_sequence_must_be_positive(client: BatchClient) -> None:
    with pytest.raises(ValueError, match="max_pending 0"):
        client.sequence("chat-7", max_pending=0)


async def test_named_client_keeps_a_result_until_the_next_one_is_requested(
    one_redis: Server, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously():
        async with BatchClient(one_redis.url, pool=POOL, name="reader") as client:
            chat = client.sequence("chat-7")
            for n in range(3):
                await chat.enqueue({"n": n}, id=f"r-{n}", last=n == 2)
            results = aiter(chat)
            assert [get_number(await anext(results)) for _ in range(2)] == [0, 1]
        async with BatchClient(one_redis.url, pool=POOL, name="reader") as client:
            assert [get_number(await client.result(f"r-{n}")) for n in (1, 2)] == [1, 2]


async def test_blocking_client_iterates_too(one_redis: Server, dispatcher: FakeSequenceDispatcher) -> None:
    def run_calls() -> list[Any]:
        found = []
        with BatchClient.sync(one_redis.url, pool=POOL) as client, client.sequence() as chat:
            chat.enqueue({"n": 0})
            for result in chat:
                found.append(get_number(result))
                if found[-1] == 3:
                    break
                chat.enqueue({"n": found[-1] + 1})
            for n in (4, 5):
                chat.enqueue({"n": n}, last=n == 5)
            return [*found, *(get_number(result) for result in chat)]

    async with dispatcher.answer_continuously():
        assert await asyncio.to_thread(run_calls) == [*range(6)]
