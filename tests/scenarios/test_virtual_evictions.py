"""A picker that evicts batch requests for realtime costs the evicted work, but no request is lost."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random

import pytest

from dispatcher.limit.budget import Reason
from dispatcher.requests.outcomes.outcome import Evicted, Outcome, RetryPolicy, classify_answer
from dispatcher.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

EVICTED_FRACTION = 0.1
"""Fraction of the attempts that are evicted, each after a part of its duration."""


def inject_evictions(stage: Stage, fraction: float, prefix: str = "") -> None:
    """Let the picker stop this fraction of the requests while they run in the pool."""
    random_source = Random(7)

    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith(prefix) or random_source.random() >= fraction:
            return None
        job = stage.make_job(request)
        stage.transport.send_job(job, lambda _end: None)
        await asyncio.sleep(random_source.uniform(0.1, 0.9) * stage.setting.work_s)
        stage.transport.cancel_job(job)
        return classify_answer(429, {"x-llm-d-request-dropped-reason": "evicted-priority"}, b"", 0.0)

    stage.fault = fault


def find_eviction_times(stage: Stage) -> list[float]:
    return [attempt.ended_at for attempt in stage.attempts if isinstance(attempt.outcome, Evicted)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seconds", [120, pytest.param(3600, marks=pytest.mark.long)])
@scenario(slots=8)
async def test_evictions_cost_only_the_evicted_work_and_lose_no_request(
    stage: Stage, seconds: int, replicas: int
) -> None:
    await stage.submit(3 * stage.setting.slots * (seconds + 40))
    await asyncio.sleep(10)
    stage.reset_peak()
    answered_before, measured_from = stage.answered_count, stage.now
    await asyncio.sleep(seconds / 2)
    rate_without_evictions = (stage.answered_count - answered_before) / (stage.now - measured_from)
    inject_evictions(stage, EVICTED_FRACTION)
    await asyncio.sleep(10)
    answered, at = stage.answered_count, stage.now
    await asyncio.sleep(seconds)
    rate = (stage.answered_count - answered) / (stage.now - at)
    ended_attempts = [attempt for attempt in stage.find_attempts(at) if attempt.ended_at == attempt.ended_at]
    time_by_evicted = dict.fromkeys((True, False), 0.0)
    for attempt in ended_attempts:
        time_by_evicted[isinstance(attempt.outcome, Evicted)] += attempt.ended_at - attempt.began_at
    lost_fraction = time_by_evicted[True] / (time_by_evicted[True] + time_by_evicted[False])
    print(
        f"{len(find_eviction_times(stage))} of {len(stage.attempts)} attempts evicted, "
        f"which cost {lost_fraction:.1%} of the work; "
        f"{rate:.3f} answers a second, {rate_without_evictions:.3f} without"
    )
    assert len(find_eviction_times(stage)) > 0.08 * len(ended_attempts), (
        "the test proves nothing without evictions"
    )
    assert rate >= 0.97 * rate_without_evictions * (1 - lost_fraction)
    assert set(stage.count_statuses()) == {200}
    assert {replica.limiter.max_limit for replica in stage.alive} == {stage.setting.max_limit}, (
        "evictions do not lower the learned capacity"
    )
    assert stage.reasons() <= {Reason.OPEN, Reason.FULL}
    assert stage.peak <= stage.setting.max_limit + 1


@scenario(retry=RetryPolicy(base_s=2.0, max_s=16.0, max_attempts=2))
async def test_request_that_is_always_evicted_waits_longer_each_time_until_its_deadline(
    stage: Stage,
) -> None:
    """The request would fail after two attempts, if evictions counted as attempts."""
    inject_evictions(stage, 1.0, "victim")
    (victim,) = await stage.submit(1, "victim", deadline_s=120.0)
    others = await stage.submit(2000)
    closing_reasons = set()
    while stage.answered_count < len(others):
        await asyncio.sleep(0.25)
        closing_reasons |= {reason for reason in stage.reasons() if reason.is_closed}
    assert closing_reasons <= {Reason.STARTING}
    await stage.wait_until_answered(130)
    start_times = [attempt.began_at for attempt in stage.attempts if attempt.id == victim]
    pauses = [later - earlier for earlier, later in pairwise(start_times)]
    assert all(later >= 0.99 * earlier for earlier, later in pairwise(pauses[:3])), pauses
    assert max(pauses) < 18
    (result,) = [each for each in stage.results if each.id == victim]
    assert result.error_code == "DEADLINE_EXCEEDED"
    assert "stopped it for more important requests: 429, evicted-priority" in (result.error_message or "")
    assert stage.count_statuses() == {200: 2000, "DEADLINE_EXCEEDED": 1}
