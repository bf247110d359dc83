"""Our producer's side: which results are its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.asyncio

from dispatcher.client import Client, NoResultError
from dispatcher.core.request import Request as CoreRequest
from dispatcher.core.request import answered, parse
from dispatcher.ports import Settlement
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue
from tests.queue.made import NAMES, OwnerAndDesk, claim, queues
from tests.queue.servers import Server


@pytest.fixture
async def queue(any_server: Server, client: object) -> AsyncIterator[OwnerAndDesk]:
    async with queues(any_server.url, "a") as (one,):
        yield one


@pytest.fixture
async def producer(any_server: Server, client: object) -> AsyncIterator[Client]:
    made = Client(connect(any_server.url, answer_s=8.0), NAMES)
    yield made
    await made.aclose()


async def serve(queue: RedisQueue) -> None:
    """Answer all that waits, as the dispatcher does."""
    ends = []
    for lease in (await claim(queue)).leases:
        request = parse(lease.member)
        assert isinstance(request, CoreRequest)
        result = answered(request.id, 200, request.payload, token=request.token)
        ends.append(Settlement(lease, result, request.results, request.id, request.token))
    await queue.settle(ends)


async def test_a_result_without_the_tickets_token_is_not_taken_for_its_own(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, producer: Client
) -> None:
    """Another producer names alice's list and alice's id; her own result comes after it."""
    ticket = await producer.submit(b'{"real": 1}', id="alice-1")
    forged = [answered("alice-1", 200, b"forged", token=token) for token in ("", "guessed")]
    await client.lpush(ticket.results, *forged, answered("another", 200, b"forged", token=ticket.token))
    with pytest.raises(NoResultError):
        await producer.result(ticket, timeout_s=0.2)
    assert producer.passed_over == 3
    await serve(queue)
    assert (await producer.result(ticket, timeout_s=5)).payload == '{"real": 1}'


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"[1]", b'{"id": 7}', b'{"id":"\xff"}', b"[" * 5000])
async def test_garbage_in_the_list_costs_nobody_his_result(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, producer: Client, garbage: bytes
) -> None:
    ticket = await producer.submit(b"{}")
    await client.lpush(ticket.results, garbage)
    await serve(queue)
    assert (await producer.result(ticket, timeout_s=5)).id == ticket.id
    assert producer.passed_over == 1


async def test_results_of_others_are_kept_while_somebody_may_await_them(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, producer: Client
) -> None:
    payloads = [msgspec.json.encode({"n": n}) for n in range(20)]
    tickets = [await producer.submit(each, deadline_s=600 + n) for n, each in enumerate(payloads)]
    await serve(queue)
    assert (await producer.result(tickets[-1], timeout_s=5)).payload == '{"n":19}'
    assert len(producer._arrived) == 19
    del tickets[5:]
    assert len(producer._arrived) == 5, "what nobody can await any more is not kept"
    found = await asyncio.gather(*(producer.result(ticket, timeout_s=5) for ticket in tickets))
    assert [result.payload for result in found] == [f'{{"n":{n}}}' for n in range(5)]
    assert not producer._arrived
