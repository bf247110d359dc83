"""A 429 closes the gate for all until a newer reading, teaches, and stops no one but whom it concerns."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from dispatcher.core.gateway.outcome import Outcome, Overloaded, RetryPolicy, classify_answer
from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

TOLD_S = 0.01
"""A refusal takes 3 ms back to its replica; the others hear of it at their next step in the queue."""


def refuse(stage: Stage, times: int, retry_after: str | None = None) -> None:
    """Have the gateway refuse the next requests."""
    left = times

    async def fault(request: Request) -> Outcome | None:
        nonlocal left
        if left == 0:
            return None
        left -= 1
        await asyncio.sleep(2 * stage.setting.way_s)
        headers = {"x-llm-d-request-dropped-reason": "rejected-saturated"}
        if retry_after is not None:
            headers["retry-after"] = retry_after
        return classify_answer(429, headers, b"", 0.0)

    stage.fault = fault


def refusals(stage: Stage, prefix: str = "") -> list[float]:
    return [t.ended_at for t in stage.tries if isinstance(t.outcome, Overloaded) and t.id.startswith(prefix)]


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(scrape_s=3.0)
async def test_after_a_refusal_nobody_sends_until_a_newer_reading(stage: Stage, replicas: int) -> None:
    await stage.submit(3000)
    await asyncio.sleep(10.1)
    refuse(stage, 1)
    await stage.until(lambda: refusals(stage), 5)
    refused_at = refusals(stage)[0]
    phases = [3.0 * index / replicas for index in range(replicas)]
    newer_at = min(phase + 3.0 * (int((refused_at - phase) / 3.0) + 1) for phase in phases)
    assert newer_at - refused_at > 0.2, "otherwise this shows nothing"
    await asyncio.sleep(newer_at + 2 - stage.now)
    assert not stage.sent(refused_at + TOLD_S, newer_at), "nothing on the old reading"
    assert stage.sent(newer_at, newer_at + 0.5), "and again after the new one"
    assert len(refusals(stage)) == 1
    assert set(stage.statuses()) == {200}


@pytest.mark.parametrize("retry_after", ["86400", "99999999999999999999"])
@scenario(replicas=2, retry=RetryPolicy(max_s=3.0))
async def test_one_answer_that_asks_for_a_day_stops_nobody_for_longer_than_retry_max_s(
    stage: Stage, retry_after: str
) -> None:
    await stage.submit(200)
    refuse(stage, 1, retry_after=retry_after)
    await stage.until(lambda: refusals(stage), 5)
    refused_at = refusals(stage)[0]
    await asyncio.sleep(2.5)
    stage.kill(0)
    stage.start(0)  # nor does a restart wait longer: what is told through the queue is cut as well
    await stage.until_answered(15)
    assert not stage.sent(refused_at + TOLD_S, refused_at + 3.0 - TOLD_S), "so long it is waited for"
    assert set(stage.statuses()) == {200}


@scenario(replicas=3)
async def test_retry_after_is_waited_for_by_all(stage: Stage) -> None:
    await stage.submit(3000)
    await asyncio.sleep(5)
    refuse(stage, 1, retry_after="7")
    await stage.until(lambda: refusals(stage), 5)
    refused_at = refusals(stage)[0]
    await asyncio.sleep(1.1)  # who has nothing to ask the queue hears of it with its next reading
    assert stage.reasons() == {Reason.BACKPRESSURE}
    await asyncio.sleep(10)
    over_at = refused_at + 7.0 - 1e-6  # floats
    assert not stage.sent(refused_at + TOLD_S, over_at)
    assert stage.sent(over_at, over_at + 0.2)


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(slots=33, true_slots=11, queue_limit=8)
async def test_pool_of_a_third_of_its_declared_size_is_learned(stage: Stage, replicas: int) -> None:
    await stage.submit(6000)
    await asyncio.sleep(30.5)
    sent, refused = len(stage.tries), len(refusals(stage))
    assert refused, "otherwise this shows nothing"
    running = 0.0
    for _ in range(200):
        await asyncio.sleep(0.5)
        stage.road.advance_world()
        running += stage.world.observe_pool().running / 200
    per_1000 = 1000 * (len(refusals(stage)) - refused) / (len(stage.tries) - sent)
    print(f"{refused} refused while learning, then {per_1000:.1f} of 1,000; {running:.2f} of 11 run")
    assert per_1000 < 25
    assert running >= 0.85 * 11
    assert set(stage.statuses()) == {200}


@pytest.mark.parametrize("replicas", [1, 2])
@scenario(tenant_from="userid")
async def test_tenant_whose_every_request_is_refused_stops_nobody_else(stage: Stage, replicas: int) -> None:
    async def fault(request: Request) -> Outcome | None:
        if request.metadata.get("userid") != "greedy":
            return None
        await asyncio.sleep(2 * stage.setting.way_s)
        return Overloaded(429, "rejected-saturated", is_out_of_capacity=True)

    stage.fault = fault
    # An earlier deadline: all of them lie before the others.
    greedy = await stage.submit(300, "greedy", deadline_s=1e5, userid="greedy")
    modest = await stage.submit(600, "modest", userid="modest")
    took_s = await stage.until_answered(80, modest)
    print(f"600 answered in {took_s:.0f} s, {len(refusals(stage))} refusals")
    assert took_s <= 2.0 * 600 / stage.setting.max_limit, "at half of the speed that they would have alone"
    assert stage.statuses() == {200: 600}
    counts = await stage.store.count_requests()
    assert counts.dead == 0
    assert counts.pending + counts.delayed + counts.leased == len(greedy)
    budgets = [r.dispatcher.get_allowance().budget for r in stage.alive]
    assert all(b is None or b.max_sys >= 0.9 * b.configured_max_sys for b in budgets), (
        "it lowers nobody else's room"
    )


def _curse(stage: Stage) -> None:
    """Requests of this name are refused, whenever they come."""

    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("cursed"):
            return None
        await asyncio.sleep(2 * stage.setting.way_s)
        return Overloaded(429, "rejected-saturated", is_out_of_capacity=True)

    stage.fault = fault


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("who", ["nobody", "another-each-time", "one"])
@scenario(tenant_from="userid")
async def test_requests_that_are_refused_for_ever_stop_nobody_else(
    stage: Stage, replicas: int, who: str
) -> None:
    """A hundred at the head of the queue, whoever they say they are."""

    _curse(stage)
    for number in range(100):
        tenant = {"nobody": {}, "one": {"userid": "x"}, "another-each-time": {"userid": f"x{number}"}}[who]
        await stage.submit(1, "cursed", deadline_s=1e5, **tenant)
    honest = await stage.submit(200)
    took_s = await stage.until_answered(60, honest)
    print(f"{replicas} replicas, of {who}: 200/200 in {took_s:.1f} s, {len(refusals(stage))} refusals")
    assert stage.statuses() == {200: 200}
    began = stage.now
    await stage.until_answered(60, [*honest, *(await stage.submit(200))])
    print(f"the next 200 in {stage.now - began:.1f} s")
    assert stage.now - began <= 20, "nor do they when they come back"


@scenario()
async def test_request_that_is_always_refused_waits_longer_each_time(stage: Stage) -> None:
    _curse(stage)
    (cursed,) = await stage.submit(1, "cursed", deadline_s=300)
    others = await stage.submit(400, deadline_s=1000)
    await stage.until_answered(60, others)
    await stage.until_answered(320)
    at = [one.began_at for one in stage.tries if one.id == cursed]
    gaps = [later - earlier for earlier, later in pairwise(at)]
    # Back at once (after the next reading), then 2, 4, 8 … 60 s, and each time a reading newer than others'.
    for nth, gap in enumerate(gaps[1:]):
        assert gap >= min(60.0, 2.0 * 2**nth) - 1e-6
    assert len(at) <= 12
    assert stage.statuses() == {200: 400, "DEADLINE_EXCEEDED": 1}
