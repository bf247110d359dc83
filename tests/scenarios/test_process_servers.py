"""Plain model servers, without an endpoint picker: their own pages are what the dispatcher knows."""

from __future__ import annotations

from typing import Any

from tests.scenarios.processes import Stage, World, hold
from tests.support import wait_until_sync

SERVERS, PER_SERVER = 2, 16
LIMIT = 30
"""Of 32 requests, less the reserve."""
RUNS_S = 3.0
"""A request: so long that all places are taken at most moments, though a busy machine is slow to fill one."""
ENOUGH = 60 * LIMIT
"""Three minutes of work: as long as is waited for at the most."""


def signals(world: World) -> dict[str, Any]:
    urls = [world.metrics.replace("/metrics", f"/servers/{number}/metrics") for number in range(SERVERS)]
    return {"source": "vllm", "interval_s": 0.5, "epp": {"urls": []}, "vllm": {"urls": urls}}


def test_which_servers_are_read_and_whether_a_picker_is_changes_while_it_runs(stage: Stage) -> None:
    world = stage.world(slots=SERVERS * PER_SERVER, endpoints=SERVERS, seconds=0.1)
    settings = stage.settings(world, max_sys=None, budget={"per_endpoint": PER_SERVER})
    by_picker, by_servers = settings["signals"], signals(world)
    one = stage.dispatcher(settings)
    one.wait_for(source="epp", max_sys=SERVERS * PER_SERVER)

    one.reconfigure(signals={**by_servers, "use": "auto"})
    one.wait_for(source="vllm", max_sys=SERVERS * PER_SERVER)
    one.reconfigure(signals={"vllm": {"urls": by_servers["vllm"]["urls"][:1]}})
    one.wait_for(source="vllm", max_sys=PER_SERVER)
    stage.producer.submit(100)
    stage.producer.wait_for_all(timeout_s=30)

    one.reconfigure(signals={"source": "epp", "vllm": {"urls": []}, "epp": by_picker["epp"]})
    one.wait_for(source="epp", max_sys=SERVERS * PER_SERVER)
    assert one.status()["config_problem"] is None
    assert stage.producer.answers() == {"200": 100}


def test_model_servers_own_pages_fill_the_pool_and_one_that_goes_away_closes_the_gate(stage: Stage) -> None:
    world = stage.world(slots=SERVERS * PER_SERVER, endpoints=SERVERS, flow_control=False, seconds=RUNS_S)
    settings = stage.settings(
        world, max_sys=None, signals=signals(world), budget={"per_endpoint": PER_SERVER}
    )
    one = stage.dispatcher(settings)
    stage.producer.submit(ENOUGH)
    wait_until_sync(lambda: world.in_flight() >= LIMIT, 60, what="the slack to be filled")

    world.control(realtime=20)
    wait_until_sync(lambda: world.in_flight() <= LIMIT - 20, 60, what="room to be made for realtime")
    world.control(realtime=0)
    wait_until_sync(lambda: world.in_flight() >= LIMIT, 60, what="the slack to be filled again")
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1

    world.control(endpoints=SERVERS - 1)
    status = one.wait_for(reason="unreadable")
    assert "HTTP 404" in status["signals_problem"]
    wait_until_sync(lambda: world.in_flight() == 0, 30, what="what runs to end")
    world.control(seconds=0.01)
    count = world.observed()["gateway"]["arrived"]
    hold(lambda: world.observed()["gateway"]["arrived"] == count, 1.0, what="sent blind")
    assert stage.producer.count_requests()["pending"], "otherwise nothing was held back"

    world.control(endpoints=SERVERS)
    stage.producer.wait_for_all(timeout_s=60)
    one.wait_for(leased=0)
    assert stage.producer.answers() == {"200": len(stage.producer.submitted)}
    assert not stage.producer.twice()
    assert not stage.producer.unaccounted()
