"""Sequences as a Python program sends them: numbered, in order, cancelled as a whole, gone on with."""

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
from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.requests.result import ErrorCode, encode_answer, encode_failure
from dispatcher.core.sequences.decisions import SequenceTerms
from dispatcher.core.sequences.turns import CarryMode
from dispatcher.ports import Settlement
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from tests.client.answering import NAMES, POOL, echo, refusal
from tests.client.turns import TurnTaking
from tests.queue.made import OwnerAndDesk, claim, queues
from tests.queue.servers import Server
from tests.support import wait_until


@pytest.fixture
async def queue(one_redis: Server) -> AsyncIterator[OwnerAndDesk]:
    async with queues(one_redis.url, "a", names=NAMES) as (made,):
        yield made


@pytest.fixture
def taking(queue: OwnerAndDesk) -> TurnTaking:
    return TurnTaking(queue)


@pytest.fixture
async def client(one_redis: Server) -> AsyncIterator[BatchClient]:
    async with BatchClient(one_redis.url, pool=POOL) as made:
        yield made


def numbers(results: list[Result]) -> list[Any]:
    return [result.json()["n"] for result in results]


def failing(n: int, code: ErrorCode = ErrorCode.RETRIES_EXHAUSTED) -> Any:
    """An answerer that fails the one with this number."""

    def answer(request: Request) -> bytes:
        if request.payload == b'{"n":%d}' % n:
            return encode_failure(request.id, code, f"no answer to {n}", token=request.token)
        return echo(request)

    return answer


async def test_turns_are_numbered_and_each_is_awaited(client: BatchClient, taking: TurnTaking) -> None:
    async with taking.always(), client.sequence("chat-7") as chat:
        for n in range(3):
            assert (await chat.send({"n": n})).json() == {"n": n}
    assert taking.indexes["chat-7"] == [0, 1, 2]


async def test_each_turn_says_whether_it_carries_the_conversation_on(
    client: BatchClient, queue: OwnerAndDesk
) -> None:
    async with client.sequence("chat-7", carry="messages") as chat:
        await chat.enqueue({"n": 0})
    async with client.sequence("chat-8") as chat:
        await chat.enqueue({"n": 0})
    said = {}
    for lease in (await claim(queue)).leases:
        request = parse_member(lease.member)
        assert isinstance(request, Request)
        assert request.sequence is not None
        said[request.sequence.id] = request.sequence.carry
    assert said == {"chat-7": CarryMode.MESSAGES, "chat-8": None}


async def test_the_order_is_that_of_the_calls_whoever_awaits(client: BatchClient, taking: TurnTaking) -> None:
    """Urgent ones and others: the score would have them in another order."""
    chance = random.Random(7)
    async with client.sequence("chat-7") as chat:
        waiting = [asyncio.create_task(chat.send({"n": n}, priority=chance.randrange(10))) for n in range(40)]
        async with taking.always():
            chance.shuffle(waiting)
            await asyncio.gather(*waiting)
    assert taking.indexes["chat-7"] == [*range(40)]
    assert taking.served["chat-7"] == [b'{"n":%d}' % n for n in range(40)]


async def test_an_item_says_its_turn_or_the_sequence_alone(client: BatchClient, taking: TurnTaking) -> None:
    items = [Item({"n": n}, sequence=Turn("named", 2 - n), deadline=f"{10 + n}m") for n in range(3)]
    others = [Item({"n": n}, sequence="alone") for n in range(3)]
    async with taking.always():
        await client.map([*items, *others])
    assert taking.served["named"] == [b'{"n":2}', b'{"n":1}', b'{"n":0}']
    assert taking.served["alone"] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']


@pytest.mark.parametrize("sequence", ["", "x" * 257, Turn("s", -1), Turn("s", 10**15)])
async def test_a_turn_that_can_be_none_is_refused_at_once(client: BatchClient, sequence: Any) -> None:
    with pytest.raises(ValueError, match="sequence"):
        await client.enqueue({"n": 1}, sequence=sequence)
    assert client.pending == 0


