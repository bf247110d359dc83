"""A rolling update as a Deployment does it (maxSurge 1, maxUnavailable 0): real processes, under load."""

from __future__ import annotations

from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync

SLOTS = 16
LIMIT = 15
"""floor(16 × (1 − 0.05))"""
READY_S = 30.0
"""An interpreter, its imports and a first reading; on a machine that does other things beside."""


def test_replicas_are_replaced_one_by_one_and_nobody_notices(stage: Stage) -> None:
    """The next is ready before the one before it is asked to end, and that one finishes what it runs."""
    world = stage.world(slots=SLOTS, seconds=0.4)
    producer = stage.producer
    settings = stage.settings(world, max_sys=SLOTS, shutdown={"drain_s": 20})

    def ready() -> Dispatcher:
        one = stage.dispatcher(settings)
        wait_until_sync(lambda: one.claim_probe("/readyz")[0] == 200, READY_S, what="the replica to be ready")
        return one

    old = [ready(), ready()]

    def both_take_part() -> bool:
        """Who runs a request runs its successor: the work comes in drops until each runs some. And none comes
        while some waits, or who has filled the limit first would keep it."""
        if not producer.count_requests()["pending"]:
            producer.submit(2, token="t")
        return all(one.status()["running"] for one in old)

    wait_until_sync(both_take_part, 20, what="both replicas to take part", every_s=0.05)
    producer.submit(600, token="t")
    wait_until_sync(lambda: world.in_flight() >= LIMIT, 20, what="the slack to be filled")
    new = []
    for leaving in old:
        new.append(ready())
        producer.submit(max(0, 300 - producer.count_requests()["pending"]), token="t")
        assert leaving.terminate(READY_S) == 0
        assert producer.count_requests()["pending"], "under load until the end of the update"
    wait_until_sync(lambda: world.in_flight() >= LIMIT, 10, what="the slack to be filled by the new ones")

    world.control(seconds=0.02)
    producer.wait_for_all()
    assert producer.answers() == {"200": len(producer.submitted)}
    assert not producer.twice()
    assert not producer.unaccounted()
    seen = world.observed()
    assert seen["gateway"]["batch"]["peak"] <= LIMIT, "the limit, at every moment"
    # None was handed on by force: no lease ran out, no connection was cut, each was sent once.
    assert seen["gateway"]["gone"] == 0
    assert len({entry.id for entry in world.log()}) == len(world.log()) == len(producer.submitted)
    assert [one.metrics()["reclaims_total"] for one in new] == [0, 0]
