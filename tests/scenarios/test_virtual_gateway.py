"""An outage of the gateway costs no attempts, is probed by one request at a time, and ends at once."""

from __future__ import annotations

import asyncio
import random

import pytest

from dispatcher.limit.budget import Reason
from dispatcher.requests.outcomes.judge import FREE_CHARGES
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Failed,
    Outcome,
    RetryPolicy,
    Unreachable,
    classify_answer,
)
from dispatcher.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

OUTAGE_FROM, OUTAGE_UNTIL = 10.3, 70.3
CONNECT_TIMEOUT_S = 1.5
"""Connect timeout of the HTTP client."""


def inject_connect_timeouts(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        if not OUTAGE_FROM <= stage.now < OUTAGE_UNTIL:
            return None
        await asyncio.sleep(CONNECT_TIMEOUT_S)
        return Unreachable("connect time-out")

    stage.fault = fault


def inject_empty_500s(stage: Stage) -> None:
    """Answer like Envoy without its endpoint picker. Requests that run already continue."""

    async def fault(request: Request) -> Outcome | None:
        if not OUTAGE_FROM <= stage.now < OUTAGE_UNTIL:
            return None
        await asyncio.sleep(2 * stage.setting.transit_s)
        return classify_answer(500, {}, b"", 0.0)

    stage.fault = fault


def count_simultaneous_attempts(stage: Stage, since: float, until: float) -> int:
    """Return the largest number of simultaneous attempts among those that started in this time."""
    attempts = stage.find_attempts(since, until)
    return max(
        (
            sum(other.began_at <= attempt.began_at < other.ended_at for other in attempts)
            for attempt in attempts
        ),
        default=0,
    )


FAULTS = {"blackhole": inject_connect_timeouts, "500": inject_empty_500s}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("kind", "outages"), [("refused", [(OUTAGE_FROM, OUTAGE_UNTIL)]), ("blackhole", []), ("500", [])]
)
@scenario()
async def test_gateway_outage_of_a_minute_costs_no_attempts(
    stage: Stage, replicas: int, kind: str, outages: list[tuple[float, float]]
) -> None:
    if kind in FAULTS:
        FAULTS[kind](stage)
    await stage.submit(3000)
    await asyncio.sleep(OUTAGE_FROM + 5)
    expected = Reason.GATEWAY_FAILING if kind == "500" else Reason.GATEWAY_UNREACHABLE
    assert stage.reasons() == {expected}
    await asyncio.sleep(OUTAGE_UNTIL - stage.now)
    assert set(stage.count_statuses()) == {200}, "no request has failed"
    failed = [attempt for attempt in stage.attempts if isinstance(attempt.outcome, Failed)]
    print(
        f"{len(failed)} responses without gateway headers, "
        f"{len(stage.find_attempts(OUTAGE_FROM + 5, OUTAGE_UNTIL))} probes in 55 s"
    )
    assert (len(failed) > 0) == (kind == "500")
    failed_attempts = [each.failed_attempts for each in stage.store.queue.entries.values()]
    assert not any(failed_attempts), "no attempt is counted, not even before the outage is recognized"
    assert count_simultaneous_attempts(stage, OUTAGE_FROM + 3, OUTAGE_UNTIL) == 1, (
        "all replicas together send one probe at a time"
    )
    probes = len(stage.find_attempts(OUTAGE_FROM + 5, OUTAGE_UNTIL))
    max_rate = 300 if kind == "500" else 60
    assert 20 <= probes <= max_rate * replicas, (
        "each replica probes about once a second, or five times if other requests wait"
    )
    resumed_s = await stage.wait_until(lambda: stage.in_flight > 5, 3.0, "requests to be sent again")
    print(f"resumed {resumed_s:.2f} s after the outage")
    await asyncio.sleep(5)
    assert stage.in_flight >= stage.setting.max_limit - 2
    assert stage.peak <= stage.setting.max_limit + 1
    assert set(stage.count_statuses()) == {200}


