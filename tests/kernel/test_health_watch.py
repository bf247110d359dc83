"""The health is found from the parts of a dispatcher, and its changes are logged."""

from __future__ import annotations

import asyncio

from dispatcher.limit.health import Health
from dispatcher.telemetry.events import Event
from tests.scenarios.virtual_stage import MetricsState, Stage, scenario


def list_health_events(stage: Stage) -> list[tuple[str, str]]:
    return [
        (event.event_name, f"{fields['health']} {fields['cause']}")
        for event, fields in stage.events
        if event in (Event.HEALTH, Event.UNHEALTHY)
    ]


@scenario()
async def test_each_change_of_health_is_logged_with_its_severity(stage: Stage) -> None:
    await asyncio.sleep(10)
    await stage.submit(2000)
    await asyncio.sleep(20)
    stage.metrics = MetricsState.GONE
    await asyncio.sleep(40)
    stage.metrics = MetricsState.OK
    await asyncio.sleep(20)
    assert list_health_events(stage) == [
        ("health", "idle none"),
        ("health", "working none"),
        ("unhealthy", "failing signals"),
        ("health", "working none"),
    ]
    failing = [fields for event, fields in stage.events if event is Event.UNHEALTHY]
    assert failing[-1]["why"].startswith("The signals cannot be read: ")
    assert "batch-dispatcher check" in failing[-1]["hint"]


@scenario()
async def test_health_is_known_while_the_queue_hangs(stage: Stage) -> None:
    await stage.submit(2000)
    await asyncio.sleep(5)
    (replica,) = stage.alive
    replica.dispatcher.view.counted_at = stage.now - 1
    for task in asyncio.all_tasks():
        if task.get_name() == "count_queue":
            task.cancel()
    await asyncio.sleep(30)
    assert replica.dispatcher.health.record.current.health is Health.UNKNOWN
