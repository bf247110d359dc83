"""The dispatcher under a CPU limit: it does its work more slowly, and says so where it cannot keep pace."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync
from tests.telemetry.throttle import Throttle, cpu_limit

LIMIT = 30
"""Of 32 slots, less the reserve."""


@pytest.fixture
def quarter() -> Iterator[Throttle]:
    with cpu_limit(0.25) as limit:
        yield limit


def test_quarter_of_a_core_is_enough_to_start_keep_leases_and_drain(quarter: Throttle, stage: Stage) -> None:
    """Requests run for longer than a lease lasts, so each needs several renewals in time."""
    world = stage.world(slots=32, seconds=6.0)
    stage.producer.submit(LIMIT + 20)
    began_at = time.monotonic()
    one = stage.dispatcher(stage.settings(world, shutdown={"drain_s": 15}), limit=quarter)
    wait_until_sync(lambda: one.claim_probe("/readyz")[0] == 200, 20.0, what="readiness")
    print(f"ready after {time.monotonic() - began_at:.1f} s")
    wait_until_sync(lambda: len(stage.producer.collect()) >= LIMIT, 30.0, what="the first answers")
    wait_until_sync(lambda: world.in_flight() == 20, 10.0, what="the last requests to be sent")
    asked_at = time.monotonic()
    assert one.terminate() == 0
    assert time.monotonic() - asked_at < 6 + 5, "it ends when nothing runs any more"
    stage.producer.collect()
    assert stage.producer.answers() == {"200": LIMIT + 20}
    assert not stage.producer.twice()
    assert len(world.log()) == LIMIT + 20, "no lease ran out, so nothing was sent twice"
    assert [one.events(name) for name in ("lease-lost", "queue-unreachable", "leases-left-behind")] == [
        [],
        [],
        [],
    ]


def slow(one: Dispatcher) -> bool:
    return bool(one.events("event-loop-slow"))


@pytest.mark.serial
def test_it_says_once_that_it_cannot_keep_pace_and_what_mends_it(stage: Stage) -> None:
    world = stage.world(slots=64, seconds=0.005)  # its longest turn takes a few seconds of the clock
    one = stage.dispatcher(stage.settings(world, max_sys=64))
    wait_until_sync(lambda: one.claim_probe("/readyz")[0] == 200, 20.0, what="readiness")
    before = one.status()
    assert (before["loop_lag_s"] < 1, "CPU" in before["explanation"]) == (True, False)
    with cpu_limit(0.03) as limit:
        limit.hold(one.child.pid)
        stage.producer.submit(10_000)
        wait_until_sync(lambda: slow(one), 60.0, what="the event", every_s=0.1)
        [event] = one.events("event-loop-slow")
        assert event["level"] == "warning"
        assert event["behind_share"] >= 0.15 or event["longest_s"] >= 1
        assert "too little CPU" in event["why"]
        if limit.kind == "cgroup":
            assert event["limit_cores"] == pytest.approx(0.03)
            assert event["throttled_share"] > 0.3
            assert "its CPU limit of 0.03 cores" in event["why"]
        status = one.status()
        assert status["explanation"].endswith(".")
        assert "too little CPU" in status["explanation"]
        assert status["loop_lag_s"] > 0
        assert one.metrics()["loop_lag_seconds"] > 0
    assert len(one.events("event-loop-slow")) == 1
    one.send(signal.SIGTERM)
    assert one.child.wait(30) == 0
