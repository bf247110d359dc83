"""An OTLP endpoint that is not well costs a dispatcher nothing that its producers would notice."""

from __future__ import annotations

import pytest

from tests.scenarios.processes import Stage
from tests.support import free_port, wait_until_sync
from tests.telemetry.traces import Collector

MOST_IN_FLIGHT = 30
"""floor(32 × 0.95)."""


@pytest.mark.parametrize("kind", ["well", "refuses", "hangs", "fails"])
def test_requests_and_drain_do_not_wait_for_the_trace_endpoint(stage: Stage, kind: str) -> None:
    world = stage.world(slots=32, seconds=0.2)
    collector = Collector({"fails": 500, "hangs": None}.get(kind, 200))
    with collector.serve():
        url = collector.url if kind != "refuses" else f"http://127.0.0.1:{free_port()}"
        one = stage.dispatcher(stage.settings(world, tracing={"endpoint": url}))
        stage.producer.submit(3000)
        one.wait_for(reason="full")
        seen = world.mean_in_flight(5.0)
        stage.producer.submit(10, prefix="held")
        assert seen["gateway"]["batch"]["mean"] > 0.9 * MOST_IN_FLIGHT, "no slot is idle because of it"
        if kind != "well":
            wait_until_sync(lambda: one.events("traces-lost"), 20, what="the loss to be told")
        assert one.terminate(within_s=20.0) == 0, "and the endpoint would hang for 30 s"
    assert [event["event"] for event in one.events() if event["event"].startswith("traces")] == (
        [] if kind == "well" else ["traces-lost"]
    )
    assert one.events("stopped")
    assert bool(collector.spans()) is (kind == "well")
    stage.producer.collect()
    assert not stage.producer.twice()
