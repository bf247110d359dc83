"""A dispatcher with the Redis permissions of docs/explanation/security.md works, and survives losing one."""

from __future__ import annotations

import pytest

from tests.queue.redis_users import grant, url_of
from tests.queue.servers import ENGINES
from tests.scenarios.processes import Stage, assert_stays_true
from tests.support import wait_until_sync


@pytest.mark.parametrize("queue_server", ENGINES, indirect=True)
def test_requests_have_one_result_each_with_least_permissions_and_after_losing_one(stage: Stage) -> None:
    world = stage.world(slots=8, seconds=0.05)
    producer, admin = stage.producer, stage.producer.client
    grant(admin, "dispatcher", "-hincrby")
    url = url_of(stage.server, "dispatcher")
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=8, queue={"url": url}))
    producer.submit(150, token="t")
    producer.submit(3, prefix="late", deadline_s=-60)

    def assert_lacks_permission(command: str) -> None:
        status = dispatcher.wait_for(reason="queue-unreachable")
        assert f"this user may not run: {command}" in status["explanation"]
        assert_stays_true(
            lambda: dispatcher.status()["reason"] == "queue-unreachable",
            1.5,
            what="the gate to stay closed although reads succeed",
        )
        assert dispatcher.get_probe("/livez")[0] == 200
        assert producer.count_requests()["leased"] <= 8

    assert_lacks_permission("hincrby")
    assert world.observed()["gateway"]["batch"]["peak"] == 0, "nothing is sent"
    grant(admin, "dispatcher")
    wait_until_sync(lambda: len(producer.collect()) >= 50, 20, what="some results")
    grant(admin, "dispatcher", "-zrem")
    assert_lacks_permission("zrem")
    grant(admin, "dispatcher")

    producer.wait_for_all()
    assert producer.count_results() == {"200": 150, "DEADLINE_EXCEEDED": 3}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()
    assert not dispatcher.events("wake-ups-unavailable")
    assert [event["why"] for event in dispatcher.events("queue-unreachable")]
    assert dispatcher.terminate() == 0
