"""Requests and their models with real processes: a rollout, a late adapter, and a misspelled name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.scenarios.processes import Dispatcher, Stage, World
from tests.support import wait_until_sync

OLD, NEW = "qwen-v1", "qwen-v2"


def make_body(model: str) -> bytes:
    return json.dumps({"model": model, "prompt": "hi"}).encode()


def start_dispatcher(stage: Stage, world: World, *models: str, **serving: Any) -> Dispatcher:
    """Start a dispatcher that asks the gateway of this world for its models every 0.5 s."""
    settings = stage.settings(
        world,
        models=[{"name": name} for name in models],
        serving={"interval_s": 0.5, "observe": "gateway"} | serving,
    )
    return stage.dispatcher(settings)


def list_model_urls(world: World, count: int) -> list[str]:
    """Return the URLs of the model lists of all model servers."""
    return [world.metrics.replace("/metrics", f"/servers/{number}/v1/models") for number in range(count)]


@pytest.mark.parametrize("requests", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_rollout_causes_no_404_results(stage: Stage, requests: int) -> None:
    """Four servers change to another version one by one while requests for both versions wait."""
    world = stage.world(endpoints=4, slots=32, seconds=0.1, models=OLD)
    settings = stage.settings(
        world,
        models=[{"name": OLD}, {"name": NEW}],
        serving={"interval_s": 0.3, "urls": list_model_urls(world, 4)},
    )
    stage.dispatcher(settings)
    old_ids = stage.producer.submit(requests, make_body(OLD), prefix="old")
    new_ids = stage.producer.submit(requests, make_body(NEW), prefix="new")
    wait_until_sync(lambda: len(stage.producer.collect()) >= requests // 10, 60, what="some answers")
    world.control(roll={"to": [NEW], "gone_s": 0.5, "pause_s": 0.5})
    wait_until_sync(
        lambda: sum(id_ in stage.producer.collect() for id_ in new_ids) == requests,
        120,
        what="the new version",
    )
    # The remaining requests for the old version wait until it is served again.
    world.control(models=[[OLD, NEW]] * 4)
    stage.producer.wait_for_all(old_ids, timeout_s=60)
    assert stage.producer.count_results() == {"200": 2 * requests}
    assert not stage.producer.find_duplicates()


def test_request_waits_for_an_adapter_while_others_run(stage: Stage) -> None:
    world = stage.world(seconds=0.05, models="qwen")
    dispatcher = start_dispatcher(stage, world, "qwen", "night")
    night_ids = stage.producer.submit(40, make_body("night"), prefix="night")
    day_ids = stage.producer.submit(40, make_body("qwen"), prefix="day")
    stage.producer.wait_for_all(day_ids)
    wait_until_sync(lambda: count_waiting(dispatcher, "night") == 40, 30, what="all requests to wait")
    assert not set(night_ids) & set(stage.producer.collect())
    assert "40 requests wait: model 'night' is not served." in dispatcher.status()["explanation"]
    dispatcher.kill()
    dispatcher.start()  # waiting requests are stored in the queue
    wait_until_sync(lambda: count_waiting(dispatcher, "night") == 40, 30, what="all requests to wait")
    world.control(adapter={"name": "night"})
    stage.producer.wait_for_all(night_ids)
    assert stage.producer.count_results() == {"200": 80}
    wait_until_sync(
        lambda: dispatcher.metrics()["model_waiting{night}"] == 0,
        30,
        what="the count of waiting requests to be 0",
    )


def test_unknown_model_fails_at_once_and_expired_request_names_its_missing_model(stage: Stage) -> None:
    world = stage.world(seconds=0.05, models="qwen")
    dispatcher = start_dispatcher(stage, world, "qwen", "night")
    wait_until_sync(
        lambda: any(each["state"] == "ready" for each in dispatcher.status()["models"]),
        30,
        what="the first model list",
    )
    (typo_id,) = stage.producer.submit(1, make_body("qwne"), prefix="slip")
    (late_id,) = stage.producer.submit(1, make_body("night"), prefix="late", deadline_s=3)
    results = stage.producer.wait_for_all([typo_id, late_id])
    assert results[typo_id][0]["error_code"] == "MODEL_NOT_FOUND"
    assert results[typo_id][0]["error_message"] == "no model 'qwne' is served here: there is 'qwen'"
    assert results[late_id][0]["error_code"] == "DEADLINE_EXCEEDED"
    assert "its model 'night' is not served" in results[late_id][0]["error_message"]


def count_waiting(dispatcher: Dispatcher, model: str) -> int:
    return sum(int(each["waiting"] or 0) for each in dispatcher.status()["models"] if each["name"] == model)