async def test_what_cannot_be_submitted_takes_no_index(client: BatchClient, taking: TurnTaking) -> None:
    async with taking.always(), client.sequence("chat-7") as chat:
        with pytest.raises(ValueError, match="no JSON object"):
            await chat.send(b"no object")
        await chat.send({"n": 0})
    assert taking.indexes["chat-7"] == [0]


async def test_nothing_comes_behind_the_last_one(client: BatchClient, taking: TurnTaking) -> None:
    async with taking.always(), client.sequence("chat-7") as chat:
        await chat.send({"n": 0}, last=True)
        with pytest.raises(ClosedError, match="its last request was sent"):
            await chat.send({"n": 1})
    assert await client.sequence_status("chat-7") is None
    with pytest.raises(ClosedError):
        await chat.send({"n": 1})


async def test_leaving_well_ends_nothing(client: BatchClient, taking: TurnTaking) -> None:
    async with taking.always():
        async with client.sequence("chat-7") as chat:
            await chat.send({"n": 0})
        seen = await client.sequence_status("chat-7")
        assert seen is not None
        assert (seen.status, seen.expected_index, seen.ended_count) == ("open", 1, 1)
        with pytest.raises(ClosedError, match="its block was left"):
            await chat.send({"n": 1})


async def test_a_client_that_comes_again_goes_on_behind_what_is_known(
    one_redis: Server, client: BatchClient, taking: TurnTaking
) -> None:
    first = client.sequence("chat-7")
    await first.enqueue({"n": 0})
    await first.enqueue({"n": 1})
    await first.enqueue({"n": 2})
    await taking.once(lambda request: None)  # the first one runs, the others wait
    async with BatchClient(one_redis.url, pool=POOL, name="later") as later:
        second = later.sequence("chat-7")
        handle = await second.enqueue({"n": 3})
        assert second.next_index == 4
        taking.running.clear()
        await client.cancel_sequence("chat-7")
        await later.cancel(handle)


async def test_a_sequence_that_was_aborted_begins_anew_once_it_is_forgotten(
    client: BatchClient, taking: TurnTaking
) -> None:
    async with taking.always(failing(0)):
        first = client.sequence("chat-7", on_error="abort")
        assert not (await first.send({"n": 0})).ok
        assert (await client.sequence("chat-7").send({"n": 1})).code == ErrorCode.SEQUENCE_ABORTED
        assert await client.forget_sequence("chat-7")
        assert await client.sequence_status("chat-7") is None
        anew = client.sequence("chat-7")
        assert numbers([await anew.send({"n": 3})]) == [3]
        assert anew.next_index == 1


async def test_a_sequence_of_which_something_runs_or_waits_is_not_forgotten(
    client: BatchClient, taking: TurnTaking
) -> None:
    chat = client.sequence("chat-7")
    for n in range(2):
        await chat.enqueue({"n": n})
    await taking.once(lambda request: None)  # the first one runs, the other waits
    assert not await client.forget_sequence("chat-7")
    seen = await client.sequence_status("chat-7")
    assert seen is not None
    assert (seen.status, seen.waiting_count) == ("open", 1)
    assert await client.forget_sequence("nobody"), "it begins anew as well"


async def test_an_index_that_is_there_already_is_told(client: BatchClient, taking: TurnTaking) -> None:
    async with taking.always():
        async with client.sequence("chat-7", index=0) as chat:
            await chat.send({"n": 0})
        again = await client.sequence("chat-7", index=0).send({"n": 0})
    with pytest.raises(SequenceIndexError):
        again.raise_for_status()


async def test_a_line_that_is_not_seen_to_its_end_is_told(
    one_redis: Server, client: BatchClient, taking: TurnTaking
) -> None:
    many = client.sequence("chat-7", index=0)
    for n in range(150):
        await many.enqueue({"n": n})
    await taking.once(lambda request: None)
    with pytest.raises(SequenceBusyError, match="say by index="):
        await client.sequence("chat-7").enqueue({"n": 0})


