"""A dispatcher with the rights of docs/explanation/security.md does all of its work, and survives the loss
of one."""

from __future__ import annotations

import pytest

from tests.queue.roles import grant, url_of
from tests.queue.servers import ENGINES
from tests.scenarios.processes import Stage, hold
from tests.support import wait_until_sync


@pytest.mark.parametrize("queue_server", ENGINES, indirect=True)
def test_with_the_least_rights_each_request_has_one_result_though_a_right_is_taken_away(stage: Stage) -> None:
    world = stage.world(slots=8, seconds=0.05)
    producer, admin = stage.producer, stage.producer.client
    grant(admin, "dispatcher", "-hincrby")
    url = url_of(stage.server, "dispatcher")
    one = stage.dispatcher(stage.settings(world, max_sys=8, queue={"url": url}))
    producer.submit(150, token="t")
    producer.submit(3, prefix="late", deadline_s=-60)

    def lacks(right: str) -> None:
        status = one.wait_for(reason="queue-unreachable")
        assert f"this user may not run: {right}" in status["explanation"]
        hold(
            lambda: one.status()["reason"] == "queue-unreachable",
            1.5,
            what="what can still be read opens nothing",
        )
        assert one.claim_probe("/livez")[0] == 200
        assert producer.count_requests()["leased"] <= 8

    lacks("hincrby")
    assert world.observed()["gateway"]["batch"]["peak"] == 0, "nothing is sent"
    grant(admin, "dispatcher")
    wait_until_sync(lambda: len(producer.collect()) >= 50, 20, what="some results")
    grant(admin, "dispatcher", "-zrem")
    lacks("zrem")
    grant(admin, "dispatcher")

    producer.wait_for_all()
    assert producer.answers() == {"200": 150, "DEADLINE_EXCEEDED": 3}
    assert not producer.twice()
    assert not producer.unaccounted()
    assert not one.events("wake-ups-unavailable")
    assert [event["why"] for event in one.events("queue-unreachable")]
    assert one.terminate() == 0
