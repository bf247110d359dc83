"""What a claim passes over costs it nothing, however many wait in a lane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path

import pytest
import redis.asyncio

import dispatcher.queue
from dispatcher.core.requests.found_request import LOCATION_BY_LANE
from dispatcher.core.requests.lanes import Lane
from dispatcher.core.sequences.decisions import SequenceTerms, TurnEnd, TurnGranted
from dispatcher.core.sequences.turns import Turn
from dispatcher.ports import Lease, Release
from tests.queue.known import assert_drained
from tests.queue.made import NAMES, OwnerAndDesk, answer, claim, queues, submission
from tests.queue.servers import Server

LONG = (pytest.mark.long, pytest.mark.timeout(1800))
PASSED = 600
OTHERS = 20


@pytest.fixture
async def queue(any_server: Server, client: object) -> AsyncIterator[OwnerAndDesk]:
    async with queues(any_server.url, "a") as (one,):
        yield one


async def commands(queue: OwnerAndDesk, client: redis.asyncio.Redis, room: int) -> tuple[int, list[float]]:
    """How many commands one claim runs on the server, those of its script too, and the scores it leased."""
    await client.config_resetstat()
    claimed = await claim(queue, 5, 5_000, max_per_lane={Lane.SUSPECTS: room})
    stats = await client.info("commandstats")
    return sum(told["calls"] for told in stats.values()), [lease.score for lease in claimed.leases]


async def test_a_claim_costs_the_same_whatever_it_passes_over(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission(f"others-{number}", 4_000_000_000) for number in range(OTHERS)])
    alone = [await commands(queue, client, room) for room in (0, 0)]
    await queue.submit([submission(f"passed-{number:04}", 3_000_000_000) for number in range(PASSED)])
    for _ in range(2):  # their owner dies twice
        held = []
        while leases := (await claim(queue, 256, 5_000, max_per_lane={Lane.SUSPECTS: PASSED})).leases:
            held += [lease.entry_id for lease in leases if lease.score < 4_000_000_000]
        names = {f"{entry}:a": 0 for entry in held}
        assert await client.zadd(f"{NAMES.queue_prefix}:leases", names, xx=True, ch=True) == PASSED
        while (await queue.sweep()).reclaimed_count:
            pass
    assert await client.zcard(f"{NAMES.queue_prefix}:suspects") == PASSED
    await queue.submit([submission(f"more-{number}", 4_000_000_001) for number in range(OTHERS)])
    passing = [await commands(queue, client, room) for room in (0, 0)]
    assert [scores for _, scores in passing] == [[4_000_000_001.0] * 5] * 2
    # One count more: whether what waits in returned comes before what is pending.
    assert max(count for count, _ in passing) <= max(count for count, _ in alone) + 1
    _, scores = await commands(queue, client, 3)
    assert scores == [3_000_000_000.0] * 3 + [4_000_000_001.0] * 2


TERMS = SequenceTerms(max_waiting=10**6, max_idle_s=86_400)


async def count(client: redis.asyncio.Redis, step: Awaitable[object]) -> int:
    """How many commands a step runs on the server."""
    await client.config_resetstat()
    await step
    stats = await client.info("commandstats")
    return sum(told["calls"] for name, told in stats.items() if name != "cmdstat_config|resetstat")


async def costs(queue: OwnerAndDesk, client: redis.asyncio.Redis) -> tuple[int, int]:
    """Of a claim of three requests that are of no sequence, and of their settlement."""
    await queue.submit([submission(f"single-{number}", 3_000_000_000) for number in range(3)])
    claimed: list[Lease] = []

    async def take() -> None:
        claimed.extend((await claim(queue, 3, 10**6)).leases)

    claims = await count(client, take())
    assert [lease.score for lease in claimed] == [3_000_000_000.0] * 3
    return claims, await count(client, queue.settle([answer(lease) for lease in claimed]))


async def line_up(queue: OwnerAndDesk, names: Sequence[str]) -> list[Lease]:
    """One request of each of these sequences, claimed and lined up; those that go."""
    going: list[Lease] = []
    for at in range(0, len(names), 250):
        some = names[at : at + 250]
        await queue.submit([submission(f"{at + number:09}", 1_000) for number in range(len(some))])
        leases = (await claim(queue, 250, 10**6)).leases
        turns = [(lease, Turn(name)) for lease, name in zip(leases, some, strict=True)]
        verdicts = (await queue.claim_turns(turns, TERMS)).decisions
        going += [one for one, said in zip(leases, verdicts, strict=True) if isinstance(said, TurnGranted)]
    return going


@pytest.mark.parametrize(
    ("in_one", "sequences"),
    [(1_000, 0), (0, 1_000), pytest.param(10_000, 0, marks=LONG), pytest.param(0, 100_000, marks=LONG)],
)
async def test_what_is_of_no_sequence_costs_the_same_beside_many(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, in_one: int, sequences: int
) -> None:
    await costs(queue, client)  # scripts are loaded
    alone = await costs(queue, client)
    await line_up(queue, ["chat"] * in_one)
    names = [f"chat-{number}" for number in range(sequences)]
    await line_up(queue, names + names)
    waiting = await client.zcard(f"{NAMES.queue_prefix}:sequenced")
    assert waiting == max(0, in_one - 1) + sequences
    claims, settlements = await costs(queue, client)
    assert claims <= alone[0]
    assert settlements <= alone[1]


async def test_a_turn_costs_the_same_however_many_wait_behind_it(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    head: list[Lease]

    async def turn() -> tuple[int, int, int]:
        """Of the settlement of the one that goes, and of the claim and line-up of the next."""
        ended = answer(head.pop()).copy_with(turn_end=TurnEnd(Turn("chat")))
        settlement = await count(client, queue.settle([ended]))

        async def take() -> None:
            head.extend((await claim(queue, 1, 10**6)).leases)

        claims = await count(client, take())
        return settlement, claims, await count(client, queue.claim_turns([(head[0], Turn("chat"))], TERMS))

    head = await line_up(queue, ["chat"] * 5)
    await turn()
    few = await turn()
    await line_up(queue, ["chat"] * 1_000)
    assert await turn() == few


def test_a_lane_is_named_in_the_tables_alone() -> None:
    """Whatever else looks at lanes goes through these, so that a new lane needs no change there."""
    assert set(LOCATION_BY_LANE) == set(Lane)
    room = Path(dispatcher.queue.__file__).parent
    named = {
        file.name
        for file in (*room.rglob("*.lua"), *room.rglob("*.py"))
        for text in (file.read_text(),)
        if "SUSPECTS" in text or "Whereabouts.SUSPECT" in text or "'S'" in text
    }
    assert named == {"common.lua", "keys.py"}


async def put_off(queue: OwnerAndDesk, models: int, each: int) -> None:
    """So many requests wait for each of so many models, those of all mixed in the order."""
    total = models * each
    for at in range(0, total, 500):
        some = [submission(f"away-{at + number:06}", 1_000 + at) for number in range(min(500, total - at))]
        await queue.submit(some)
        leases = (await claim(queue, 500, 10**6)).leases
        assert len(leases) == len(some)
        await queue.release(
            [
                Release(lease, is_undelivered=True, missing_model=f"m-{(at + number) % models}")
                for number, lease in enumerate(leases)
            ]
        )


async def given_back(queue: OwnerAndDesk, client: redis.asyncio.Redis) -> int:
    """How many commands the release of three requests runs."""
    await queue.submit([submission(f"back-{number}", 900) for number in range(3)])
    leases = (await claim(queue, 3, 10**6)).leases
    told = await count(client, queue.release([Release(lease) for lease in leases]))
    await queue.settle([answer(lease) for lease in (await claim(queue, 3, 10**6)).leases])
    return told


@pytest.mark.parametrize(("models", "each"), [(1, 10_000), (1_000, 2), pytest.param(1_000, 100, marks=LONG)])
async def test_what_waits_for_its_model_costs_the_others_nothing(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, models: int, each: int
) -> None:
    await costs(queue, client)  # scripts are loaded
    await given_back(queue, client)
    alone = *await costs(queue, client), await given_back(queue, client)
    await put_off(queue, models, each)
    assert (await queue.count_requests()).waiting_for_model == models * each
    assert (*await costs(queue, client), await given_back(queue, client)) == alone


@pytest.mark.parametrize("others", [2_000, pytest.param(100_000, marks=LONG)])
async def test_a_recall_touches_what_it_moves_and_nothing_that_waits_for_other_models(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, others: int
) -> None:
    async def recalled() -> tuple[int, int, int]:
        """Of a recall of five requests, of one that finds none, and of asking who waits."""
        await queue.submit([submission(f"mine-{number}", 900) for number in range(5)])
        leases = (await claim(queue, 5, 10**6)).leases
        await queue.release([Release(lease, missing_model="m-500x") for lease in leases])
        moving = await count(client, queue.return_waiting_for_models(["m-500x"]))
        nothing = await count(client, queue.return_waiting_for_models(["m-500x"]))
        told = await count(client, queue.count_waiting_by_model())
        back = (await claim(queue, 5, 10**6)).leases
        assert [lease.entry_id for lease in back] == [lease.entry_id for lease in leases]
        await queue.settle([answer(lease) for lease in back])
        return moving, nothing, told

    await recalled()  # scripts are loaded
    few = await recalled()
    await put_off(queue, 1_000, others // 1_000)
    assert await recalled() == few
    assert len(await queue.count_waiting_by_model()) == 1_000


async def test_what_is_kept_by_model_goes_with_the_last_that_waits(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    await put_off(queue, 3, 300)
    await queue.sweep()
    while (await queue.return_waiting_for_models(["m-0", "m-1", "m-2"])).remaining_count:
        pass
    await queue.settle([answer(lease) for lease in (await claim(queue, 1000, 10**6)).leases])
    await assert_drained(client, NAMES, NAMES.result_list)
