"""`run --observe`: it decides, shows and exports everything, and touches nothing."""

from __future__ import annotations

from typing import Any

from tests.scenarios.processes import Stage, hold
from tests.support import wait_until_sync

LIMIT = 30


def test_an_observer_beside_a_working_dispatcher_claims_nothing_and_shows_what_it_would(
    stage: Stage,
) -> None:
    world = stage.world(slots=32, seconds=0.3)
    producer = stage.producer
    settings = stage.settings(world)
    observer = stage.dispatcher(settings, "--observe")
    producer.submit(400)
    observer.wait_for(limit=LIMIT, pending=400, reason="open")
    hold(lambda: producer.count_requests() == {"pending": 400, "leased": 0, "delayed": 0, "dead": 0}, 1.5)
    assert world.observed()["gateway"]["arrived"] == 0
    before = set(producer.client.scan_iter())

    worker = stage.dispatcher(settings)
    wait_until_sync(lambda: world.in_flight() >= LIMIT, 20, what="the worker to fill the slack")

    def full() -> dict[str, Any] | None:
        # Counted once a second: of what ended and began at that moment it may show a part.
        seen = observer.status()
        shows = seen["reason"] == "full" and seen["limit"] == LIMIT and seen["in_flight"] >= LIMIT - 5
        return seen if shows else None

    shown = wait_until_sync(full, 20, what="the observer to show what the worker has running")
    assert shown is not None
    assert shown["observe"]
    assert shown["running"] == 0
    metrics = observer.metrics()
    assert metrics["limit"] == LIMIT
    assert metrics["max_sys"] == 32
    assert sum(value for name, value in metrics.items() if name.startswith("gate{")) == 1
    producer.wait_for_all(timeout_s=30)
    counted = [n for n in observer.metrics() if n.startswith(("attempts_total{", "leases_ended_total{"))]
    assert counted
    assert not any(observer.metrics()[name] for name in counted)
    assert worker.metrics()["attempts_total{delivered,2xx}"] == 400
    assert before == {producer.names.queue.encode()}, "the observer alone had written nothing at all"
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1
    assert observer.terminate() == 0
