"""The forecast of missed deadlines agrees with the outcome in a simulated pool."""

from __future__ import annotations

import asyncio

import pytest

from tests.scenarios.virtual_stage import MetricsState, Stage, scenario

EXPIRED = "DEADLINE_EXCEEDED"


@scenario(work_s=2.0, slots=40)
async def test_forecast_counts_the_requests_that_expire_in_the_end(stage: Stage) -> None:
    await stage.submit(4000, deadline_s=150)
    await asyncio.sleep(40)
    forecast = stage.alive[0].dispatcher.view.forecast
    assert forecast is not None
    assert forecast.earliest_deadline_s == pytest.approx(110, abs=6)
    await stage.wait_until_answered(400)
    expired_count = stage.count_statuses()[EXPIRED]
    assert expired_count > 500
    assert forecast.at_risk == pytest.approx(expired_count, rel=0.03)


@scenario(work_s=2.0, slots=40, replicas=3)
async def test_forecast_of_every_replica_has_the_rate_of_all_replicas(stage: Stage) -> None:
    await stage.submit(6000, deadline_s=100_000)
    await asyncio.sleep(60.1)  # the forecast has just been updated
    answered_before = stage.answered_count
    await asyncio.sleep(30)
    rate = (stage.answered_count - answered_before) / 30
    for replica in stage.alive:
        forecast = replica.dispatcher.view.forecast
        assert forecast is not None
        assert forecast.service_rate == pytest.approx(rate, rel=0.05)
        assert forecast.service_s == pytest.approx(stage.in_flight / rate, rel=0.05)
        assert forecast.at_risk == 0
        assert sorted(each.owner for each in forecast.replicas) == ["owner-1", "owner-2", "owner-3"]
        assert sum(each.leases for each in forecast.replicas) == pytest.approx(stage.in_flight, abs=5)


@scenario(work_s=2.0, slots=40)
async def test_closed_gate_puts_all_waiting_requests_at_risk(stage: Stage) -> None:
    stage.metrics = MetricsState.GONE
    await stage.submit(100, deadline_s=5000)
    await asyncio.sleep(30)
    view = stage.alive[0].dispatcher.view
    first_forecast = view.forecast
    assert first_forecast is not None
    assert first_forecast.at_risk is None, "the rate of the pool is unknown"
    await asyncio.sleep(65)
    assert view.forecast is not None
    assert (view.forecast.at_risk, view.forecast.service_rate) == (100, 0)


@scenario(observe=True)
async def test_observer_computes_a_forecast_and_is_not_counted_as_replica(stage: Stage) -> None:
    await stage.submit(10, deadline_s=500)
    await asyncio.sleep(11)
    forecast = stage.alive[0].dispatcher.view.forecast
    assert forecast is not None
    assert forecast.replicas == ()
    assert forecast.earliest_deadline_s == pytest.approx(490, abs=6)
