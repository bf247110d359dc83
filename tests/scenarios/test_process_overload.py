"""What a 429 does: it closes the gate for all, it teaches, and it stops no one but whom it concerns."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.scenarios.processes import Stage, World
from tests.support import passed, wait_until_sync

REFUSAL = {"kind": "status", "status": 429, "reason": "rejected-saturated", "body": "saturated"}
ON_THE_WIRE_S = 0.25
"""What was sent before the refusal had arrived, and been told to the other replicas, arrives within this."""


def scrapes(world: World, seen: list[float]) -> list[float]:
    """The times of the scrapes so far, when this is called more often than there are any."""
    newest = world.observed()["scraped_at"]
    if newest is not None and newest not in seen:
        seen.append(newest)
    return seen


def test_after_a_refusal_no_replica_sends_until_a_newer_reading(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.5)
    settings = stage.settings(world, signals={"interval_s": 3.0})
    replicas = [stage.dispatcher(settings) for _ in range(2)]

    def both_take_part() -> bool:
        stage.producer.submit(2)
        return all(each.status()["running"] for each in replicas)

    wait_until_sync(both_take_part, 20, what="both replicas to take part", every_s=0.05)
    stage.producer.submit(3000)
    wait_until_sync(lambda: world.in_flight() >= 30, 15, what="the slack to be filled")
    read: list[float] = []
    known = len(scrapes(world, read))
    wait_until_sync(lambda: len(scrapes(world, read)) > known, 10, what="a reading")

    def read_after(at: float) -> list[float]:
        return after(scrapes(world, read), at)

    def sent_after(at: float) -> list[float]:
        return after([entry.arrived_at for entry in world.log()], at)

    # The replicas read in turn, and one of the two pauses between may be short: try until one is long.
    unread_s = [0.0]
    while max(unread_s) <= 2 * ON_THE_WIRE_S and len(unread_s) <= 8:
        begins_at = time.monotonic() + 0.4 * (len(unread_s) - 1)
        wait_until_sync(passed(begins_at), 10, what="another moment")
        last = world.log()[-1].number
        world.control(gateway={"answer": REFUSAL, "times": 1})
        refused = min(wait_until_sync(partial(refusals, world, last), 10, what="a refusal"))
        later = min(wait_until_sync(partial(read_after, refused), 10, what="a reading"))
        wait_until_sync(partial(sent_after, later), 10, what="more work")
        told_at = refused + ON_THE_WIRE_S
        assert not [e for e in world.log() if told_at < e.arrived_at < later], "sent without a new reading"
        unread_s.append(later - refused)
    print(f"from the refusals to the next scrape: {unread_s[1:]}")
    assert max(unread_s) > 2 * ON_THE_WIRE_S, "otherwise this shows nothing"
    assert any(event["reason"] == "backpressure" for each in replicas for event in each.events("gate"))


def refusals(world: World, number: int) -> list[float]:
    return [e.ended_at for e in world.log(number) if e.status == 429 and e.ended_at is not None]


def after(times: list[float], at: float) -> list[float]:
    return [time for time in times if time > at]


@pytest.mark.long
def test_a_pool_of_a_third_of_its_declared_size_is_learned(stage: Stage) -> None:
    """Its short form is in virtual time (test_virtual_overload)."""
    world = stage.world(slots=11, declared=32, queue_limit=8, seconds=0.5)
    stage.producer.submit(12_000)
    stage.dispatcher(stage.settings(world))
    begun = wait_until_sync(lambda: world.observed()["scrapes"], 20, what="a first reading")
    wait_until_sync(
        lambda: world.observed()["scrapes"] >= begun + 30,
        50,
        what="30 readings",
        every_s=0.1,
    )
    seen = world.mean_in_flight(60.0)
    answers = seen["gateway"]["answers"]
    refused, served = answers.get("429", 0), answers["200"]
    print(f"{refused} refused, {served} served, {seen['pool']['running']}")
    assert refused / (refused + served) < 0.025
    assert seen["pool"]["running"]["mean"] >= 0.85 * 11


def test_a_tenant_that_is_always_refused_stops_nobody_else(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.2)
    world.control(gateway={"answer": REFUSAL, "match": "greedy"})
    producer = stage.producer
    one = stage.dispatcher(stage.settings(world))
    # An earlier deadline: all of them lie before the others.
    greedy = producer.submit(200, prefix="greedy", metadata={"userid": "greedy"}, deadline_s=3000)
    modest = producer.submit(300, prefix="modest", metadata={"userid": "modest"})
    producer.wait_for_all(modest, 30)
    assert set(producer.results) == set(modest)
    assert producer.answers() == {"200": 300}
    refused = [entry for entry in world.log() if entry.status == 429]
    print(f"{len(refused)} refused, {one.status()}")
    assert {entry.tenant for entry in refused} == {"greedy"}
    counts = producer.count_requests()
    assert counts["dead"] == 0
    assert counts["pending"] + counts["delayed"] + counts["leased"] == len(greedy)
    assert one.status()["max_sys"] >= 12, "it lowers nobody else's room"
