"""A 429 closes the gate of all replicas until a newer reading, and affects no other user for longer."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from dispatcher.limit.budget import Reason
from dispatcher.requests.outcomes.outcome import Outcome, Overloaded, RetryPolicy, classify_answer
from dispatcher.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

TRANSIT_S = 0.01
"""Time until all replicas know of a refusal: 3 ms transit, and the next queue call of the others."""


def inject_refusals(stage: Stage, count: int, retry_after: str | None = None) -> None:
    """Let the gateway refuse the next requests."""
    remaining = count

    async def fault(request: Request) -> Outcome | None:
        nonlocal remaining
        if remaining == 0:
            return None
        remaining -= 1
        await asyncio.sleep(2 * stage.setting.transit_s)
        headers = {"x-llm-d-request-dropped-reason": "rejected-saturated"}
        if retry_after is not None:
            headers["retry-after"] = retry_after
        return classify_answer(429, headers, b"", 0.0)

    stage.fault = fault


def find_refusal_times(stage: Stage, prefix: str = "") -> list[float]:
    return [
        attempt.ended_at
        for attempt in stage.attempts
        if isinstance(attempt.outcome, Overloaded) and attempt.id.startswith(prefix)
    ]


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(scrape_s=3.0)
async def test_no_replica_sends_after_a_refusal_until_a_newer_reading(stage: Stage, replicas: int) -> None:
    await stage.submit(3000)
    await asyncio.sleep(10.1)
    inject_refusals(stage, 1)
    await stage.wait_until(lambda: find_refusal_times(stage), 5)
    refused_at = find_refusal_times(stage)[0]
    phases = [3.0 * index / replicas for index in range(replicas)]
    newer_at = min(phase + 3.0 * (int((refused_at - phase) / 3.0) + 1) for phase in phases)
    assert newer_at - refused_at > 0.2, "the test proves nothing otherwise"
    await asyncio.sleep(newer_at + 2 - stage.now)
    assert not stage.find_attempts(refused_at + TRANSIT_S, newer_at), "nothing is sent with the old reading"
    assert stage.find_attempts(newer_at, newer_at + 0.5), "requests are sent again after the new reading"
    assert len(find_refusal_times(stage)) == 1
    assert set(stage.count_statuses()) == {200}


@pytest.mark.parametrize("retry_after", ["86400", "99999999999999999999"])
@scenario(replicas=2, retry=RetryPolicy(max_s=3.0))
async def test_retry_after_of_a_day_is_limited_by_retry_max_s(stage: Stage, retry_after: str) -> None:
    await stage.submit(200)
    inject_refusals(stage, 1, retry_after=retry_after)
    await stage.wait_until(lambda: find_refusal_times(stage), 5)
    refused_at = find_refusal_times(stage)[0]
    await asyncio.sleep(2.5)
    stage.kill(0)
    stage.start(
        0
    )  # a restarted replica does not wait longer: the time shared through the queue is limited, too
    await stage.wait_until_answered(15)
    assert not stage.find_attempts(refused_at + TRANSIT_S, refused_at + 3.0 - TRANSIT_S), (
        "nothing is sent before retry.max_s has passed"
    )
    assert set(stage.count_statuses()) == {200}


@scenario(replicas=3)
async def test_all_replicas_wait_for_retry_after(stage: Stage) -> None:
    await stage.submit(3000)
    await asyncio.sleep(5)
    inject_refusals(stage, 1, retry_after="7")
    await stage.wait_until(lambda: find_refusal_times(stage), 5)
    refused_at = find_refusal_times(stage)[0]
    await asyncio.sleep(1.1)  # a replica that makes no queue calls learns of it with its next reading
    assert stage.reasons() == {Reason.BACKPRESSURE}
    await asyncio.sleep(10)
    allowed_at = refused_at + 7.0 - 1e-6  # tolerance for rounding
    assert not stage.find_attempts(refused_at + TRANSIT_S, allowed_at)
    assert stage.find_attempts(allowed_at, allowed_at + 0.2)


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(slots=33, true_slots=11, queue_limit=8)
async def test_capacity_of_a_third_of_the_declared_one_is_learned(stage: Stage, replicas: int) -> None:
    await stage.submit(6000)
    await asyncio.sleep(30.5)
    sent_before, refused_before = len(stage.attempts), len(find_refusal_times(stage))
    assert refused_before, "the test proves nothing otherwise"
    mean_running = 0.0
    for _ in range(200):
        await asyncio.sleep(0.5)
        stage.transport.advance_world()
        mean_running += stage.world.observe_pool().running / 200
    per_1000 = 1000 * (len(find_refusal_times(stage)) - refused_before) / (len(stage.attempts) - sent_before)
    print(
        f"{refused_before} refused while learning, then {per_1000:.1f} of 1,000; {mean_running:.2f} of 11 run"
    )
    assert per_1000 < 25
    assert mean_running >= 0.85 * 11
    assert set(stage.count_statuses()) == {200}


@pytest.mark.parametrize("replicas", [1, 2])
@scenario(fairness_attribute="userid")
async def test_user_whose_requests_are_all_refused_affects_no_other(stage: Stage, replicas: int) -> None:
    async def fault(request: Request) -> Outcome | None:
        if request.metadata.get("userid") != "greedy":
            return None
        await asyncio.sleep(2 * stage.setting.transit_s)
        return Overloaded(429, "rejected-saturated", is_out_of_capacity=True)

    stage.fault = fault
    # An earlier deadline puts all of them before the others in the queue.
    greedy_ids = await stage.submit(300, "greedy", deadline_s=1e5, userid="greedy")
    modest_ids = await stage.submit(600, "modest", userid="modest")
    took_s = await stage.wait_until_answered(80, modest_ids)
    print(f"600 answered in {took_s:.0f} s, {len(find_refusal_times(stage))} refusals")
    assert took_s <= 2.0 * 600 / stage.setting.max_limit, (
        "at least at half of the rate without the other user"
    )
    assert stage.count_statuses() == {200: 600}
    counts = await stage.store.count_requests()
    assert counts.dead == 0
    assert counts.pending + counts.delayed + counts.leased == len(greedy_ids)
    budgets = [replica.dispatcher.get_allowance().budget for replica in stage.alive]
    assert all(budget is None or budget.max_sys >= 0.9 * budget.configured_max_sys for budget in budgets), (
        "refusals of one user do not lower the capacity"
    )


def _refuse_cursed(stage: Stage) -> None:
    """Refuse all requests whose id starts with `cursed`."""

    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("cursed"):
            return None
        await asyncio.sleep(2 * stage.setting.transit_s)
        return Overloaded(429, "rejected-saturated", is_out_of_capacity=True)

    stage.fault = fault


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("tenants", ["none", "one-per-request", "one"])
@scenario(fairness_attribute="userid")
async def test_requests_that_are_always_refused_affect_no_other_request(
    stage: Stage, replicas: int, tenants: str
) -> None:
    """A hundred such requests are at the head of the queue, with any tenants."""

    _refuse_cursed(stage)
    for number in range(100):
        tenant = {"none": {}, "one": {"userid": "x"}, "one-per-request": {"userid": f"x{number}"}}[tenants]
        await stage.submit(1, "cursed", deadline_s=1e5, **tenant)
    ordinary = await stage.submit(200)
    took_s = await stage.wait_until_answered(60, ordinary)
    print(
        f"{replicas} replicas, tenants {tenants}: 200/200 in {took_s:.1f} s, "
        f"{len(find_refusal_times(stage))} refusals"
    )
    assert stage.count_statuses() == {200: 200}
    second_submission_at = stage.now
    await stage.wait_until_answered(60, [*ordinary, *(await stage.submit(200))])
    print(f"the next 200 in {stage.now - second_submission_at:.1f} s")
    assert stage.now - second_submission_at <= 20, "they do not delay later requests either"


@scenario()
async def test_request_that_is_always_refused_waits_longer_each_time(stage: Stage) -> None:
    _refuse_cursed(stage)
    (cursed,) = await stage.submit(1, "cursed", deadline_s=300)
    others = await stage.submit(400, deadline_s=1000)
    await stage.wait_until_answered(60, others)
    await stage.wait_until_answered(320)
    start_times = [attempt.began_at for attempt in stage.attempts if attempt.id == cursed]
    gaps = [later - earlier for earlier, later in pairwise(start_times)]
    # The first retry follows the next reading, later ones come after 2, 4, 8 … 60 s and a newer reading.
    for number, gap in enumerate(gaps[1:]):
        assert gap >= min(60.0, 2.0 * 2**number) - 1e-6
    assert len(start_times) <= 12
    assert stage.count_statuses() == {200: 400, "DEADLINE_EXCEEDED": 1}
