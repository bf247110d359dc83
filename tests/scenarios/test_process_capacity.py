"""What an endpoint runs at once is learned from the picker's pages, and a setting that differs is told of."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dispatcher.cli import app
from tests.scenarios.processes import Dispatcher, Stage, World, merged
from tests.support import wait_until_sync


def said(one: Dispatcher, verb: str = "explain") -> str:
    port = one.events("started")[-1]["admin_port"]
    config = one.folder / "asked.yaml"
    config.write_text(one.config.read_text().replace("port: 0", f"port: {port}"))
    done = CliRunner().invoke(app, [verb, "--config", str(config)])
    assert done.exit_code == 0, done.output
    return done.output


def learned(one: Dispatcher, world: World) -> bool:
    """Realtime comes and goes, so that pages differ; whether the picker's number is known."""
    world.control(realtime=(world.observed()["pool"]["realtime"]["now"] + 5) % 17)
    return bool(one.status()["picker_max_concurrency"] == 16)


@pytest.mark.parametrize(("budget", "limit"), [({"per_endpoint": "auto"}, 30), ({"per_endpoint": 8}, 15)])
def test_the_pickers_number_is_learned_and_compared(
    stage: Stage, budget: dict[str, object], limit: int
) -> None:
    world = stage.world(slots=32, endpoints=2, seconds=0.3, realtime_seconds=0.2)
    settings = stage.settings(world, signals={"interval_s": 0.2})
    settings["budget"] = budget
    one = stage.dispatcher(settings)
    stage.producer.submit(300)
    wait_until_sync(lambda: learned(one, world), 30, what="maxConcurrency to be learned", every_s=0.1)
    world.control(realtime=0)
    status = one.wait_for(limit=limit)
    assert status["max_sys"] == 2 * status["per_endpoint"]
    assert [each["signal"] for each in status["readings"]] == ["saturation"], "a count needs no second"
    assert status["detector"] == "counts requests, maxConcurrency 16"
    assert [event["picker"] for event in one.events("capacity-learned")] == [16]
    assert status["max_sys_source"] == ("picker" if limit == 30 else "setting")
    if limit == 30:
        assert (status["per_endpoint"], status["per_endpoint_source"]) == (16, "picker")
        assert "An endpoint is taken to run 16 requests, as the endpoint picker counts." in said(one)
        assert not one.events("capacity-differs")
    else:
        assert (status["per_endpoint"], status["per_endpoint_source"]) == (8, "setting")
        assert "The capacity is 16 by budget.per_endpoint, 8, × ready endpoints" in said(one)
        told = "budget.per_endpoint is 8, the endpoint picker counts with 16: one of them is wrong."
        assert told in said(one)
        assert told in said(one, "status")
        assert len(one.events("capacity-differs")) == 1
        assert one.metrics()["picker_max_concurrency"] == 16
    stage.producer.wait_for_all(timeout_s=40)
    assert world.observed()["gateway"]["batch"]["peak"] <= limit + 1
    if limit == 15:
        world.control(metrics="gone")
        one.wait_for(reason="unreadable")
        assert "The capacity is" not in said(one), "nobody knows how many endpoints are ready now"


def test_what_is_not_proven_is_said_as_check_says_it(stage: Stage) -> None:
    world = stage.world(slots=32, endpoints=2, seconds=3600)
    one = stage.dispatcher(merged(stage.settings(world, max_sys=None), {"signals": {"interval_s": 0.2}}))
    status = one.wait_for(per_endpoint_source="search", max_sys=16, max_sys_source="search")
    assert (status["per_endpoint"], status["configured_max_sys"]) == (8, None)
    assert [event["per_endpoint"] for event in one.events("capacity-search")] == [8]
    assert "The capacity is 16 by the search so far" in said(one)
    assert "Nobody names the capacity: the search started at 8 requests per endpoint" in said(one)
    stage.producer.submit(1)
    assert one.wait_for(per_endpoint_source="suggestion")["per_endpoint"] == 16
    told = "the picker's page suggests 16 requests per endpoint; not proven yet"
    assert told in said(one).lower()
    checked = CliRunner().invoke(app, ["check", "--config", str(one.config)])
    assert f"ok: budget.per_endpoint: auto: {told}\n" in checked.output
    one.kill()


def test_a_utilization_detector_is_not_followed_alone_whatever_its_name(stage: Stage) -> None:
    """It was: 69 running and waiting on 48 slots."""
    world = stage.world(
        slots=32, endpoints=2, seconds=0.3, detector="utilization", detector_name="high-concurrency-pool"
    )
    settings = stage.settings(world, signals={"interval_s": 0.2})
    settings["budget"] = {"per_endpoint": 16}
    one = stage.dispatcher(settings)
    stage.producer.submit(300)
    status = one.wait_for(limit=30)
    assert status["detector"] == "utilization (high-concurrency-pool)"
    stage.producer.wait_for_all(timeout_s=40)
    assert [each["signal"] for each in one.status()["readings"]] == ["saturation", "requests"]
    assert one.status()["picker_max_concurrency"] is None
    assert world.observed()["pool"]["all"]["peak"] <= 32


def test_a_picker_that_has_just_started_is_waited_for(stage: Stage) -> None:
    world = stage.world(slots=32, cold=True, flush_s=3600.0)
    stage.producer.submit(50)
    one = stage.dispatcher(stage.settings(world, signals={"interval_s": 0.2}))

    def told() -> str:
        told = str(one.status()["explanation"])
        return told if "sees no ready endpoint" in told else ""

    explanation = wait_until_sync(told, 10, what="the first page to be told of")
    assert "Nothing is sent: starting" in explanation
    assert "that has just started shows none for 5 s" in explanation
    assert world.observed()["gateway"]["arrived"] == 0
    world.control(flush=True)
    stage.producer.wait_for_all(timeout_s=40)
