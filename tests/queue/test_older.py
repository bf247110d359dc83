"""What an older version left is taken over, also beside one that still runs: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio

from dispatcher.core.sequences.decisions import SequenceTerms, TurnGranted
from dispatcher.core.sequences.turns import Turn
from dispatcher.ports import Lease, QueueCounts, Release, SettleStatus
from dispatcher.queue.embedded import embedded_valkey
from tests.queue.aging import age_redis
from tests.queue.known import assert_only_known_keys
from tests.queue.made import NAMES, OwnerAndDesk, answer, claim, ids, member, permit, queues
from tests.queue.servers import Server

OLDER = Path(__file__).parent / "older"
LEFT = {f"r-{number:02}" for number in range(12)}
ANSWERED = {"r-01", "r-02"}
"""Their results lie in the list: the second is among the dead as well."""
FOUND = QueueCounts(pending=5, leased=3, delayed=2, dead=1)


async def load(client: redis.asyncio.Redis) -> None:
    """Write what was recorded, as if that were of just now."""
    told = json.loads((OLDER / "4b348e7.json").read_text())
    by_s = time.time() - told["at"]
    timed = {f"{NAMES.queue_prefix}:{name}" for name in ("leases", "delayed", "beats", "dead:age")}
    for key, (kind, value) in ((key, each.values()) for key, each in told["keys"].items()):
        if kind == "zset":
            moved = by_s if key in timed else 0.0
            await client.zadd(key, {raw(name): score + moved for name, score in value})
        elif kind == "hash":
            await client.hset(key, mapping={raw(field): raw(one) for field, one in value})
        elif kind == "list":
            await client.rpush(key, *map(raw, value))
        else:
            await client.set(key, raw(value), ex=None if key == NAMES.paused_key else 1000)
    control = f"{NAMES.queue_prefix}:control"
    for field in ("read_at", "overload_at", "overload_until", "tick", "beats_tick"):
        at: Any = await client.hget(control, field)
        await client.hset(control, field, f"{float(at) + by_s:.6f}")


def raw(text: str) -> bytes:
    return base64.b64decode(text)


async def work_off(*owners: OwnerAndDesk, limit: int) -> Counter[str]:
    """Claim and answer until nothing comes any more; how often each request was answered."""
    done: Counter[str] = Counter()
    quiet = 0
    while quiet < 3:
        quiet += 1
        for queue in owners:
            await queue.sweep()
            lost = (await queue.renew([])).lease_counts.lost_units
            told = await queue.claim(2, f"nonce-{random.random()}", permit(limit, lost=lost))
            assert told.lease_counts.live_units <= limit
            if told.leases:
                quiet = 0
                assert set(await queue.settle([answer(lease) for lease in told.leases])) == {
                    SettleStatus.DONE
                }
                done.update(ids(lease.member for lease in told.leases))
    return done


async def results(client: redis.asyncio.Redis) -> Counter[str]:
    return Counter(json.loads(one)["id"] for one in await client.lrange(NAMES.result_list, 0, -1))


async def test_a_redis_that_an_older_version_left_is_worked_off(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    await load(client)
    async with queues(any_server.url, "a", "b") as (first, second):
        assert await first.count_requests() == FOUND
        assert await first.paused() == ("me", "the upgrade")
        assert (await claim(first)).leases == []
        replicas = (await first.take_snapshot()).replicas
        assert {each.owner: each.leases for each in replicas} == {"a": 0, "older-1": 2, "older-2": 1}
        assert await first.check_cancelled([("r-11", "token-11"), ("r-10", "token-10")]) == [True, False]
        shared = (await first.renew([])).shared
        assert (shared.limit, shared.is_paused) == (9, True)
        assert shared.overload is not None
        assert shared.overload.in_flight == 3
        await first.resume()
        told = await second.claim(9, "n", permit(7, lost=2))
        assert len(told.leases) == 4, "three of the older owners' still count"
        assert (await first.claim(9, "n", permit(7, lost=2))).leases == []
    async with queues(any_server.url, "c", "d") as (third, fourth):
        await gone(client, "older-1", "older-2", "a", "b")
        await client.zadd(f"{NAMES.queue_prefix}:delayed", dict.fromkeys(await delayed(client), 0), xx=True)
        assert (await third.sweep()).reclaimed_count == 7
        done = await work_off(third, fourth, limit=4)
        assert done == dict.fromkeys(LEFT - ANSWERED, 1)
        assert await results(client) == dict.fromkeys(LEFT, 1)
        assert await third.count_requests() == QueueCounts(pending=0, leased=0, delayed=0, dead=1)
        (dead,) = await third.dead_newest(9)
        assert (ids([dead.member]), dead.reason) == (["r-02"], "it broke")
    await assert_only_known_keys(client, NAMES)


async def delayed(client: redis.asyncio.Redis) -> Sequence[bytes]:
    found: list[bytes] = await cast("Any", client).zrange(f"{NAMES.queue_prefix}:delayed", 0, -1)
    return found


async def gone(client: redis.asyncio.Redis, *owners: str) -> None:
    """These have not been heard of for long, while others swept."""
    now = f"{time.time():.6f}"
    await client.hset(f"{NAMES.queue_prefix}:control", mapping={"tick": now, "beats_tick": now})
    await client.hdel(f"{NAMES.queue_prefix}:control", "beats_quiet_until", "quiet_until")
    await client.zadd(f"{NAMES.queue_prefix}:beats", dict.fromkeys(owners, 0))


class Gone:
    """A prover: the owners of an embedded queue's directory have ended."""

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        return [owner for owner in owners if owner.startswith("older")]


