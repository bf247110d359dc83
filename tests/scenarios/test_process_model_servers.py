"""Model servers without an endpoint picker: the dispatcher reads their own metrics pages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.processes import Stage, World, assert_stays_true
from tests.support import wait_until_sync

SERVERS, SLOTS_PER_SERVER = 2, 16
LIMIT = 30
"""Limit of a pool with 32 slots: the capacity less the reserve."""
REQUEST_S = 3.0
"""Duration of a request: long enough to keep all slots used although a busy machine fills them slowly."""
REQUESTS = 60 * LIMIT
"""Three minutes of work, which is the longest time that the test waits."""


def make_signal_settings(world: World) -> dict[str, Any]:
    urls = [world.metrics.replace("/metrics", f"/servers/{number}/metrics") for number in range(SERVERS)]
    return {"source": "vllm", "interval_s": 0.5, "epp": {"urls": []}, "vllm": {"urls": urls}}


def test_source_and_list_of_servers_change_at_runtime(stage: Stage) -> None:
    world = stage.world(slots=SERVERS * SLOTS_PER_SERVER, endpoints=SERVERS, seconds=0.1)
    settings = stage.settings(world, max_sys=None, budget={"per_endpoint": SLOTS_PER_SERVER})
    picker_signals, server_signals = settings["signals"], make_signal_settings(world)
    dispatcher = stage.dispatcher(settings)
    dispatcher.wait_for(source="epp", max_sys=SERVERS * SLOTS_PER_SERVER)

    dispatcher.reconfigure(signals={**server_signals, "use": "auto"})
    dispatcher.wait_for(source="vllm", max_sys=SERVERS * SLOTS_PER_SERVER)
    dispatcher.reconfigure(signals={"vllm": {"urls": server_signals["vllm"]["urls"][:1]}})
    dispatcher.wait_for(source="vllm", max_sys=SLOTS_PER_SERVER)
    stage.producer.submit(100)
    stage.producer.wait_for_all(timeout_s=30)

    dispatcher.reconfigure(signals={"source": "epp", "vllm": {"urls": []}, "epp": picker_signals["epp"]})
    dispatcher.wait_for(source="epp", max_sys=SERVERS * SLOTS_PER_SERVER)
    assert dispatcher.status()["config_problem"] is None
    assert stage.producer.count_results() == {"200": 100}


@pytest.mark.first
def test_pages_of_model_servers_fill_the_pool_and_a_missing_page_closes_the_gate(stage: Stage) -> None:
    world = stage.world(
        slots=SERVERS * SLOTS_PER_SERVER, endpoints=SERVERS, flow_control=False, seconds=REQUEST_S
    )
    settings = stage.settings(
        world, max_sys=None, signals=make_signal_settings(world), budget={"per_endpoint": SLOTS_PER_SERVER}
    )
    dispatcher = stage.dispatcher(settings)
    stage.producer.submit(REQUESTS)
    wait_until_sync(lambda: world.is_filled(LIMIT), 60, what="the idle capacity to be used")

    world.control(realtime=20)
    wait_until_sync(
        lambda: world.in_flight() <= LIMIT - 20, 60, what="batch requests to make room for realtime requests"
    )
    world.control(realtime=0)
    wait_until_sync(lambda: world.is_filled(LIMIT), 60, what="the idle capacity to be used again")
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1

    world.control(endpoints=SERVERS - 1)
    status = dispatcher.wait_for(reason="unreadable")
    assert "HTTP 404" in status["signals_problem"]
    wait_until_sync(lambda: world.in_flight() == 0, 30, what="running requests to end")
    world.control(seconds=0.01)
    count = world.observed()["gateway"]["arrived"]
    assert_stays_true(
        lambda: world.observed()["gateway"]["arrived"] == count, 1.0, what="sent without metrics"
    )
    assert stage.producer.count_requests()["pending"], "otherwise no request had to wait"

    world.control(endpoints=SERVERS)
    stage.producer.wait_for_all(timeout_s=60)
    dispatcher.wait_for(leased=0)
    assert stage.producer.count_results() == {"200": len(stage.producer.submitted)}
    assert not stage.producer.find_duplicates()
    assert not stage.producer.find_lost_requests()