async def test_a_reset_begins_anew_and_what_follows_waits_for_its_end(
    client: BatchClient, taking: TurnTaking
) -> None:
    async with client.sequence("chat-7") as before:
        await before.enqueue({"n": 0})
        await before.enqueue({"n": 1})
        async with client.sequence("chat-7", reset=True) as chat:
            first = await chat.enqueue({"n": 2})
            second = asyncio.create_task(chat.enqueue({"n": 3}))
            counts = await taking.queue.count_requests()
            assert (counts.pending, second.done()) == (3, False)
            async with taking.always():
                await client.result(first)
                assert numbers([await client.result(await second)]) == [3]
    assert taking.indexes["chat-7"] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="anew is awaited here"):
        await client.sequence("chat-7", reset=True).enqueue({"n": 1}, results="batch-results:{other}")


@pytest.mark.parametrize("on_error", ["abort", OnError.ABORT, None])
async def test_the_first_failure_ends_the_others_and_they_say_why(
    client: BatchClient, taking: TurnTaking, on_error: Any
) -> None:
    async with taking.always(failing(1)), client.sequence("chat-7", on_error=on_error) as chat:
        results = await chat.send_many([{"n": n} for n in range(4)])
        later = await chat.send({"n": 4})
    assert [result.code for result in results] == ["", "RETRIES_EXHAUSTED", *["SEQUENCE_ABORTED"] * 2]
    for each in (results[3], later):
        with pytest.raises(SequenceAbortedError, match="no answer to 1") as raised:
            each.raise_for_status()
        assert "no answer to 1" in raised.value.cause


async def test_or_not_where_it_is_to_go_on(client: BatchClient, taking: TurnTaking) -> None:
    async with taking.always(failing(1)), client.sequence("chat-7", on_error="continue") as chat:
        results = await chat.send_many([{"n": n} for n in range(4)])
    assert [result.code for result in results] == ["", "RETRIES_EXHAUSTED", "", ""]


async def test_each_code_has_its_error(queue: OwnerAndDesk, client: BatchClient) -> None:
    full = TurnTaking(queue, SequenceTerms(max_waiting=1, refuse_after_end=True))
    many = client.sequence("many", index=0)
    handles = [await many.enqueue({"n": n}) for n in range(4)]
    await full.once(lambda request: None)
    with pytest.raises(SequenceFullError):
        (await client.result(handles[3])).raise_for_status()
    async with full.always():
        await client.sequence("ended").send({"n": 0}, last=True)
        with pytest.raises(SequenceEndedError):
            (await client.sequence("ended").send({"n": 1})).raise_for_status()


async def test_a_block_that_an_exception_leaves_cancels_what_waits(
    client: BatchClient, taking: TurnTaking
) -> None:
    handles = []

    async def breaks_off() -> None:
        async with client.sequence("chat-7") as chat:
            handles.extend([await chat.enqueue({"n": n}) for n in range(3)])
            await taking.once(lambda request: None)  # the first one runs, two wait in the sequence
            handles.append(await chat.enqueue({"n": 3}))  # which no dispatcher has seen yet
            raise KeyError("no such thing")

    with pytest.raises(KeyError):
        await breaks_off()
    [(_, request)] = taking.running
    assert await taking.queue.check_cancelled([(request.id, request.token)]) == [True]
    async with taking.always():
        waited = [await client.result(each) for each in handles[1:3]]
        assert [each.code for each in waited] == ["CANCELLED"] * 2


