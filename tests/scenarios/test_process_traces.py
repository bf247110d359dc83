"""A failing OTLP endpoint does not affect requests."""

from __future__ import annotations

import pytest

from tests.scenarios.processes import Stage
from tests.support import free_port, wait_until_sync
from tests.telemetry.trace_collector import Collector

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["works", "refuses", "hangs", "fails"])
def test_requests_and_drain_do_not_wait_for_the_trace_endpoint(stage: Stage, kind: str) -> None:
    world = stage.world(slots=32, seconds=0.2)
    collector = Collector({"fails": 500, "hangs": None}.get(kind, 200))
    with collector.serve():
        url = collector.url if kind != "refuses" else f"http://127.0.0.1:{free_port()}"
        dispatcher = stage.dispatcher(
            stage.settings(world, tracing={"endpoint": url}, shutdown={"drain_s": 1})
        )
        stage.producer.submit(300)
        stage.producer.wait_for_all()
        hanging = stage.producer.submit(5, b'{"sim":{"kind":"hang"}}', prefix="hanging")
        wait_until_sync(lambda: len(world.log()) == 305, what="the last requests to be sent")
        if kind != "works":
            wait_until_sync(lambda: dispatcher.events("traces-lost"), 20, what="the loss to be logged")
            assert dispatcher.metrics()["events_total{traces-lost}"] == 1, "the event is counted"
        assert dispatcher.terminate(within_s=20.0) == 0, (
            "the drain does not wait for the endpoint, which hangs for 30 s"
        )
    assert [event["event"] for event in dispatcher.events() if event["event"].startswith("traces")] == (
        [] if kind == "works" else ["traces-lost"]
    )
    assert dispatcher.events("stopped")
    assert bool(collector.read_spans()) is (kind == "works")
    assert stage.producer.count_results() == {"200": 300}, "each request was sent once and answered"
    assert not stage.producer.find_duplicates()
    assert stage.producer.count_requests()["pending"] == len(hanging), "the hanging requests are queued again"
