"""Requests and their models by real processes: a rollout, an adapter that comes late, a slip in a name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.scenarios.processes import Dispatcher, Stage, World
from tests.support import wait_until_sync

OLD, NEW = "qwen-v1", "qwen-v2"


def body(model: str) -> bytes:
    return json.dumps({"model": model, "prompt": "hi"}).encode()


def begin(stage: Stage, world: World, *models: str, **serving: Any) -> Dispatcher:
    """A dispatcher that asks the gateway of this world each half second what is served."""
    settings = stage.settings(
        world,
        models=[{"name": name} for name in models],
        serving={"interval_s": 0.5, "observe": "gateway"} | serving,
    )
    return stage.dispatcher(settings)


def servers(world: World, count: int) -> list[str]:
    """Where each model server of a world is asked for its models."""
    return [world.metrics.replace("/metrics", f"/servers/{number}/v1/models") for number in range(count)]


@pytest.mark.parametrize("requests", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_no_404_of_a_rollout_reaches_a_submitter(stage: Stage, requests: int) -> None:
    """Four servers are replaced one by one by another version, under a job for each of the two."""
    world = stage.world(endpoints=4, slots=32, seconds=0.1, models=OLD)
    settings = stage.settings(
        world,
        models=[{"name": OLD}, {"name": NEW}],
        serving={"interval_s": 0.3, "urls": servers(world, 4)},
    )
    stage.dispatcher(settings)
    old = stage.producer.submit(requests, body(OLD), prefix="old")
    new = stage.producer.submit(requests, body(NEW), prefix="new")
    wait_until_sync(lambda: len(stage.producer.collect()) >= requests // 10, 60, what="some answers")
    world.control(roll={"to": [NEW], "gone_s": 0.5, "pause_s": 0.5})
    wait_until_sync(
        lambda: sum(id_ in stage.producer.collect() for id_ in new) == requests, 120, what="the new version"
    )
    # What was left for the old one waits; it comes back, and so do they.
    world.control(models=[[OLD, NEW]] * 4)
    stage.producer.wait_for_all(old, timeout_s=60)
    assert stage.producer.answers() == {"200": 2 * requests}
    assert not stage.producer.twice()


def test_request_waits_for_an_adapter_and_others_go_on(stage: Stage) -> None:
    world = stage.world(seconds=0.05, models="qwen")
    one = begin(stage, world, "qwen", "night")
    night = stage.producer.submit(40, body("night"), prefix="night")
    day = stage.producer.submit(40, body("qwen"), prefix="day")
    stage.producer.wait_for_all(day)
    wait_until_sync(lambda: waiting(one, "night") == 40, 30, what="all to wait")
    assert not set(night) & set(stage.producer.collect())
    assert "40 requests wait: model 'night' is not served." in one.status()["explanation"]
    one.kill()
    one.start()  # what waits is in the queue
    wait_until_sync(lambda: waiting(one, "night") == 40, 30, what="all to wait")
    world.control(adapter={"name": "night"})
    stage.producer.wait_for_all(night)
    assert stage.producer.answers() == {"200": 80}
    wait_until_sync(lambda: one.metrics()["model_waiting{night}"] == 0, 30, what="the count")


def test_what_is_no_model_ends_at_once_and_what_waits_in_vain_says_for_what(stage: Stage) -> None:
    world = stage.world(seconds=0.05, models="qwen")
    one = begin(stage, world, "qwen", "night")
    wait_until_sync(
        lambda: any(each["state"] == "ready" for each in one.status()["models"]), 30, what="a look"
    )
    (slip,) = stage.producer.submit(1, body("qwne"), prefix="slip")
    (late,) = stage.producer.submit(1, body("night"), prefix="late", deadline_s=3)
    began = time.monotonic()
    found = stage.producer.wait_for_all([slip, late])
    assert time.monotonic() - began < 20
    assert found[slip][0]["error_code"] == "MODEL_NOT_FOUND"
    assert found[slip][0]["error_message"] == "no model 'qwne' is served here: there is 'qwen'"
    assert found[late][0]["error_code"] == "DEADLINE_EXCEEDED"
    assert "its model 'night' is not served" in found[late][0]["error_message"]


def waiting(one: Dispatcher, model: str) -> int:
    return sum(int(each["waiting"] or 0) for each in one.status()["models"] if each["name"] == model)
