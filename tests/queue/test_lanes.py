"""Requests that a claim passes over cost it nothing, however many wait in a lane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path

import pytest
import redis.asyncio

import dispatcher.queue
from dispatcher.features.models.counts import ModelCounts
from dispatcher.features.models.queue import waiting
from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.sequences import turns
from dispatcher.features.sequences.decisions import (
    SequenceTerms,
    TurnGranted,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import Turn
from dispatcher.queue.contract import DeadLetter, Lease, Release
from dispatcher.queue.keys import CLOSED_LANES
from dispatcher.queue.lua_files import LUA_FEATURES
from dispatcher.requests.found_request import LOCATION_BY_LANE
from dispatcher.requests.lanes import Lane
from tests.queue.factories import (
    NAMES,
    OwnerAndAdmin,
    answer,
    claim,
    claim_started,
    count_commands_by_name,
    queues,
    start_requests,
    submission,
)
from tests.queue.key_checks import assert_drained
from tests.queue.servers import Server

LONG = (pytest.mark.long, pytest.mark.timeout(1800))
PASSED = 600
OTHERS = 20


@pytest.fixture
async def queue(any_server: Server, client: object) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a") as (one,):
        yield one


async def count_claim_commands(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, room: int
) -> tuple[int, list[float]]:
    """Return the number of commands that one claim runs on the server, including those of its script, and the
    leased scores."""
    await client.config_resetstat()
    claimed = await claim(queue, 5, 5_000, max_per_lane={Lane.SUSPECTS: room})
    stats = await client.info("commandstats")
    return sum(reply["calls"] for reply in stats.values()), [lease.score for lease in claimed.leases]


async def test_claim_costs_the_same_with_many_passed_over_requests(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission(f"others-{number}", 4_000_000_000) for number in range(OTHERS)])
    alone = [await count_claim_commands(queue, client, room) for room in (0, 0)]
    await queue.submit([submission(f"passed-{number:04}", 3_000_000_000) for number in range(PASSED)])
    for _ in range(2):  # their owner dies twice, so they are suspects
        held = []
        while leases := (await claim(queue, 256, 5_000, max_per_lane={Lane.SUSPECTS: PASSED})).leases:
            held += [lease.entry_id for lease in leases if lease.score < 4_000_000_000]
        names = {f"{entry}:a": 0 for entry in held}
        assert await client.zadd(f"{NAMES.queue_prefix}:leases", names, xx=True, ch=True) == PASSED
        while (await queue.sweep()).reclaimed_count:
            pass
    assert await client.zcard(f"{NAMES.queue_prefix}:suspects") == PASSED
    await queue.submit([submission(f"more-{number}", 4_000_000_001) for number in range(OTHERS)])
    passing = [await count_claim_commands(queue, client, room) for room in (0, 0)]
    assert [scores for _, scores in passing] == [[4_000_000_001.0] * 5] * 2
    # One more read: whether a returned request comes before the pending ones.
    assert max(count for count, _ in passing) <= max(count for count, _ in alone) + 1
    _, scores = await count_claim_commands(queue, client, 3)
    assert scores == [3_000_000_000.0] * 3 + [4_000_000_001.0] * 2


TERMS = SequenceTerms(max_waiting=10**6, max_idle_s=86_400)


async def count_commands(client: redis.asyncio.Redis, step: Awaitable[object]) -> int:
    """Return the number of commands that a step runs on the server."""
    return (await count_commands_by_name(client, step)).total()


async def count_independent_request_commands(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> tuple[int, int]:
    """Return the numbers for a claim of three requests without a sequence, and for their settlement."""
    await queue.submit([submission(f"single-{number}", 3_000_000_000) for number in range(3)])
    claimed: list[Lease] = []

    async def claim_turns() -> None:
        claimed.extend((await claim(queue, 3, 10**6)).leases)

    claims = await count_commands(client, claim_turns())
    assert [lease.score for lease in claimed] == [3_000_000_000.0] * 3
    return claims, await count_commands(client, queue.settle([answer(lease) for lease in claimed]))


async def claim_sequence_turns(queue: OwnerAndAdmin, names: Sequence[str]) -> list[Lease]:
    """Claim one request of each of these sequences, and its turn. Return the leases that were granted."""
    going: list[Lease] = []
    for at in range(0, len(names), 250):
        some = names[at : at + 250]
        await queue.submit([submission(f"{at + number:09}", 1_000) for number in range(len(some))])
        leases = (await claim(queue, 250, 10**6)).leases
        turns = [(lease, Turn(name)) for lease, name in zip(leases, some, strict=True)]
        verdicts = (await queue.claim_turns(turns, TERMS)).decisions
        going += [
            one for one, decisions in zip(leases, verdicts, strict=True) if isinstance(decisions, TurnGranted)
        ]
    return going


@pytest.mark.parametrize(
    ("in_one", "sequences"),
    [(1_000, 0), (0, 1_000), pytest.param(10_000, 0, marks=LONG), pytest.param(0, 100_000, marks=LONG)],
)
async def test_request_without_a_sequence_costs_the_same_beside_many_sequences(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, in_one: int, sequences: int
) -> None:
    await count_independent_request_commands(queue, client)  # loads the scripts
    alone = await count_independent_request_commands(queue, client)
    await claim_sequence_turns(queue, ["chat"] * in_one)
    names = [f"chat-{number}" for number in range(sequences)]
    await claim_sequence_turns(queue, names + names)
    waiting = await client.zcard(f"{NAMES.queue_prefix}:sequenced")
    assert waiting == max(0, in_one - 1) + sequences
    claims, settlements = await count_independent_request_commands(queue, client)
    assert claims <= alone[0]
    assert settlements <= alone[1]


async def test_turn_costs_the_same_with_many_waiting_requests(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    head: list[Lease]

    async def count_turn_commands() -> tuple[int, int, int]:
        """Return the numbers for the settlement of a running request, and for the claim and the turn of the
        next."""
        ended = answer(head.pop()).copy_with(extra=TurnEnd(Turn("chat")))
        settlement = await count_commands(client, queue.settle([ended]))

        async def claim_turns() -> None:
            head.extend((await claim(queue, 1, 10**6)).leases)

        claims = await count_commands(client, claim_turns())
        return (
            settlement,
            claims,
            await count_commands(client, queue.claim_turns([(head[0], Turn("chat"))], TERMS)),
        )

    head = await claim_sequence_turns(queue, ["chat"] * 5)
    await count_turn_commands()
    few = await count_turn_commands()
    await claim_sequence_turns(queue, ["chat"] * 1_000)
    assert await count_turn_commands() == few


def test_lanes_are_named_only_in_the_tables() -> None:
    """All other code uses these tables, so that a new lane needs no other change."""
    assert set(LOCATION_BY_LANE) == set(Lane)
    assert set(CLOSED_LANES) == {turns.LANE, waiting.LANE}
    room = Path(dispatcher.queue.__file__).parent
    named = {
        file.name
        for file in (*room.rglob("*.lua"), *room.rglob("*.py"))
        for text in (file.read_text(),)
        if "SUSPECTS" in text or "Whereabouts.SUSPECT" in text or "'S'" in text
    }
    assert named == {"common.lua", "keys.py"}


async def release_to_wait_for_models(queue: OwnerAndAdmin, models: int, each: int) -> None:
    """Let requests wait for their models. Requests of all models are mixed in the order."""
    total = models * each
    for at in range(0, total, 500):
        some = [submission(f"away-{at + number:06}", 1_000 + at) for number in range(min(500, total - at))]
        await queue.submit(some)
        leases = (await claim(queue, 500, 10**6)).leases
        assert len(leases) == len(some)
        await queue.release(
            [
                Release(lease, is_undelivered=True, extra=ModelWait(f"m-{(at + number) % models}"))
                for number, lease in enumerate(leases)
            ]
        )


async def count_release_commands(queue: OwnerAndAdmin, client: redis.asyncio.Redis) -> int:
    """Return the number of commands for the release of three requests."""
    await queue.submit([submission(f"back-{number}", 900) for number in range(3)])
    leases = (await claim(queue, 3, 10**6)).leases
    reply = await count_commands(client, queue.release([Release(lease) for lease in leases]))
    await queue.settle([answer(lease) for lease in (await claim(queue, 3, 10**6)).leases])
    return reply


@pytest.mark.parametrize(("models", "each"), [(1, 10_000), (1_000, 2), pytest.param(1_000, 100, marks=LONG)])
async def test_requests_that_wait_for_a_model_cost_other_requests_nothing(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, models: int, each: int
) -> None:
    await count_independent_request_commands(queue, client)  # loads the scripts
    await count_release_commands(queue, client)
    alone = (
        *await count_independent_request_commands(queue, client),
        await count_release_commands(queue, client),
    )
    await release_to_wait_for_models(queue, models, each)
    assert (await queue.count_requests()).of(ModelCounts).waiting == models * each
    assert (
        *await count_independent_request_commands(queue, client),
        await count_release_commands(queue, client),
    ) == alone


@pytest.mark.parametrize("others", [2_000, pytest.param(100_000, marks=LONG)])
async def test_return_reads_only_requests_of_the_named_models(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, others: int
) -> None:
    async def count_return_commands() -> tuple[int, int, int]:
        """Return the numbers for a return of five requests, for one that finds none, and for a count."""
        await queue.submit([submission(f"mine-{number}", 900) for number in range(5)])
        leases = (await claim(queue, 5, 10**6)).leases
        await queue.release([Release(lease, extra=ModelWait("m-500x")) for lease in leases])
        moving = await count_commands(client, queue.return_waiting_for_models(["m-500x"]))
        nothing = await count_commands(client, queue.return_waiting_for_models(["m-500x"]))
        reply = await count_commands(client, queue.count_waiting_by_model())
        back = (await claim(queue, 5, 10**6)).leases
        assert [lease.entry_id for lease in back] == [lease.entry_id for lease in leases]
        await queue.settle([answer(lease) for lease in back])
        return moving, nothing, reply

    await count_return_commands()  # loads the scripts
    few = await count_return_commands()
    await release_to_wait_for_models(queue, 1_000, others // 1_000)
    assert await count_return_commands() == few
    assert len(await queue.count_waiting_by_model()) == 1_000


async def test_keys_by_model_are_deleted_with_the_last_waiting_request(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await release_to_wait_for_models(queue, 3, 300)
    await queue.sweep()
    while (await queue.return_waiting_for_models(["m-0", "m-1", "m-2"])).remaining_count:
        pass
    await queue.settle([answer(lease) for lease in (await claim(queue, 1000, 10**6)).leases])
    await assert_drained(client, NAMES, NAMES.result_list)


async def run_requests(queue: OwnerAndAdmin, client: redis.asyncio.Redis) -> dict[str, int]:
    """Let three requests without progress run. Return the number of commands of each step."""
    await queue.submit([submission(f"plain-{number}", 3_000_000_000) for number in range(3)])
    leases: list[Lease] = []

    async def claim_plain(room: int) -> None:
        leases[:] = (await claim(queue, 3, max_per_lane={Lane.SUSPECTS: 1, Lane.STARTED: room})).leases
        assert [lease.score for lease in leases] == [3_000_000_000.0] * 3

    counts = {"claim": await count_commands(client, claim_plain(0))}
    counts["renew"] = await count_commands(client, queue.renew(leases))
    counts["release"] = await count_commands(client, queue.release([Release(each) for each in leases]))
    counts["claim again"] = await count_commands(client, claim_plain(0))
    counts["sweep"] = await count_commands(client, queue.sweep())
    counts["settle"] = await count_commands(client, queue.settle([answer(each) for each in leases]))
    return counts


async def test_no_step_touches_progress_without_requests_that_have_some(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await run_requests(queue, client)  # loads the scripts
    async with client.monitor() as monitor:
        await queue.submit([submission(f"r-{number}") for number in range(4)])
        leases = await claim_started(queue)
        await queue.renew(leases)
        await queue.release([Release(leases[0]), Release(leases[1], delay_s=60)])
        await queue.sweep()
        await queue.settle([answer(leases[2])])
        await queue.move_to_dead_letters([DeadLetter(answer(leases[3]), "why")])
        await claim_started(queue)
        await client.set("the-end", "", ex=60)
        touched = set()
        async with asyncio.timeout(10):
            async for event in monitor.listen():
                if "the-end" in event["command"]:
                    break
                # Commands of scripts only, because each call of a script names all keys.
                if event["client_type"] == "lua":
                    touched |= set(event["command"].split())
    assert f"{NAMES.queue_prefix}:entries" in touched
    assert not touched & {
        f"{NAMES.queue_prefix}:{suffix}" for suffix, _ in LUA_FEATURES["slices"].keys.values()
    }


async def test_started_requests_cost_other_requests_next_to_nothing(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await run_requests(queue, client)  # loads the scripts
    alone = await run_requests(queue, client)
    await start_requests(queue, *(f"r-{number:03}" for number in range(250)))
    beside = await run_requests(queue, client)
    same = ("release", "settle")
    assert {step: beside[step] for step in same} == {step: alone[step] for step in same}
    # The types of two keys.
    assert all(beside[step] <= alone[step] + 2 for step in alone)
    for lease in await claim_started(queue):
        await queue.settle([answer(lease)])
    await queue.sweep()
    assert not await client.hexists(f"{NAMES.queue_prefix}:control", f"progress:{NAMES.queue}")
    after = await run_requests(queue, client)
    # How many commands a sweep needs depends on the time since the last one.
    assert after | {"sweep": 0} == alone | {"sweep": 0}
    await assert_drained(client, NAMES, NAMES.result_list)