async def test_a_directory_that_an_older_version_left_is_worked_off(tmp_path: Path) -> None:
    shutil.copytree(OLDER / "embedded", tmp_path / "data" / "appendonlydir")
    (tmp_path / "data").chmod(0o700)
    async with (
        embedded_valkey(tmp_path / "data") as url,
        queues(url, "a", dead_owner_detector=Gone()) as (queue,),
    ):
        client = queue.backend.scripts.client
        assert await queue.count_requests() == FOUND
        # The file has the times of its recording, which are long past by now, or will be.
        await client.zadd(f"{NAMES.queue_prefix}:delayed", dict.fromkeys(await delayed(client), 0), xx=True)
        await queue.resume()
        swept = await queue.sweep()
        assert (swept.reclaimed_count, swept.due_count) == (3, 2), "all that was delayed has long been due"
        assert await work_off(queue, limit=4) == dict.fromkeys(LEFT - ANSWERED, 1)
        assert await results(client) == dict.fromkeys(LEFT, 1)
        assert (await queue.count_requests()).dead == 1


class Older:
    """An owner that runs the older version's code, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, step: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([step, *args]).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())


@asynccontextmanager
async def older(url: str, owner: str) -> AsyncIterator[Older]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(OLDER / "worker.py"),
        *(url, NAMES.queue, NAMES.result_list, owner),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(OLDER / "4b348e7.zip"), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        yield Older(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


@pytest.mark.parametrize("seed", range(3))
async def test_an_older_replica_beside_us_never_passes_the_limit_with_us(
    any_server: Server, client: redis.asyncio.Redis, seed: int
) -> None:
    """A rolling upgrade: both claim, answer, give back, sweep and die. Each request gets one result."""
    drawn = random.Random(seed)
    async with older(any_server.url, "older-1") as old, queues(any_server.url, "a", "b") as ours:
        requests = {f"r-{number:03}" for number in range(60)}
        await client.zadd(NAMES.queue, {member(name): number for number, name in enumerate(sorted(requests))})
        theirs: set[int] = set()
        held: list[dict[int, Lease]] = [{}, {}]
        for step in range(150):
            limit, lost = drawn.choice([2, 5, 8]), int(await client.hget(CONTROL, "lost") or 0)
            running = len(theirs) + sum(map(len, held))
            who = drawn.randrange(3)
            kind = drawn.choice(["claim", "claim", "end", "end", "release", "renew", "sweep"])
            if kind == "claim" and who == 2:
                told = await old.do("claim", 3, f"n-{step}", limit, lost)
                theirs |= {int(entry) for entry in told["members"]}
                assert told["live"] == running + len(told["members"]) <= max(limit, running)
            elif kind == "claim":
                claimed = await ours[who].claim(3, f"n-{step}", permit(limit, lost=lost))
                held[who] |= {lease.entry_id: lease for lease in claimed.leases}
                assert claimed.lease_counts.live_units == running + len(claimed.leases) <= max(limit, running)
            elif kind in ("end", "release") and who == 2 and theirs:
                entry = theirs.pop()
                done = await old.do(*(("settle", entry) if kind == "end" else ("release", entry, 0.0)))
                assert done == "done"
            elif kind in ("end", "release") and who < 2 and held[who]:
                lease = held[who].popitem()[1]
                ended = (
                    ours[who].settle([answer(lease)])
                    if kind == "end"
                    else ours[who].release([Release(lease, delay_s=drawn.choice([0.0, 0.01]))])
                )
                assert list(await ended) == [SettleStatus.DONE]
            elif kind == "renew":
                assert await (old.do("renew") if who == 2 else lost_of(ours[who], held[who])) == []
            elif kind == "sweep":
                await (old.do("sweep") if who == 2 else ours[who].sweep())
        await gone(client, "older-1")  # killed with what it holds
        assert (await ours[0].sweep()).reclaimed_count == len(theirs)
        for queue, leases in zip(ours, held, strict=True):
            await queue.settle([answer(lease) for lease in leases.values()])
        await work_off(*ours, limit=8)
        if theirs:
            assert await old.do("settle", theirs.pop()) == "lost"
        assert await results(client) == dict.fromkeys(requests, 1)


async def test_an_older_replica_gives_a_turn_back_or_ends_it_and_the_next_one_goes(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    async with older(any_server.url, "older-1") as old, queues(any_server.url, "a") as (queue,):
        await client.zadd(NAMES.queue, {member(f"r-{number}"): number for number in range(3)})
        turn, terms = Turn("s"), SequenceTerms()
        leases = (await claim(queue)).leases
        await queue.claim_turns([(lease, turn) for lease in leases], terms)
        await queue.release([Release(leases[0])])

        told = await old.do("claim", 9, "n-1", 9, 0)
        assert list(told["members"]) == [str(leases[0].entry_id)], "it sees nothing of what waits"
        assert await old.do("release", leases[0].entry_id, 0.0) == "done"
        (again,) = (await claim(queue)).leases
        (said,) = (await queue.claim_turns([(again, turn)], terms)).decisions
        assert said == TurnGranted(0, "", b"", True), "it has kept its seat"
        await queue.release([Release(again)])

        await old.do("claim", 9, "n-2", 9, 0)
        assert await old.do("settle", leases[0].entry_id) == "done"
        with any_server.client() as raw:
            age_redis(raw, NAMES, 31)
        assert (await queue.sweep()).turn_count == 1
        for expected in (leases[1], leases[2]):
            (lease,) = (await claim(queue)).leases
            assert lease.entry_id == expected.entry_id
            await queue.claim_turns([(lease, turn)], terms)
            await queue.settle([answer(lease)])
        assert await results(client) == {"r-0": 1, "r-1": 1, "r-2": 1}


async def test_an_older_replica_neither_sends_nor_loses_what_waits_for_its_model(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    async with older(any_server.url, "older-1") as old, queues(any_server.url, "a") as (queue,):
        await client.zadd(NAMES.queue, {member(f"r-{number}"): number for number in range(3)})
        leases = (await claim(queue)).leases
        await queue.release([Release(lease, missing_model="m") for lease in leases])
        told = await old.do("claim", 9, "n-1", 9, 0)
        assert told["members"] == {}, "it sees nothing of what waits"
        assert await old.do("sweep") == 0
        assert await queue.count_waiting_by_model() == {"m": 3}

        await queue.return_waiting_for_models(["m"])
        told = await old.do("claim", 1, "n-2", 9, 0)
        assert list(told["members"]) == [str(leases[0].entry_id)], "and all of what is back"
        assert await old.do("release", leases[0].entry_id, 0.0) == "done"
        told = await old.do("claim", 2, "n-3", 9, 0)
        assert await old.do("release", leases[0].entry_id, 10.0) == "done"
        assert await old.do("settle", leases[1].entry_id) == "done"
        assert await queue.count_waiting_by_model() == {}

        await client.zadd(f"{NAMES.queue_prefix}:delayed", dict.fromkeys(await delayed(client), 0), xx=True)
        assert (await queue.sweep()).due_count == 1
        back = (await claim(queue)).leases
        assert [lease.entry_id for lease in back] == [leases[0].entry_id, leases[2].entry_id]
        await queue.settle([answer(lease) for lease in back])
        assert await results(client) == {"r-0": 1, "r-1": 1, "r-2": 1}
    await assert_only_known_keys(client, NAMES)


CONTROL = f"{NAMES.queue_prefix}:control"


async def lost_of(queue: OwnerAndDesk, leases: dict[int, Lease]) -> list[int]:
    return list((await queue.renew(list(leases.values()))).lost_entry_ids)
