"""A dispatcher with a CPU limit works more slowly, and reports it if it cannot keep up."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync
from tests.telemetry.throttle import Throttle, cpu_limit

LIMIT = 30
"""Limit of a pool with 32 slots: the capacity less the reserve."""


@pytest.fixture
def quarter_core() -> Iterator[Throttle]:
    with cpu_limit(0.25) as limit:
        yield limit


@pytest.mark.first
def test_quarter_of_a_core_is_enough_to_start_and_keep_leases_and_drain(
    quarter_core: Throttle, stage: Stage
) -> None:
    """Requests run for longer than a lease lasts, so each needs several renewals in time."""
    world = stage.world(slots=32, seconds=6.0)
    stage.producer.submit(LIMIT + 20)
    started_at = time.monotonic()
    dispatcher = stage.dispatcher(stage.settings(world, shutdown={"drain_s": 90}), cpu_limit=quarter_core)
    wait_until_sync(lambda: dispatcher.get_probe("/readyz")[0] == 200, 20.0, what="readiness")
    print(f"ready after {time.monotonic() - started_at:.1f} s")
    wait_until_sync(lambda: len(stage.producer.collect()) >= LIMIT, 30.0, what="the first answers")
    wait_until_sync(lambda: world.in_flight() == 20, 10.0, what="the last requests to be sent")
    signalled_at = time.monotonic()
    assert dispatcher.terminate() == 0
    assert time.monotonic() - signalled_at < 6 + 30, "the drain ends when nothing runs any more"
    stage.producer.collect()
    assert stage.producer.count_results() == {"200": LIMIT + 20}
    assert not stage.producer.find_duplicates()
    assert len(world.log()) == LIMIT + 20, "no lease ran out, so nothing was sent twice"
    assert [
        dispatcher.events(name) for name in ("lease-lost", "queue-unreachable", "leases-left-behind")
    ] == [
        [],
        [],
        [],
    ]


def is_reported_slow(dispatcher: Dispatcher) -> bool:
    return bool(dispatcher.events("event-loop-slow"))


@pytest.mark.slow
@pytest.mark.serial
def test_too_little_cpu_is_reported_once_with_the_remedy(stage: Stage) -> None:
    world = stage.world(slots=64, seconds=0.005)  # its longest loop iteration takes a few seconds
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=64))
    wait_until_sync(lambda: dispatcher.get_probe("/readyz")[0] == 200, 20.0, what="readiness")
    before = dispatcher.status()
    assert (before["loop_lag_s"] < 1, "CPU" in before["explanation"]) == (True, False)
    with cpu_limit(0.03) as limit:
        limit.limit_process(dispatcher.child.pid)
        stage.producer.submit(10_000)
        wait_until_sync(lambda: is_reported_slow(dispatcher), 60.0, what="the event", every_s=0.1)
        [event] = dispatcher.events("event-loop-slow")
        assert event["level"] == "warning"
        assert event["behind_share"] >= 0.15 or event["longest_s"] >= 1
        assert "too little CPU" in event["why"]
        if limit.kind == "cgroup":
            assert event["limit_cores"] == pytest.approx(0.03)
            assert event["throttled_share"] > 0.3
            assert "its CPU limit of 0.03 cores" in event["why"]
        status = dispatcher.status()
        assert status["explanation"].endswith(".")
        assert "too little CPU" in status["explanation"]
        assert status["loop_lag_s"] > 0
        assert dispatcher.metrics()["loop_lag_seconds"] > 0
    assert len(dispatcher.events("event-loop-slow")) == 1
    dispatcher.send_signal(signal.SIGTERM)
    assert dispatcher.child.wait(30) == 0
