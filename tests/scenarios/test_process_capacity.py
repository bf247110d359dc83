"""The capacity of an endpoint is learned from the picker, and a different setting is reported."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dispatcher.cli import app
from tests.scenarios.processes import Dispatcher, Stage, World, merge_settings
from tests.support import wait_until_sync


def run_command(dispatcher: Dispatcher, command: str = "explain") -> str:
    port = dispatcher.events("started")[-1]["admin_port"]
    config = dispatcher.folder / "client.yaml"
    config.write_text(dispatcher.config.read_text().replace("port: 0", f"port: {port}"))
    completed = CliRunner().invoke(app, [command, "--config", str(config)])
    assert completed.exit_code == 0, completed.output
    return completed.output


def is_capacity_learned(dispatcher: Dispatcher, world: World) -> bool:
    """Change the realtime load, so that pages differ. Return whether the number of the picker is known."""
    world.control(realtime=(world.observed()["pool"]["realtime"]["now"] + 5) % 17)
    return bool(dispatcher.status()["picker_max_concurrency"] == 16)


@pytest.mark.parametrize(("budget", "limit"), [({"per_endpoint": "auto"}, 30), ({"per_endpoint": 8}, 15)])
def test_capacity_of_the_picker_is_learned_and_compared_with_the_setting(
    stage: Stage, budget: dict[str, object], limit: int
) -> None:
    world = stage.world(slots=32, endpoints=2, seconds=0.3, realtime_seconds=0.2)
    settings = stage.settings(world, signals={"interval_s": 0.2})
    settings["budget"] = budget
    dispatcher = stage.dispatcher(settings)
    stage.producer.submit(300)
    wait_until_sync(
        lambda: is_capacity_learned(dispatcher, world), 30, what="maxConcurrency to be learned", every_s=0.1
    )
    world.control(realtime=0)
    status = dispatcher.wait_for(limit=limit)
    assert status["max_sys"] == 2 * status["per_endpoint"]
    assert [each["signal"] for each in status["readings"]] == ["saturation"], (
        "a detector that counts requests needs no second signal"
    )
    assert status["detector"] == "counts requests, maxConcurrency 16"
    assert [event["picker"] for event in dispatcher.events("capacity-learned")] == [16]
    assert status["max_sys_source"] == ("picker" if limit == 30 else "setting")
    if limit == 30:
        assert (status["per_endpoint"], status["per_endpoint_source"]) == (16, "picker")
        assert "Each endpoint is assumed to run 16 requests, as the endpoint picker counts." in run_command(
            dispatcher
        )
        assert not dispatcher.events("capacity-differs")
    else:
        assert (status["per_endpoint"], status["per_endpoint_source"]) == (8, "setting")
        assert "The capacity is 16 by budget.per_endpoint, 8, × ready endpoints" in run_command(dispatcher)
        warning = "budget.per_endpoint is 8, the endpoint picker counts with 16: one of them is wrong."
        assert warning in run_command(dispatcher)
        assert warning in run_command(dispatcher, "status")
        assert len(dispatcher.events("capacity-differs")) == 1
        assert dispatcher.metrics()["picker_max_concurrency"] == 16
    stage.producer.wait_for_all(timeout_s=40)
    assert world.observed()["gateway"]["batch"]["peak"] <= limit + 1
    if limit == 15:
        world.control(metrics="gone")
        dispatcher.wait_for(reason="unreadable")
        assert "The capacity is" not in run_command(dispatcher), (
            "the number of ready endpoints is unknown now"
        )


def test_unproven_capacity_is_described_like_in_check(stage: Stage) -> None:
    world = stage.world(slots=32, endpoints=2, seconds=3600)
    dispatcher = stage.dispatcher(
        merge_settings(stage.settings(world, max_sys=None), {"signals": {"interval_s": 0.2}})
    )
    status = dispatcher.wait_for(per_endpoint_source="search", max_sys=16, max_sys_source="search")
    assert (status["per_endpoint"], status["configured_max_sys"]) == (8, None)
    assert [event["per_endpoint"] for event in dispatcher.events("capacity-search")] == [8]
    assert "The capacity is 16 by the search so far" in run_command(dispatcher)
    assert (
        "No setting or metric names the capacity: the search started at 8 requests per endpoint"
        in run_command(dispatcher)
    )
    stage.producer.submit(1)
    assert dispatcher.wait_for(per_endpoint_source="suggestion")["per_endpoint"] == 16
    warning = "the picker's page suggests 16 requests per endpoint; not proven yet"
    assert warning in run_command(dispatcher).lower()
    checked = CliRunner().invoke(app, ["check", "--config", str(dispatcher.config)])
    assert f"ok: budget.per_endpoint: auto: {warning}\n" in checked.output
    dispatcher.kill()


def test_utilization_detector_is_not_used_alone_whatever_its_name(stage: Stage) -> None:
    """In an earlier version 69 requests ran or waited on 48 slots."""
    world = stage.world(
        slots=32, endpoints=2, seconds=0.3, detector="utilization", detector_name="high-concurrency-pool"
    )
    settings = stage.settings(world, signals={"interval_s": 0.2})
    settings["budget"] = {"per_endpoint": 16}
    dispatcher = stage.dispatcher(settings)
    stage.producer.submit(300)
    status = dispatcher.wait_for(limit=30)
    assert status["detector"] == "utilization (high-concurrency-pool)"
    stage.producer.wait_for_all(timeout_s=40)
    assert [each["signal"] for each in dispatcher.status()["readings"]] == ["saturation", "requests"]
    assert dispatcher.status()["picker_max_concurrency"] is None
    assert world.observed()["pool"]["all"]["peak"] <= 32


def test_nothing_is_sent_until_a_new_picker_knows_its_endpoints(stage: Stage) -> None:
    world = stage.world(slots=32, cold=True, flush_s=3600.0)
    stage.producer.submit(50)
    dispatcher = stage.dispatcher(stage.settings(world, signals={"interval_s": 0.2}))

    def get_explanation() -> str:
        explanation = str(dispatcher.status()["explanation"])
        return explanation if "sees no ready endpoint" in explanation else ""

    explanation = wait_until_sync(get_explanation, 10, what="the first page to be reported")
    assert "Nothing is sent: starting" in explanation
    assert "that has just started shows none for 5 s" in explanation
    assert world.observed()["gateway"]["arrived"] == 0
    world.control(flush=True)
    stage.producer.wait_for_all(timeout_s=40)
