"""Two dispatchers on a bad day: every accepted request has one result, its own, at its own caller's."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dispatcher.ports import QueueUnavailableError
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from tests.chaos.oracle import CALLERS, Accepted, Caller, Gap, judge, lists_of
from tests.chaos.storm import Place, Scale, Storm, ground
from tests.queue.known import assert_only_known_keys
from tests.scenarios.processes import NAMES, Entry, Stage
from tests.support import wait_until

SLOTS = 32
LIMIT = 30
"""What the reserve leaves."""
LONG = Scale(
    requests=3000,
    strikes=60,
    lease_s=5.0,
    run_s=1.2,
    calm_s=3.5,
    asleep_s=15.0,
    away_s=4.0,
    pause_s=6.0,
    down_s=2.0,
    refused_for_s=40.0,
)
SHORT = replace(
    LONG,
    requests=300,
    strikes=9,
    lease_s=2.0,
    run_s=0.6,
    calm_s=1.5,
    asleep_s=4.0,
    away_s=1.0,
    pause_s=2.0,
    down_s=0.5,
    refused_for_s=10.0,
)


async def a_bad_day(folder: Path, seed: int, place: Place, engine: str, fsync: str, scale: Scale) -> None:
    begun_at = time.monotonic()
    with ground(place, engine, fsync, folder / "queue") as servers, ExitStack() as stack:
        stage = Stage(folder, servers.servers[0], stack)
        world = stage.world(slots=SLOTS, seed=seed)
        settings = stage.settings(
            world,
            max_sys=SLOTS,
            queue={"url": servers.url, "lease_s": scale.lease_s},
            signals={"interval_s": 0.5},
            retry={"base_s": 0.5, "max_s": 5.0, "max_attempts": 5},
            shutdown={"drain_s": 2.0},
        )
        for _ in range(2):
            await asyncio.to_thread(stage.dispatcher, settings)
        storm = Storm(stage, world, servers, scale, random.Random(seed))
        client, desk = connect(servers.url), RedisQueueAdmin(connect(servers.url), NAMES)
        callers = [
            Caller(f"caller-{number}", servers.url, NAMES, foreign=number == 0, seed=f"{seed}-{number}")
            for number in range(CALLERS)
        ]
        try:
            # What is submitted keeps a little ahead of the storm, so that there is work through all of it.
            async with asyncio.TaskGroup() as tasks:
                storming = tasks.create_task(storm.rage())
                for caller in callers:
                    tasks.create_task(
                        caller.call(
                            scale.requests // CALLERS,
                            lambda: 1.0 if storming.done() else 0.1 + storm.begun / scale.strikes,
                            scale.run_s,
                            scale.refused_for_s,
                        )
                    )
            book = {id_: one for caller in callers for id_, one in caller.book.items()}

            async def all_done() -> bool:
                try:
                    counts = await desk.count_requests()
                except QueueUnavailableError:
                    return False
                left: Any = await client.exists(NAMES.outbox_key)
                return bool(counts.pending + counts.leased + counts.delayed + left == 0)

            patience_s = 120 + scale.refused_for_s + scale.requests * scale.run_s / LIMIT
            await wait_until(all_done, patience_s, what="every request to be finished", every_s=0.2)
            for one in stage.dispatchers:
                storm.codes.append(await asyncio.to_thread(one.terminate))
            served = defaultdict(list)
            log = await asyncio.to_thread(world.log)
            for entry in log:
                if entry.ended_at is not None:
                    served[entry.id].append(entry.ended_at)
            verdict = judge(book, await lists_of(client, NAMES), storm.gaps, served)
            peak = world.observed()["gateway"]["batch"]["peak"]
            left, markers = await left_behind(client), await markers_of(client, book.values())
            certain = sum(one.certain for one in book.values())
            figures = {
                "accepted": certain,
                "not known": len(book) - certain,
                "once": verdict.once,
                **{kind: len(found) for kind, found in verdict.found.items()},
                "peak": peak,
                "codes": sorted(set(storm.codes)),
                "left": left,
                "markers": markers,
                "ends": dict(verdict.ends),
                "tried again": sum(len(times) > 1 for times in served.values()),
                "strikes": dict(storm.struck),
                "seconds": round(time.monotonic() - begun_at),
            }
            print(f"\nseed {seed} {place} {engine} {fsync}:", json.dumps(figures))
            complaints = stage.complaints()
            assert not complaints, "\n".join(complaints)
            assert verdict.faults == {}
            assert not left
            # That they are deleted may be forgotten, too; then they expire.
            assert not markers or not servers.durable
            assert set(storm.codes) == {0}
            # A claim that was forgotten frees its place, while what was claimed by it still runs.
            assert peak <= (LIMIT if servers.durable else 2 * LIMIT), crowd(log)
            # A run that forgot much proves little, whatever the mode allows.
            assert len(verdict.forgotten) + len(verdict.repeated) <= 0.1 * certain
            await assert_only_known_keys(client, NAMES, *(one.list for one in book.values()))
        finally:
            await desk.aclose()
            for each in (client, *callers):
                await each.aclose()


def crowd(log: list[Entry]) -> list[str]:
    """Who was at the gateway when the limit was passed first."""
    for one in log:
        at = one.arrived_at
        there = [each for each in log if each.arrived_at <= at and (each.ended_at or math.inf) > at]
        if len(there) > LIMIT:
            return [f"{each.id} for {at - each.arrived_at:.3f} s, in the end {each.status}" for each in there]
    return []


async def left_behind(client: Any) -> dict[str, int]:
    """What is in Redis of requests that have ended, the dead apart."""
    prefix = NAMES.queue_prefix
    dead = await client.zcard(f"{prefix}:dead")
    counts = {
        "entries": await client.hlen(f"{prefix}:entries") - dead,
        "members": await client.hlen(f"{prefix}:members") - dead,
        "owners": await client.hlen(f"{prefix}:owners"),
        "leases": await client.zcard(f"{prefix}:leases"),
        "delayed": await client.zcard(f"{prefix}:delayed"),
        "order": await client.zcard(f"{prefix}:delayed:order"),
        "outbox": await client.zcard(f"{prefix}:outbox"),
    }
    return {name: count for name, count in counts.items() if count}


async def markers_of(client: Any, requests: Iterable[Accepted]) -> int:
    """Markers that have outlived their requests. A submission that nobody answered may have left one."""
    certain = {one.id for one in requests if one.certain}
    found = 0
    for kind in (NAMES.active_key(""), f"{NAMES.queue_prefix}:cancel:"):
        pattern = f"{kind}*"
        async for key in client.scan_iter(pattern, count=1000):
            found += key.decode().removeprefix(kind).partition(":")[0] in certain
    return found


@pytest.mark.timeout(240)
async def test_a_bad_day_ends_with_one_result_for_each_request(tmp_path: Path) -> None:
    await a_bad_day(tmp_path, 1, "alone", "valkey", "no", SHORT)


WAYS: tuple[Place, ...] = ("alone", "cluster", "alone", "sentinel", "cluster")


def way_of(seed: int) -> tuple[Place, str, str]:
    """20 seeds are every way with both engines and both modes."""
    return WAYS[(seed - 1) // 4 % 5], ("redis", "valkey")[seed % 2], ("always", "everysec")[seed // 2 % 2]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 21))
async def test_bad_days_end_with_one_result_for_each_request(tmp_path: Path, seed: int) -> None:
    await a_bad_day(tmp_path, seed, *way_of(seed), LONG)


def test_20_seeds_are_every_way() -> None:
    ways = {way_of(seed) for seed in range(1, 21)}
    assert len(ways) == 3 * 2 * 2


def result(one: Accepted, end: str = "200", payload: str | None = None) -> bytes:
    said = {"status_code": int(end)} if end.isdigit() else {"error_code": end}
    return json.dumps({"id": one.id, "payload": one.payload if payload is None else payload} | said).encode()


def test_the_oracle_sees_each_fault_and_nothing_else() -> None:
    names = ("good", "missing", "twice", "elsewhere", "echo", "end", "cancelled")
    book = {name: Accepted(name, "mine", f"payload of {name}", "plain", at=10.0) for name in names}
    book["unknown"] = Accepted("unknown", "mine", "", "plain", certain=False, at=10.0)
    book["cancelled"].kind = "cancelled"
    mine = [
        result(book["good"]),
        result(book["twice"]),
        result(book["twice"]),
        result(book["echo"], payload=book["good"].payload),
        result(book["end"], "DELIVERIES_EXHAUSTED"),
        result(book["cancelled"], "CANCELLED"),
    ]
    verdict = judge(book, {"mine": mine, "yours": [result(book["elsewhere"])]})
    assert {kind: [each.split()[0] for each in found] for kind, found in verdict.faults.items()} == {
        "missing": ["missing", "elsewhere"],
        "twice": ["twice"],
        "misdelivered": ["elsewhere"],
        "wrong": ["echo", "end"],
    }
    assert verdict.once == 4


def test_what_a_server_may_forget_excuses_only_what_it_was_told_at_that_time() -> None:
    book = {
        name: Accepted(name, "mine", "", "plain", at=at) for name, at in {"then": 10.0, "now": 20.0}.items()
    }
    gaps = [Gap(9.0, 11.0)]
    lost = judge(book, {"mine": []}, gaps)
    assert (lost.forgotten, lost.missing) == (["then"], ["now"])
    repeated = judge(book, {"mine": [result(one) for one in book.values() for _ in range(2)]}, gaps)
    assert (repeated.repeated, repeated.twice) == (["then"], ["now"])
    assert judge(book, {"mine": []}, gaps, served={"now": [10.5]}).missing == []
