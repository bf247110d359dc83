"""Without usable metrics the gate closes within max_age_s, and it opens with the next reading."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.limit.budget import Reason
from tests.scenarios.virtual_stage import MetricsState, Stage, scenario


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("state", "reason", "within_s"),
    [
        (MetricsState.GONE, Reason.UNREADABLE, 2.6),
        (MetricsState.GARBAGE, Reason.IMPLAUSIBLE, 1.1),
        (MetricsState.FROZEN, Reason.STALE, 10.1),
        (MetricsState.ABSENT, Reason.STALE, 10.1),
    ],
)
@scenario()
async def test_gate_closes_without_usable_metrics_and_opens_with_the_next_reading(
    stage: Stage, replicas: int, state: MetricsState, reason: Reason, within_s: float
) -> None:
    await stage.submit(3000)
    await asyncio.sleep(5.5)
    stage.metrics, lost_at = state, stage.now
    await asyncio.sleep(30)
    assert stage.reasons() == {reason}
    assert not stage.find_attempts(lost_at + within_s), "no request is sent later than that"
    assert stage.in_flight == 0, "running requests have ended"
    stage.metrics, restored_at = MetricsState.OK, stage.now
    await stage.wait_until(
        lambda: stage.find_attempts(restored_at), 1.2, "requests to be sent with the next reading"
    )
    await asyncio.sleep(4)
    assert stage.in_flight >= stage.setting.max_limit - 1
    assert stage.peak <= stage.setting.max_limit + 1
    assert set(stage.count_statuses()) == {200}


@scenario(scrape_s=3.0)
async def test_gate_stays_open_after_one_failed_scrape_and_closes_after_several(
    stage: Stage,
) -> None:
    await stage.submit(4000)
    await asyncio.sleep(8)
    stage.metrics, lost_at = MetricsState.GONE, stage.now
    while stage.now < lost_at + 3.5:
        assert Reason.UNREADABLE not in stage.reasons()
        await asyncio.sleep(0.25)
    stage.metrics = MetricsState.OK
    await asyncio.sleep(4)
    assert stage.in_flight >= stage.setting.max_limit - 1
    stage.metrics = MetricsState.GONE
    await stage.wait_until(lambda: stage.reasons() == {Reason.UNREADABLE}, 8)
    stage.metrics = MetricsState.OK
    await stage.wait_until(lambda: Reason.UNREADABLE not in stage.reasons(), 3.1)
    await asyncio.sleep(2)
    assert stage.in_flight >= stage.setting.max_limit - 1
