"""Sequences of a Python program: numbering, order, cancellation, and continuation by another client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from dispatcher.client import (
    BatchClient,
    ClosedError,
    Item,
    OnError,
    Result,
    SequenceAbortedError,
    SequenceBusyError,
    SequenceDeniedError,
    SequenceEndedError,
    SequenceFullError,
    SequenceIndexError,
    Turn,
)
from dispatcher.features.sequences.decisions import SequenceTerms
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.turns import CarryMode
from dispatcher.queue.contract import Settlement
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.request import Request, parse_member
from dispatcher.requests.result import encode_answer, encode_failure
from dispatcher.wire_format import ErrorCode
from tests.client.fake_dispatcher import NAMES, POOL, echo, fail_with
from tests.features.sequences.fake_sequence_dispatcher import FakeSequenceDispatcher
from tests.queue.factories import OwnerAndAdmin, claim, queues
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


def get_numbers(results: list[Result]) -> list[Any]:
    return [result.json()["n"] for result in results]


def fail_number(n: int, code: ErrorCode = ErrorCode.RETRIES_EXHAUSTED) -> Any:
    """Return an answer function that fails the request with this number."""

    def answer(request: Request) -> bytes:
        if request.payload == b'{"n":%d}' % n:
            return encode_failure(request.id, code, f"no answer to {n}", token=request.token)
        return echo(request)

    return answer


async def test_requests_are_numbered_in_the_order_of_their_calls(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), client.sequence("chat-7") as chat:
        for n in range(3):
            assert (await chat.send({"n": n})).json() == {"n": n}
    assert dispatcher.indexes["chat-7"] == [0, 1, 2]


async def test_request_has_the_carry_mode_of_its_sequence(client: BatchClient, queue: OwnerAndAdmin) -> None:
    async with client.sequence("chat-7", carry="messages") as chat:
        await chat.enqueue({"n": 0})
    async with client.sequence("chat-8") as chat:
        await chat.enqueue({"n": 0})
    carry_modes = {}
    for lease in (await claim(queue)).leases:
        request = parse_member(lease.member)
        assert isinstance(request, Request)
        assert request.extra is not None
        carry_modes[request.extra.id] = request.extra.carry
    assert carry_modes == {"chat-7": CarryMode.MESSAGES, "chat-8": None}


async def test_requests_run_in_the_order_of_concurrent_calls(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    """The scores of these priorities would give another order."""
    random_generator = random.Random(7)
    async with client.sequence("chat-7") as chat:
        waiting = [
            asyncio.create_task(chat.send({"n": n}, priority=random_generator.randrange(10)))
            for n in range(40)
        ]
        async with dispatcher.answer_continuously():
            random_generator.shuffle(waiting)
            await asyncio.gather(*waiting)
    assert dispatcher.indexes["chat-7"] == [*range(40)]
    assert dispatcher.answered["chat-7"] == [b'{"n":%d}' % n for n in range(40)]


async def test_item_names_its_turn_or_only_its_sequence(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    items = [Item({"n": n}, sequence=Turn("named", 2 - n), deadline=f"{10 + n}m") for n in range(3)]
    others = [Item({"n": n}, sequence="alone") for n in range(3)]
    async with dispatcher.answer_continuously():
        await client.map([*items, *others])
    assert dispatcher.answered["named"] == [b'{"n":2}', b'{"n":1}', b'{"n":0}']
    assert dispatcher.answered["alone"] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']


@pytest.mark.parametrize("sequence", ["", "x" * 257, Turn("s", -1), Turn("s", 10**15)])
async def test_invalid_turn_is_rejected_at_once(client: BatchClient, sequence: Any) -> None:
    with pytest.raises(ValueError, match="sequence"):
        await client.enqueue({"n": 1}, sequence=sequence)
    assert client.pending == 0


async def test_invalid_request_takes_no_index(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), client.sequence("chat-7") as chat:
        with pytest.raises(ValueError, match="no JSON object"):
            await chat.send(b"no object")
        await chat.send({"n": 0})
    assert dispatcher.indexes["chat-7"] == [0]


async def test_nothing_can_be_sent_after_the_last_request(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), client.sequence("chat-7") as chat:
        await chat.send({"n": 0}, last=True)
        with pytest.raises(ClosedError, match="its last request was sent"):
            await chat.send({"n": 1})
    assert await client.sequence_status("chat-7") is None
    with pytest.raises(ClosedError):
        await chat.send({"n": 1})


async def test_leaving_the_block_does_not_end_the_sequence(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously():
        async with client.sequence("chat-7") as chat:
            await chat.send({"n": 0})
        status = await client.sequence_status("chat-7")
        assert status is not None
        assert (status.status, status.expected_index, status.ended_count) == ("open", 1, 1)
        with pytest.raises(ClosedError, match="its block was left"):
            await chat.send({"n": 1})


async def test_another_client_continues_after_the_known_requests(
    one_redis: Server, client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    first = client.sequence("chat-7")
    await first.enqueue({"n": 0})
    await first.enqueue({"n": 1})
    await first.enqueue({"n": 2})
    await dispatcher.answer_once(lambda request: None)  # the first request runs, the others wait
    async with BatchClient(one_redis.url, pool=POOL, name="later") as later:
        second = later.sequence("chat-7")
        handle = await second.enqueue({"n": 3})
        assert second.next_index == 4
        dispatcher.running.clear()
        await client.cancel_sequence("chat-7")
        await later.cancel(handle)


async def test_aborted_sequence_starts_again_after_it_is_forgotten(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(fail_number(0)):
        first = client.sequence("chat-7", on_error="abort")
        assert not (await first.send({"n": 0})).ok
        assert (await client.sequence("chat-7").send({"n": 1})).code == ErrorCode.SEQUENCE_ABORTED
        assert await client.forget_sequence("chat-7")
        assert await client.sequence_status("chat-7") is None
        restarted = client.sequence("chat-7")
        assert get_numbers([await restarted.send({"n": 3})]) == [3]
        assert restarted.next_index == 1


async def test_sequence_with_running_or_waiting_requests_is_not_forgotten(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    chat = client.sequence("chat-7")
    for n in range(2):
        await chat.enqueue({"n": n})
    await dispatcher.answer_once(lambda request: None)  # the first request runs, the other waits
    assert not await client.forget_sequence("chat-7")
    status = await client.sequence_status("chat-7")
    assert status is not None
    assert (status.status, status.waiting_count) == ("open", 1)
    assert await client.forget_sequence("nobody"), "an unknown sequence counts as forgotten"


async def test_duplicate_index_is_an_error(client: BatchClient, dispatcher: FakeSequenceDispatcher) -> None:
    async with dispatcher.answer_continuously():
        async with client.sequence("chat-7", index=0) as chat:
            await chat.send({"n": 0})
        duplicate = await client.sequence("chat-7", index=0).send({"n": 0})
    with pytest.raises(SequenceIndexError):
        duplicate.raise_for_status()


async def test_sequence_with_too_many_waiting_requests_needs_an_index(
    one_redis: Server, client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    long_sequence = client.sequence("chat-7", index=0)
    for n in range(150):
        await long_sequence.enqueue({"n": n})
    await dispatcher.answer_once(lambda request: None)
    with pytest.raises(SequenceBusyError, match="say by index="):
        await client.sequence("chat-7").enqueue({"n": 0})


async def test_reset_starts_again_and_later_requests_wait_for_it(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with client.sequence("chat-7") as previous:
        await previous.enqueue({"n": 0})
        await previous.enqueue({"n": 1})
        async with client.sequence("chat-7", reset=True) as chat:
            first = await chat.enqueue({"n": 2})
            second = asyncio.create_task(chat.enqueue({"n": 3}))
            counts = await dispatcher.queue.count_requests()
            assert (counts.pending, second.done()) == (3, False)
            async with dispatcher.answer_continuously():
                await client.result(first)
                assert get_numbers([await client.result(await second)]) == [3]
    assert dispatcher.indexes["chat-7"] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="anew is awaited here"):
        await client.sequence("chat-7", reset=True).enqueue({"n": 1}, results="batch-results:{other}")


@pytest.mark.parametrize("on_error", ["abort", OnError.ABORT, None])
async def test_first_failure_aborts_the_later_requests_with_its_cause(
    client: BatchClient, dispatcher: FakeSequenceDispatcher, on_error: Any
) -> None:
    async with (
        dispatcher.answer_continuously(fail_number(1)),
        client.sequence("chat-7", on_error=on_error) as chat,
    ):
        results = await chat.send_many([{"n": n} for n in range(4)])
        later = await chat.send({"n": 4})
    assert [result.code for result in results] == ["", "RETRIES_EXHAUSTED", *["SEQUENCE_ABORTED"] * 2]
    for each in (results[3], later):
        with pytest.raises(SequenceAbortedError, match="no answer to 1") as raised:
            each.raise_for_status()
        assert "no answer to 1" in raised.value.cause


async def test_later_requests_run_after_a_failure_with_on_error_continue(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with (
        dispatcher.answer_continuously(fail_number(1)),
        client.sequence("chat-7", on_error="continue") as chat,
    ):
        results = await chat.send_many([{"n": n} for n in range(4)])
    assert [result.code for result in results] == ["", "RETRIES_EXHAUSTED", "", ""]


async def test_error_codes_raise_their_exceptions(queue: OwnerAndAdmin, client: BatchClient) -> None:
    limited = FakeSequenceDispatcher(queue, SequenceTerms(max_waiting=1, refuse_after_end=True))
    long_sequence = client.sequence("many", index=0)
    handles = [await long_sequence.enqueue({"n": n}) for n in range(4)]
    await limited.answer_once(lambda request: None)
    with pytest.raises(SequenceFullError):
        (await client.result(handles[3])).raise_for_status()
    async with limited.answer_continuously():
        await client.sequence("ended").send({"n": 0}, last=True)
        with pytest.raises(SequenceEndedError):
            (await client.sequence("ended").send({"n": 1})).raise_for_status()


async def test_exception_in_the_block_cancels_the_requests(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    handles = []

    async def raise_in_block() -> None:
        async with client.sequence("chat-7") as chat:
            handles.extend([await chat.enqueue({"n": n}) for n in range(3)])
            # The first request runs, two wait in the sequence.
            await dispatcher.answer_once(lambda request: None)
            handles.append(await chat.enqueue({"n": 3}))  # not claimed by a dispatcher yet
            raise KeyError("no such thing")

    with pytest.raises(KeyError):
        await raise_in_block()
    [(_, request)] = dispatcher.running
    assert await dispatcher.queue.check_cancelled([(request.id, request.token)]) == [True]
    async with dispatcher.answer_continuously():
        results = [await client.result(each) for each in handles[1:3]]
        assert [each.code for each in results] == ["CANCELLED"] * 2


@pytest.mark.parametrize("is_claimed", [False, True], ids=["none claimed", "one claimed"])
@pytest.mark.parametrize("way", ["cancel", "exception", "by id"])
async def test_cancellation_cancels_all_requests_and_frees_the_id(
    client: BatchClient, dispatcher: FakeSequenceDispatcher, way: str, is_claimed: bool
) -> None:
    handles = []

    async def give_up() -> None:
        async with client.sequence("chat-7", on_error="abort") as chat:
            handles.extend([await chat.enqueue({"n": n}) for n in range(4)])
            if is_claimed:
                await dispatcher.answer_once(lambda request: None)
            if way == "cancel":
                assert await chat.cancel()
            elif way == "by id":
                assert await client.cancel_sequence("chat-7") is is_claimed
            else:
                raise KeyError("no such thing")

    with suppress(KeyError):
        await give_up()
    for lease, request in dispatcher.running:  # running requests are cancelled
        result = encode_failure(request.id, ErrorCode.CANCELLED, "cancelled", token=request.token)
        await dispatcher.queue.settle([Settlement(lease, result, request.results, request.id, request.token)])
    async with dispatcher.answer_continuously():
        results = [await client.result(each) for each in handles]
        assert [each.code for each in results] == ["CANCELLED"] * 4
        assert await client.sequence_status("chat-7") is None
        assert get_numbers([await client.sequence("chat-7").send({"n": 5})]) == [5]


async def test_request_submitted_during_the_cancellation_is_cancelled(
    one_redis: Server, dispatcher: FakeSequenceDispatcher
) -> None:
    """The submission time of the request is after the cancellation, because the hook of the client takes
    long."""
    is_waiting, may_continue = asyncio.Event(), asyncio.Event()

    async def delay(_: Item) -> None:
        is_waiting.set()
        await may_continue.wait()

    async with BatchClient(one_redis.url, pool=POOL, before=delay) as client:
        chat = client.sequence("chat-7", index=0)
        may_continue.set()
        await chat.enqueue({"n": 0})
        is_waiting.clear()
        may_continue.clear()
        late = asyncio.create_task(chat.enqueue({"n": 1}))
        await is_waiting.wait()
        await chat.cancel()
        may_continue.set()
        handle = await late
        async with dispatcher.answer_continuously():
            assert (await client.result(handle)).code == "CANCELLED"
            assert await client.sequence_status("chat-7") is None


async def test_clients_share_sequences_and_other_secrets_are_rejected(
    one_redis: Server, client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(), BatchClient(one_redis.url, pool=POOL, name="later") as later:
        await client.sequence("chat-7").send({"n": 0})
        assert get_numbers([await later.sequence("chat-7").send({"n": 1})]) == [1]
        other_owner = Turn("chat-7", 2, secret="the secret of another program")
        denied = await client.submit({"n": 2}, sequence=other_owner)
        with pytest.raises(SequenceDeniedError):
            denied.raise_for_status()
        assert get_numbers([await client.submit({"n": 2}, sequence="chat-7")]) == [2]
    assert dispatcher.indexes["chat-7"] == [0, 1, 2]


async def test_concurrent_clients_agree_on_one_secret(one_redis: Server) -> None:
    admins = [RedisQueueAdmin(connect(one_redis.url), NAMES) for _ in range(5)]
    found = await asyncio.gather(*(open_sequences(admin).get_or_create_sequence_secret() for admin in admins))
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    for admin in admins:
        await admin.aclose()


async def test_cancel_ends_the_sequence(client: BatchClient, dispatcher: FakeSequenceDispatcher) -> None:
    async with client.sequence("chat-7") as chat:
        assert not await chat.cancel()
    async with client.sequence("chat-7") as chat:
        await chat.enqueue({"n": 0})
        assert await chat.cancel()
        with pytest.raises(ClosedError, match="was cancelled"):
            await chat.send({"n": 1})


async def test_many_sequences_run_concurrently(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    max_pending = 0

    def answer_and_count(request: Request) -> bytes:
        nonlocal max_pending
        max_pending = max(max_pending, client.pending)
        return echo(request)

    bodies_by_sequence = {f"chat-{at}": [{"n": 10 * at + n} for n in range(at % 4)] for at in range(60)}
    async with dispatcher.answer_continuously(answer_and_count):
        results = await client.map_sequences(bodies_by_sequence, at_once=10)
    assert {name: get_numbers(found) for name, found in results.items()} == {
        name: [body["n"] for body in bodies] for name, bodies in bodies_by_sequence.items()
    }
    assert [*results] == [*bodies_by_sequence]
    assert max_pending <= 10 * 3
    assert dispatcher.indexes == {
        name: [*range(len(bodies))] for name, bodies in bodies_by_sequence.items() if bodies
    }
    assert await client.sequence_status("chat-3") is None, "the sequence ended with its last request"


async def test_long_sequence_is_sent_in_parts(queue: OwnerAndAdmin, client: BatchClient) -> None:
    dispatcher = FakeSequenceDispatcher(queue, SequenceTerms(max_waiting=60))
    source = iter(range(200))
    max_pending = 0

    def bodies() -> Iterator[dict[str, int]]:
        for n in source:
            yield {"n": n}

    def answer_and_count(request: Request) -> bytes:
        nonlocal max_pending
        max_pending = max(max_pending, client.pending)
        return echo(request)

    async with dispatcher.answer_continuously(answer_and_count):
        results = await client.map_sequences({"long": bodies()})
    assert get_numbers(results["long"]) == [*range(200)]
    assert max_pending <= 50


@pytest.mark.parametrize(("on_error", "expected_code"), [(None, "SEQUENCE_ABORTED"), ("continue", "")])
async def test_requests_after_an_invalid_one_are_sent_only_with_on_error_continue(
    client: BatchClient, dispatcher: FakeSequenceDispatcher, on_error: Any, expected_code: str
) -> None:
    async with dispatcher.answer_continuously():
        results = await client.map_sequences(
            {"s": [{"n": 0}, b"none", Item({"n": 2}, id="x")]}, on_error=on_error
        )
    assert [each.code for each in results["s"]] == ["", "INVALID_REQUEST", expected_code]
    assert results["s"][2].id == "x"
    assert dispatcher.indexes["s"] == ([0] if expected_code else [0, 1])


async def test_aborted_sequence_can_be_mapped_again(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    async with dispatcher.answer_continuously(fail_with(ErrorCode.RETRIES_EXHAUSTED)):
        await client.map_sequences({"s": [{"n": 0}, {"n": 1}]})
    async with dispatcher.answer_continuously():
        assert get_numbers((await client.map_sequences({"s": [{"n": 0}, {"n": 1}]}))["s"]) == [0, 1]


async def test_cancelled_map_sequences_cancels_its_requests(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    task = asyncio.create_task(client.map_sequences({"s": [{"n": n} for n in range(5)]}, reset=False))
    await wait_until(lambda: client.pending == 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    requests = [parse_member(lease.member) for lease in (await claim(dispatcher.queue)).leases]
    assert len(requests) == 5
    cancelled = await dispatcher.queue.check_cancelled(
        [(request.id or "", request.token) for request in requests]
    )
    assert cancelled == [True] * 5


async def test_blocking_client_has_sequences_too(
    one_redis: Server, dispatcher: FakeSequenceDispatcher
) -> None:
    def raise_in_block(client: Any) -> None:
        with client.sequence("c") as chat:
            chat.enqueue({"n": 5})
            raise KeyError

    def work() -> list[Any]:
        with BatchClient.sync(one_redis.url, pool=POOL) as client:
            with client.sequence("chat-7") as chat:
                first = chat.send({"n": 0})
                handle = chat.enqueue({"n": 1})
                rest = chat.send_many([{"n": 2}, {"n": 3}], last=True)
                found = [first, client.result(handle), *rest]
                assert (chat.id, chat.next_index) == ("chat-7", 4)
            more = client.map_sequences({"b": [{"n": 4}]})
            with pytest.raises(KeyError):
                raise_in_block(client)
            assert client.sequence_status("b") is None
            assert not client.cancel_sequence("b")
            assert client.forget_sequence("b")
            return get_numbers([*found, *more["b"]])

    async with dispatcher.answer_continuously():
        assert await asyncio.to_thread(work) == [0, 1, 2, 3, 4]


async def test_content_of_an_answer_can_be_used_in_the_next_request(
    client: BatchClient, dispatcher: FakeSequenceDispatcher
) -> None:
    def model(request: Request) -> bytes:
        body = b'{"choices":[{"message":{"content":"%d bytes"}}]}' % len(request.payload)
        return encode_answer(request.id, 200, body, token=request.token)

    messages: list[dict[str, Any]] = []
    async with dispatcher.answer_continuously(model), client.sequence("chat-7") as chat:
        for question in ("one", "two"):
            messages.append({"role": "user", "content": question})
            result = await chat.send({"messages": messages})
            messages.append({"role": "assistant", "content": result.raise_for_status().content})
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
