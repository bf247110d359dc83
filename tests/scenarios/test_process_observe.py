"""`run --observe` decides, shows and exports everything, and changes nothing."""

from __future__ import annotations

from typing import Any

from tests.scenarios.processes import Stage, assert_stays_true
from tests.support import wait_until_sync

LIMIT = 30


def test_observer_beside_a_working_dispatcher_claims_nothing_and_shows_its_decisions(
    stage: Stage,
) -> None:
    world = stage.world(slots=32, seconds=0.3)
    producer = stage.producer
    settings = stage.settings(world)
    observer = stage.dispatcher(settings, "--observe")
    producer.submit(400)
    observer.wait_for(limit=LIMIT, pending=400, reason="open")
    assert_stays_true(
        lambda: producer.count_requests() == {"pending": 400, "leased": 0, "delayed": 0, "dead": 0}, 1.5
    )
    assert world.observed()["gateway"]["arrived"] == 0
    before = set(producer.client.scan_iter())

    worker = stage.dispatcher(settings)
    wait_until_sync(lambda: world.is_filled(LIMIT), 20, what="the worker to use the idle capacity")

    def get_full_status() -> dict[str, Any] | None:
        # Requests are counted once a second, and those that end or start at that moment may be missing.
        status = observer.status()
        is_full = status["reason"] == "full" and status["limit"] == LIMIT and status["in_flight"] >= LIMIT - 5
        return status if is_full else None

    status = wait_until_sync(get_full_status, 20, what="the observer to show the requests of the worker")
    assert status is not None
    assert status["observe"]
    assert status["running"] == 0
    metrics = observer.metrics()
    assert metrics["limit"] == LIMIT
    assert metrics["max_sys"] == 32
    assert sum(value for name, value in metrics.items() if name.startswith("gate{")) == 1
    producer.wait_for_all(timeout_s=30)
    counter_names = [
        n for n in observer.metrics() if n.startswith(("attempts_total{", "leases_ended_total{"))
    ]
    assert counter_names
    assert not any(observer.metrics()[name] for name in counter_names)
    assert worker.metrics()["attempts_total{delivered,2xx}"] == 400
    assert before == {producer.names.queue.encode()}, "the observer alone has written nothing"
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1
    assert observer.terminate() == 0