@pytest.mark.parametrize("claimed", [False, True], ids=["none claimed", "one claimed"])
@pytest.mark.parametrize("how", ["cancel", "exception", "by id"])
async def test_all_that_was_submitted_is_cancelled_claimed_or_not_and_the_id_is_free(
    client: BatchClient, taking: TurnTaking, how: str, claimed: bool
) -> None:
    handles = []

    async def give_up() -> None:
        async with client.sequence("chat-7", on_error="abort") as chat:
            handles.extend([await chat.enqueue({"n": n}) for n in range(4)])
            if claimed:
                await taking.once(lambda request: None)
            if how == "cancel":
                assert await chat.cancel()
            elif how == "by id":
                assert await client.cancel_sequence("chat-7") is claimed
            else:
                raise KeyError("no such thing")

    with suppress(KeyError):
        await give_up()
    for lease, request in taking.running:  # running requests are cancelled
        result = encode_failure(request.id, ErrorCode.CANCELLED, "cancelled", token=request.token)
        await taking.queue.settle([Settlement(lease, result, request.results, request.id, request.token)])
    async with taking.always():
        results = [await client.result(each) for each in handles]
        assert [each.code for each in results] == ["CANCELLED"] * 4
        assert await client.sequence_status("chat-7") is None
        assert numbers([await client.sequence("chat-7").send({"n": 5})]) == [5]


async def test_a_request_that_is_submitted_while_its_sequence_is_cancelled_is_cancelled(
    one_redis: Server, taking: TurnTaking
) -> None:
    """The request gets its time of submission after the cancel, because the client's hook takes long."""
    waits, go_on = asyncio.Event(), asyncio.Event()

    async def before(_: Item) -> None:
        waits.set()
        await go_on.wait()

    async with BatchClient(one_redis.url, pool=POOL, before=before) as client:
        chat = client.sequence("chat-7", index=0)
        go_on.set()
        await chat.enqueue({"n": 0})
        waits.clear()
        go_on.clear()
        late = asyncio.create_task(chat.enqueue({"n": 1}))
        await waits.wait()
        await chat.cancel()
        go_on.set()
        handle = await late
        async with taking.always():
            assert (await client.result(handle)).code == "CANCELLED"
            assert await client.sequence_status("chat-7") is None


async def test_programs_with_our_client_share_sequences_and_others_are_kept_out(
    one_redis: Server, client: BatchClient, taking: TurnTaking
) -> None:
    async with taking.always(), BatchClient(one_redis.url, pool=POOL, name="later") as later:
        await client.sequence("chat-7").send({"n": 0})
        assert numbers([await later.sequence("chat-7").send({"n": 1})]) == [1]
        theirs = Turn("chat-7", 2, secret="the secret of another program")
        denied = await client.submit({"n": 2}, sequence=theirs)
        with pytest.raises(SequenceDeniedError):
            denied.raise_for_status()
        assert numbers([await client.submit({"n": 2}, sequence="chat-7")]) == [2]
    assert taking.indexes["chat-7"] == [0, 1, 2]


async def test_clients_that_ask_at_once_agree_on_one_secret(one_redis: Server) -> None:
    desks = [RedisQueueAdmin(connect(one_redis.url), NAMES) for _ in range(5)]
    found = await asyncio.gather(*(desk.get_or_create_sequence_secret() for desk in desks))
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    for desk in desks:
        await desk.aclose()


async def test_cancel_ends_it(client: BatchClient, taking: TurnTaking) -> None:
    async with client.sequence("chat-7") as chat:
        assert not await chat.cancel()
    async with client.sequence("chat-7") as chat:
        await chat.enqueue({"n": 0})
        assert await chat.cancel()
        with pytest.raises(ClosedError, match="was cancelled"):
            await chat.send({"n": 1})


