"""Rolling update like that of a Deployment (maxSurge 1, maxUnavailable 0) with real processes under load."""

from __future__ import annotations

from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync

SLOTS = 16
LIMIT = 15
"""floor(16 × (1 − 0.05))"""
READY_TIMEOUT_S = 30.0
"""Time for an interpreter to start, its imports and a first reading, on a busy machine."""


def test_replicas_are_replaced_one_by_one_without_any_effect_on_requests(stage: Stage) -> None:
    """Each new replica is ready before an old one gets SIGTERM, and the old one finishes its requests."""
    world = stage.world(slots=SLOTS, seconds=0.4)
    producer = stage.producer
    settings = stage.settings(world, max_sys=SLOTS, shutdown={"drain_s": 20})

    def start_replica() -> Dispatcher:
        dispatcher = stage.dispatcher(settings)
        wait_until_sync(
            lambda: dispatcher.get_probe("/readyz")[0] == 200, READY_TIMEOUT_S, what="the replica to be ready"
        )
        return dispatcher

    old = [start_replica(), start_replica()]

    def both_run_requests() -> bool:
        """Submit two requests at a time until both replicas run some.

        A replica that finishes a request claims the next one. If requests waited, the replica that reached
        the limit first would keep all of it.
        """
        if not producer.count_requests()["pending"]:
            producer.submit(2, token="t")
        return all(each.status()["running"] for each in old)

    wait_until_sync(both_run_requests, 20, what="both replicas to run requests", every_s=0.05)

    def let_requests_wait() -> None:
        producer.submit(max(0, 600 - producer.count_requests()["pending"]), token="t")

    let_requests_wait()
    wait_until_sync(lambda: world.is_filled(LIMIT), 20, what="the idle capacity to be used")
    new = []
    for replica in old:
        new.append(start_replica())
        let_requests_wait()
        assert replica.terminate(READY_TIMEOUT_S) == 0
        assert producer.count_requests()["pending"], "requests wait until the end of the update"
    # On a busy machine, so much time has passed that few requests are left.
    let_requests_wait()
    wait_until_sync(lambda: world.is_filled(LIMIT), 10, what="the new replicas to use the idle capacity")

    world.control(seconds=0.02)
    producer.wait_for_all()
    assert producer.count_results() == {"200": len(producer.submitted)}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()
    observed = world.observed()
    assert observed["gateway"]["batch"]["peak"] <= LIMIT, "the limit holds at every moment"
    # No lease expired, no connection was cut, and each request was sent once.
    assert observed["gateway"]["gone"] == 0
    assert len({entry.id for entry in world.log()}) == len(world.log()) == len(producer.submitted)
    assert [dispatcher.metrics()["reclaims_total"] for dispatcher in new] == [0, 0]
