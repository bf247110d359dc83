"""A changed configuration file takes effect in a running dispatcher, or is refused and says why."""

from __future__ import annotations

import signal

from tests.scenarios.processes import Stage, hold
from tests.support import wait_until_sync


def test_a_changed_reserve_holds_at_once_and_costs_no_request(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.2)
    producer = stage.producer
    one = stage.dispatcher(stage.settings(world))
    producer.submit(1200)
    wait_until_sync(lambda: world.in_flight() >= 30, 20, what="the slack to be filled")

    one.reconfigure(budget={"reserve": 0.5})
    one.wait_for(config_generation=2, limit=16)
    # Leases tell, for all that run may have finished at once while their successors were already claimed.
    wait_until_sync(lambda: producer.counts()["leased"] <= 16, 5, what="the rest to finish")
    wait_until_sync(lambda: world.in_flight() <= 16, 5, what="the rest to leave the gateway")
    world.control(restart=True)
    hold(lambda: world.in_flight() <= 16 + 1, 1.5)
    seen = world.observed()["gateway"]
    assert seen["gone"] == 0, "nothing in flight is revoked"
    # How steadily is held in virtual time (test_virtual_cap), where no neighbour spoils a mean.
    assert seen["batch"]["peak"] >= 16, "used to the full"

    one.write("budget: {reserve: 0.2, reserv: 1}\n")
    problem = wait_until_sync(lambda: one.status()["config_problem"], 10, what="the bad file to be noticed")
    assert "budget.reserv" in problem
    assert "gateway.url" in problem, "all that is wrong, at once"
    assert one.metrics()["config_refused"] == 1
    status = one.status()
    assert (status["reserve"], status["limit"], status["config_generation"]) == (0.5, 16, 2)

    needs_restart = one.settings["gateway"] | {"url": "http://127.0.0.1:1"}
    one.write(one.settings | {"gateway": needs_restart, "budget": {"max_sys": 32, "reserve": 0.25}})
    wait_until_sync(lambda: "gateway.url" in (one.status()["config_problem"] or ""), 10)
    wait_until_sync(lambda: "restart" in (one.status()["config_problem"] or ""), 10)
    assert one.status()["reserve"] == 0.5, "nor is the rest of that file applied"

    one.reconfigure(budget={"reserve": 0.05})
    one.wait_for(config_generation=3, config_problem=None, limit=30)
    assert one.metrics()["config_refused"] == 0
    wait_until_sync(lambda: world.in_flight() >= 30, 5, what="the room to be used again")

    producer.wait_for_all(timeout_s=30)
    assert producer.answers() == {"200": 1200}
    assert not producer.twice()
    assert not producer.unaccounted()
    assert one.tries("failed") == 0
    assert len(one.events("config-refused")) >= 2


def test_sighup_reads_the_file_again(stage: Stage) -> None:
    """At once, and a file that nobody changed changes nothing."""
    world = stage.world(slots=32)
    one = stage.dispatcher(stage.settings(world))
    one.wait_for(limit=30)
    one.settings["budget"] = {"max_sys": 32, "reserve": 0.5}
    one.write(one.settings)
    one.send(signal.SIGHUP)
    one.wait_for(limit=16, config_problem=None)
    one.write("gateway: [")
    one.send(signal.SIGHUP)
    wait_until_sync(lambda: one.status()["config_problem"], 10, what="the bad file to be noticed")
    assert one.status()["limit"] == 16
    assert one.child.poll() is None
