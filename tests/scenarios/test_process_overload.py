"""A 429 closes the gate of all replicas, lowers the learned capacity, and affects no other user."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.scenarios.processes import NEARLY_FULL, Stage, World
from tests.support import has_passed, wait_until_sync

REFUSAL = {"kind": "status", "status": 429, "reason": "rejected-saturated", "body": "saturated"}
TRANSIT_S = 0.25
"""Time within which requests arrive that were sent before all replicas knew of the refusal."""


def record_scrapes(world: World, scraped_at: list[float]) -> list[float]:
    """Append the time of the newest scrape to the list. Must be called more often than scrapes happen."""
    newest = world.observed()["scraped_at"]
    if newest is not None and newest not in scraped_at:
        scraped_at.append(newest)
    return scraped_at


def test_no_replica_sends_after_a_refusal_until_a_newer_reading(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.5)
    settings = stage.settings(world, signals={"interval_s": 3.0})
    replicas = [stage.dispatcher(settings) for _ in range(2)]

    def both_run_requests() -> bool:
        stage.producer.submit(2)
        return all(each.status()["running"] for each in replicas)

    wait_until_sync(both_run_requests, 20, what="both replicas to run requests", every_s=0.05)
    stage.producer.submit(3000)
    wait_until_sync(lambda: world.in_flight() >= NEARLY_FULL, 15, what="the idle capacity to be used")
    scraped_at: list[float] = []
    count_before = len(record_scrapes(world, scraped_at))
    wait_until_sync(lambda: len(record_scrapes(world, scraped_at)) > count_before, 10, what="a reading")

    def find_scrapes_after(at: float) -> list[float]:
        return filter_after(record_scrapes(world, scraped_at), at)

    def find_arrivals_after(at: float) -> list[float]:
        return filter_after([entry.arrived_at for entry in world.log()], at)

    # The replicas scrape alternately, and one of the two intervals may be short: repeat until one is long.
    times_to_scrape_s = [0.0]
    while max(times_to_scrape_s) <= 2 * TRANSIT_S and len(times_to_scrape_s) <= 8:
        next_try_at = time.monotonic() + 0.4 * (len(times_to_scrape_s) - 1)
        wait_until_sync(has_passed(next_try_at), 10, what="another moment of the scrape interval")
        last_number = world.log()[-1].number
        world.control(gateway={"answer": REFUSAL, "times": 1})
        refused_at = min(wait_until_sync(partial(find_refusals, world, last_number), 10, what="a refusal"))
        scraped_after = min(wait_until_sync(partial(find_scrapes_after, refused_at), 10, what="a reading"))
        wait_until_sync(partial(find_arrivals_after, scraped_after), 10, what="more requests to be sent")
        closed_at = refused_at + TRANSIT_S
        assert not [e for e in world.log() if closed_at < e.arrived_at < scraped_after], (
            "sent without a new reading"
        )
        times_to_scrape_s.append(scraped_after - refused_at)
    print(f"from the refusals to the next scrape: {times_to_scrape_s[1:]}")
    assert max(times_to_scrape_s) > 2 * TRANSIT_S, "otherwise this shows nothing"
    assert any(event["reason"] == "backpressure" for each in replicas for event in each.events("gate"))


def find_refusals(world: World, number: int) -> list[float]:
    return [e.ended_at for e in world.log(number) if e.status == 429 and e.ended_at is not None]


def filter_after(times: list[float], at: float) -> list[float]:
    return [time for time in times if time > at]


@pytest.mark.long
def test_capacity_of_a_third_of_the_declared_one_is_learned(stage: Stage) -> None:
    """The short form runs in virtual time (test_virtual_overload)."""
    world = stage.world(slots=11, declared=32, queue_limit=8, seconds=0.5)
    stage.producer.submit(12_000)
    stage.dispatcher(stage.settings(world))
    first_count = wait_until_sync(lambda: world.observed()["scrapes"], 20, what="a first reading")
    wait_until_sync(
        lambda: world.observed()["scrapes"] >= first_count + 30,
        50,
        what="30 readings",
        every_s=0.1,
    )
    observed = world.observe_for(60.0)
    answers = observed["gateway"]["answers"]
    refused, served = answers.get("429", 0), answers["200"]
    print(f"{refused} refused, {served} served, {observed['pool']['running']}")
    assert refused / (refused + served) < 0.025
    assert observed["pool"]["running"]["mean"] >= 0.85 * 11


def test_user_whose_requests_are_always_refused_affects_no_other(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.2)
    world.control(gateway={"answer": REFUSAL, "match": "greedy"})
    producer = stage.producer
    dispatcher = stage.dispatcher(stage.settings(world))
    # An earlier deadline puts all of them before the others in the queue.
    greedy = producer.submit(200, prefix="greedy", metadata={"userid": "greedy"}, deadline_s=3000)
    modest = producer.submit(300, prefix="modest", metadata={"userid": "modest"})
    producer.wait_for_all(modest, 30)
    assert set(producer.results) == set(modest)
    assert producer.count_results() == {"200": 300}
    refused = [entry for entry in world.log() if entry.status == 429]
    print(f"{len(refused)} refused, {dispatcher.status()}")
    assert {entry.tenant for entry in refused} == {"greedy"}
    counts = producer.count_requests()
    assert counts["dead"] == 0
    assert counts["pending"] + counts["delayed"] + counts["leased"] == len(greedy)
    assert dispatcher.status()["max_sys"] >= 12, "refusals of one user do not lower the capacity"
