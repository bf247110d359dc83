"""Blind, the gate closes within max_age; seeing again, it opens with the first reading. Nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.core.limit.budget import Reason
from tests.scenarios.virtual_stage import Metrics, Stage, scenario


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("kind", "reason", "within_s"),
    [
        (Metrics.GONE, Reason.UNREADABLE, 2.6),
        (Metrics.GARBAGE, Reason.IMPLAUSIBLE, 1.1),
        (Metrics.FROZEN, Reason.STALE, 10.1),
        (Metrics.ABSENT, Reason.STALE, 10.1),
    ],
)
@scenario()
async def test_blindness_closes_the_gate_and_sight_opens_it(
    stage: Stage, replicas: int, kind: Metrics, reason: Reason, within_s: float
) -> None:
    await stage.submit(3000)
    await asyncio.sleep(5.5)
    stage.metrics, blind_at = kind, stage.now
    await asyncio.sleep(30)
    assert stage.reasons() == {reason}
    assert not stage.sent(blind_at + within_s), "the last request leaves no later than that"
    assert stage.in_flight == 0, "what ran, runs to its end"
    stage.metrics, back_at = Metrics.FINE, stage.now
    await stage.until(lambda: stage.sent(back_at), 1.2, "to be sent with the next reading")
    await asyncio.sleep(4)
    assert stage.in_flight >= stage.setting.max_limit - 1
    assert stage.peak <= stage.setting.max_limit + 1
    assert set(stage.statuses()) == {200}


@scenario(scrape_s=3.0)
async def test_one_failed_scrape_closes_nothing_and_several_close_until_the_next_good_one(
    stage: Stage,
) -> None:
    await stage.submit(4000)
    await asyncio.sleep(8)
    stage.metrics, blind_at = Metrics.GONE, stage.now
    while stage.now < blind_at + 3.5:
        assert Reason.UNREADABLE not in stage.reasons()
        await asyncio.sleep(0.25)
    stage.metrics = Metrics.FINE
    await asyncio.sleep(4)
    assert stage.in_flight >= stage.setting.max_limit - 1
    stage.metrics = Metrics.GONE
    await stage.until(lambda: stage.reasons() == {Reason.UNREADABLE}, 8)
    stage.metrics = Metrics.FINE
    await stage.until(lambda: Reason.UNREADABLE not in stage.reasons(), 3.1)
    await asyncio.sleep(2)
    assert stage.in_flight >= stage.setting.max_limit - 1
