"""A picker that evicts batch requests for realtime costs the evicted work, but no request is lost."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random

import pytest

from dispatcher.core.gateway.outcome import Evicted, Outcome, RetryPolicy, classify_answer
from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

SHARE = 0.1
"""Share of the tries that are evicted, each after a part of its duration."""


def evict(stage: Stage, share: float, prefix: str = "") -> None:
    """Have the picker stop this share of the requests while they run in the pool."""
    draws = Random(7)

    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith(prefix) or draws.random() >= share:
            return None
        job = stage.job_of(request)
        stage.road.send_job(job, lambda _end: None)
        await asyncio.sleep(draws.uniform(0.1, 0.9) * stage.setting.work_s)
        stage.road.cancel_job(job)
        return classify_answer(429, {"x-llm-d-request-dropped-reason": "evicted-priority"}, b"", 0.0)

    stage.fault = fault


def evicted(stage: Stage) -> list[float]:
    return [one.ended_at for one in stage.tries if isinstance(one.outcome, Evicted)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seconds", [120, pytest.param(3600, marks=pytest.mark.long)])
@scenario(slots=8)
async def test_evictions_cost_what_they_took_and_no_request(
    stage: Stage, seconds: int, replicas: int
) -> None:
    await stage.submit(3 * stage.setting.slots * (seconds + 40))
    await asyncio.sleep(10)
    stage.restart_peak()
    calm_from, calm_at = stage.answered, stage.now
    await asyncio.sleep(seconds / 2)
    calm_per_s = (stage.answered - calm_from) / (stage.now - calm_at)
    evict(stage, SHARE)
    await asyncio.sleep(10)
    answered, at = stage.answered, stage.now
    await asyncio.sleep(seconds)
    per_s = (stage.answered - answered) / (stage.now - at)
    tries = [one for one in stage.sent(at) if one.ended_at == one.ended_at]
    spent_s = dict.fromkeys((True, False), 0.0)
    for one in tries:
        spent_s[isinstance(one.outcome, Evicted)] += one.ended_at - one.began_at
    lost = spent_s[True] / (spent_s[True] + spent_s[False])
    print(
        f"{len(evicted(stage))} of {len(stage.tries)} tries evicted, which took {lost:.1%} of the work; "
        f"{per_s:.3f} answers a second, {calm_per_s:.3f} without"
    )
    assert len(evicted(stage)) > 0.08 * len(tries), "otherwise this shows nothing"
    assert per_s >= 0.97 * calm_per_s * (1 - lost)
    assert set(stage.statuses()) == {200}
    assert {replica.limiter.max_limit for replica in stage.alive} == {stage.setting.max_limit}, (
        "nothing was learned"
    )
    assert stage.reasons() <= {Reason.OPEN, Reason.FULL}
    assert stage.peak <= stage.setting.max_limit + 1


@scenario(retry=RetryPolicy(base_s=2.0, max_s=16.0, max_attempts=2))
async def test_request_that_is_always_evicted_waits_longer_each_time_and_ends_by_its_deadline(
    stage: Stage,
) -> None:
    """The request would fail after two attempts, if evictions counted as attempts."""
    evict(stage, 1.0, "victim")
    (victim,) = await stage.submit(1, "victim", deadline_s=120.0)
    others = await stage.submit(2000)
    closed = set()
    while stage.answered < len(others):
        await asyncio.sleep(0.25)
        closed |= {reason for reason in stage.reasons() if reason.is_closed}
    assert closed <= {Reason.STARTING}
    await stage.until_answered(130)
    began = [one.began_at for one in stage.tries if one.id == victim]
    pauses = [later - sooner for sooner, later in pairwise(began)]
    assert all(later >= 0.99 * sooner for sooner, later in pairwise(pauses[:3])), pauses
    assert max(pauses) < 18
    (found,) = [each for each in stage.results if each.id == victim]
    assert found.error_code == "DEADLINE_EXCEEDED"
    assert "stopped it for more important requests: 429, evicted-priority" in (found.error_message or "")
    assert stage.statuses() == {200: 2000, "DEADLINE_EXCEEDED": 1}