async def test_many_sequences_side_by_side(client: BatchClient, taking: TurnTaking) -> None:
    most = 0

    def watching(request: Request) -> bytes:
        nonlocal most
        most = max(most, client.pending)
        return echo(request)

    given = {f"chat-{at}": [{"n": 10 * at + n} for n in range(at % 4)] for at in range(60)}
    async with taking.always(watching):
        results = await client.map_sequences(given, at_once=10)
    assert {name: numbers(found) for name, found in results.items()} == {
        name: [body["n"] for body in bodies] for name, bodies in given.items()
    }
    assert [*results] == [*given]
    assert most <= 10 * 3
    assert taking.indexes == {name: [*range(len(bodies))] for name, bodies in given.items() if bodies}
    assert await client.sequence_status("chat-3") is None, "it has ended with its last request"


async def test_a_sequence_longer_than_may_wait_is_sent_as_it_goes(
    queue: OwnerAndDesk, client: BatchClient
) -> None:
    taking = TurnTaking(queue, SequenceTerms(max_waiting=60))
    source = iter(range(200))
    most = 0

    def bodies() -> Iterator[dict[str, int]]:
        for n in source:
            yield {"n": n}

    def watching(request: Request) -> bytes:
        nonlocal most
        most = max(most, client.pending)
        return echo(request)

    async with taking.always(watching):
        results = await client.map_sequences({"long": bodies()})
    assert numbers(results["long"]) == [*range(200)]
    assert most <= 50


@pytest.mark.parametrize(("on_error", "codes"), [(None, "SEQUENCE_ABORTED"), ("continue", "")])
async def test_behind_what_cannot_be_submitted_the_rest_is_not_sent_unless_it_is_to_go_on(
    client: BatchClient, taking: TurnTaking, on_error: Any, codes: str
) -> None:
    async with taking.always():
        told = await client.map_sequences(
            {"s": [{"n": 0}, b"none", Item({"n": 2}, id="x")]}, on_error=on_error
        )
    assert [each.code for each in told["s"]] == ["", "INVALID_REQUEST", codes]
    assert told["s"][2].id == "x"
    assert taking.indexes["s"] == ([0] if codes else [0, 1])


async def test_an_aborted_sequence_may_be_mapped_again(client: BatchClient, taking: TurnTaking) -> None:
    async with taking.always(refusal(ErrorCode.RETRIES_EXHAUSTED)):
        await client.map_sequences({"s": [{"n": 0}, {"n": 1}]})
    async with taking.always():
        assert numbers((await client.map_sequences({"s": [{"n": 0}, {"n": 1}]}))["s"]) == [0, 1]


async def test_what_maps_is_cancelled_with_all_that_waits(client: BatchClient, taking: TurnTaking) -> None:
    task = asyncio.create_task(client.map_sequences({"s": [{"n": n} for n in range(5)]}, reset=False))
    await wait_until(lambda: client.pending == 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    read = [parse_member(lease.member) for lease in (await claim(taking.queue)).leases]
    assert len(read) == 5
    told = await taking.queue.check_cancelled([(one.id or "", one.token) for one in read])
    assert told == [True] * 5


async def test_threads_have_the_same(one_redis: Server, taking: TurnTaking) -> None:
    def breaks_off(client: Any) -> None:
        with client.sequence("c") as broken:
            broken.enqueue({"n": 5})
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
                breaks_off(client)
            assert client.sequence_status("b") is None
            assert not client.cancel_sequence("b")
            assert client.forget_sequence("b")
            return numbers([*found, *more["b"]])

    async with taking.always():
        assert await asyncio.to_thread(work) == [0, 1, 2, 3, 4]


async def test_the_words_of_an_answer_become_the_next_question(
    client: BatchClient, taking: TurnTaking
) -> None:
    def model(request: Request) -> bytes:
        told = b'{"choices":[{"message":{"content":"%d bytes"}}]}' % len(request.payload)
        return encode_answer(request.id, 200, told, token=request.token)

    messages: list[dict[str, Any]] = []
    async with taking.always(model), client.sequence("chat-7") as chat:
        for question in ("one", "two"):
            messages.append({"role": "user", "content": question})
            result = await chat.send({"messages": messages})
            messages.append({"role": "assistant", "content": result.raise_for_status().content})
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
