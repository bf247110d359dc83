"""What the dispatcher says of deadlines, beside what becomes of them in a world that knows."""

from __future__ import annotations

import asyncio

import pytest

from tests.scenarios.virtual_stage import Metrics, Stage, scenario

LOST = "DEADLINE_EXCEEDED"


@scenario(work_s=2.0, slots=40)
async def test_requests_at_risk_are_those_that_are_lost_in_the_end(stage: Stage) -> None:
    await stage.submit(4000, deadline_s=150)
    await asyncio.sleep(40)
    outlook = stage.alive[0].dispatcher.view.forecast
    assert outlook is not None
    assert outlook.earliest_deadline_s == pytest.approx(110, abs=6)
    await stage.until_answered(400)
    lost = stage.statuses()[LOST]
    assert lost > 500
    assert outlook.at_risk == pytest.approx(lost, rel=0.03)


@scenario(work_s=2.0, slots=40, replicas=3)
async def test_every_replica_knows_the_rate_of_all(stage: Stage) -> None:
    await stage.submit(6000, deadline_s=100_000)
    await asyncio.sleep(60.1)  # they have just looked
    before = stage.answered
    await asyncio.sleep(30)
    rate = (stage.answered - before) / 30
    for replica in stage.alive:
        outlook = replica.dispatcher.view.forecast
        assert outlook is not None
        assert outlook.service_rate == pytest.approx(rate, rel=0.05)
        assert outlook.service_s == pytest.approx(stage.in_flight / rate, rel=0.05)
        assert outlook.at_risk == 0
        assert sorted(each.owner for each in outlook.replicas) == ["owner-1", "owner-2", "owner-3"]
        assert sum(each.leases for each in outlook.replicas) == pytest.approx(stage.in_flight, abs=5)


@scenario(work_s=2.0, slots=40)
async def test_a_closed_gate_puts_all_that_wait_at_risk(stage: Stage) -> None:
    stage.metrics = Metrics.GONE
    await stage.submit(100, deadline_s=5000)
    await asyncio.sleep(30)
    view = stage.alive[0].dispatcher.view
    first = view.forecast
    assert first is not None
    assert first.at_risk is None, "nobody knows what the pool can do"
    await asyncio.sleep(65)
    assert view.forecast is not None
    assert (view.forecast.at_risk, view.forecast.service_rate) == (100, 0)


@scenario(observe=True)
async def test_who_only_observes_looks_ahead_too_and_is_not_seen(stage: Stage) -> None:
    await stage.submit(10, deadline_s=500)
    await asyncio.sleep(11)
    outlook = stage.alive[0].dispatcher.view.forecast
    assert outlook is not None
    assert outlook.replicas == ()
    assert outlook.earliest_deadline_s == pytest.approx(490, abs=6)
