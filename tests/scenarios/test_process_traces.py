"""An OTLP endpoint that is not well costs a dispatcher nothing that its producers would notice."""

from __future__ import annotations

import pytest

from tests.scenarios.processes import Stage
from tests.support import free_port, wait_until_sync
from tests.telemetry.traces import Collector


@pytest.mark.parametrize("kind", ["well", "refuses", "hangs", "fails"])
def test_requests_and_drain_do_not_wait_for_the_trace_endpoint(stage: Stage, kind: str) -> None:
    world = stage.world(slots=32, seconds=0.2)
    collector = Collector({"fails": 500, "hangs": None}.get(kind, 200))
    with collector.serve():
        url = collector.url if kind != "refuses" else f"http://127.0.0.1:{free_port()}"
        one = stage.dispatcher(stage.settings(world, tracing={"endpoint": url}, shutdown={"drain_s": 1}))
        stage.producer.submit(300)
        stage.producer.wait_for_all()
        held = stage.producer.submit(5, b'{"sim":{"kind":"hang"}}', prefix="held")
        wait_until_sync(lambda: len(world.log()) == 305, what="the last to be sent")
        if kind != "well":
            wait_until_sync(lambda: one.events("traces-lost"), 20, what="the loss to be told")
            assert one.metrics()["events_total{traces-lost}"] == 1, "it is counted, and on the page, too"
        assert one.terminate(within_s=20.0) == 0, "and the endpoint would hang for 30 s"
    assert [event["event"] for event in one.events() if event["event"].startswith("traces")] == (
        [] if kind == "well" else ["traces-lost"]
    )
    assert one.events("stopped")
    assert bool(collector.spans()) is (kind == "well")
    assert stage.producer.answers() == {"200": 300}, "each was sent once, and answered"
    assert not stage.producer.twice()
    assert stage.producer.count_requests()["pending"] == len(held), "the rest is back in its place"