@pytest.mark.parametrize("dead_endpoints", [1, 2])
@scenario()
async def test_dead_endpoints_among_others_do_not_make_the_gateway_unreachable(
    stage: Stage, dead_endpoints: int
) -> None:
    """Envoy itself answers 503 within milliseconds if the picker chooses a dead endpoint."""
    random_source = random.Random(dead_endpoints)

    async def fault(request: Request) -> Outcome | None:
        if not 10.0 <= stage.now < 20.0 or random_source.random() * 3 >= dead_endpoints:
            return None
        await asyncio.sleep(2 * stage.setting.transit_s)
        return classify_answer(503, {}, b"upstream connect error or disconnect/reset before headers", 0.0)

    stage.fault = fault
    await stage.submit(3000)
    await asyncio.sleep(9.99)
    half_empty_s, answered_before = 0.0, stage.answered_count
    while stage.now < 20.0:
        await asyncio.sleep(0.01)
        half_empty_s += 0.01 * (
            stage.reasons() != {Reason.FULL} and stage.in_flight < stage.setting.max_limit / 2
        )
    rejected = [attempt for attempt in stage.attempts if isinstance(attempt.outcome, Failed)]
    print(
        f"{len(rejected)} rejected, {stage.answered_count - answered_before} answered, "
        f"half empty for {half_empty_s:.2f} s"
    )
    assert len(rejected) > 50, "the test proves nothing without rejected attempts"
    assert half_empty_s <= 0.6
    assert stage.answered_count - answered_before >= 0.9 * answered_before
    await asyncio.sleep(20)
    assert set(stage.count_statuses()) == {200}
    assert {
        entry.lease.failed_attempts for replica in stage.alive for entry in replica.dispatcher._in_flight
    } == {0}


@scenario(retry=RetryPolicy(base_s=0.1, max_s=0.5))
async def test_request_that_always_gets_an_intermediary_error_fails_in_the_end(stage: Stage) -> None:
    """While other requests get through, its errors count against the request."""

    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("poison"):
            return None
        await asyncio.sleep(2 * stage.setting.transit_s)
        return classify_answer(503, {}, b"upstream connect error", 0.0)

    stage.fault = fault
    await stage.submit(1, "poison")
    await stage.submit(1500)
    await stage.wait_until(lambda: 503 in stage.count_statuses(), 20)
    assert stage.count_statuses()[200] < 1500, "other requests ran all the time"
    attempt_count = len([attempt for attempt in stage.attempts if attempt.id.startswith("poison")])
    assert FREE_CHARGES + 8 < attempt_count <= 2 * (FREE_CHARGES + 8), (
        "not every attempt is followed by the answer of another request"
    )


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(outages=[(5.0, 8.0)])
async def test_gate_reopens_when_a_probe_stays_connected_for_two_seconds(stage: Stage, replicas: int) -> None:
    """The first request after the outage takes 20 s, and no replica waits for its answer."""
    slow_ids: list[str] = []

    async def fault(request: Request) -> Outcome | None:
        if stage.now < 8.0:
            return None
        if not slow_ids:
            slow_ids.append(request.id)
        if request.id != slow_ids[0]:
            return None
        stage.connected_since[request.id] = stage.now
        await asyncio.sleep(20)
        return Delivered(200, b"late")

    stage.fault = fault
    await stage.submit(2000)
    await asyncio.sleep(8.0 - stage.now)
    await stage.wait_until(lambda: slow_ids, 2.5, "a probe")
    first_probe_at = stage.now
    await asyncio.sleep(1.9)
    assert len(stage.find_attempts(first_probe_at)) <= 1
    await stage.wait_until(
        lambda: len(stage.find_attempts(first_probe_at)) > 10,
        1.5,
        "the gate to reopen after 2 s of connection",
    )
    all_replicas = {attempt.replica for attempt in stage.find_attempts(0.0, 5.0)}
    assert len(all_replicas) == replicas
    await stage.wait_until(
        lambda: {attempt.replica for attempt in stage.find_attempts(first_probe_at + 0.1)} == all_replicas,
        5,
        "all",
    )
    await asyncio.sleep(25)
    assert set(stage.count_statuses()) == {200}


@scenario()
async def test_request_that_breaks_its_connection_affects_no_other_request(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("breaker"):
            return None
        await asyncio.sleep(2 * stage.setting.transit_s)
        return Failed("the connection was reset before an answer")

    stage.fault = fault
    await stage.submit(1, "breaker")
    await stage.submit(600)
    await stage.wait_until(lambda: stage.answered_count >= 600, 30)
    assert stage.count_statuses() == {200: 600}
    assert stage.peak <= stage.setting.max_limit + 1
    assert not [attempt for attempt in stage.attempts if isinstance(attempt.outcome, Unreachable)]
    await stage.wait_until_answered(400)
    assert len([attempt for attempt in stage.attempts if attempt.id.startswith("breaker")]) == 8, (
        "retry.max_attempts"
    )
    assert stage.count_statuses() == {200: 600, "RETRIES_EXHAUSTED": 1}
    assert (await stage.store.count_requests()).dead == 1
