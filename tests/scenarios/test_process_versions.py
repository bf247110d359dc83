"""Versions of a model by real processes: a rollout under a job, and what stays with its version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.processes import Dispatcher, Entry, Stage, World
from tests.support import wait_until_sync

OLD, NEW = "qwen-v1", "qwen-v2"
MATCH = r"qwen-v(?P<version>\d+)"
COLD_S = 3.0
BODY = b'{"model":"qwen","prompt":"hi"}'
SUBSET = "x-endpoints"


def begin(stage: Stage, world: World, folder: Path, *arguments: str, **model: Any) -> Dispatcher:
    """A dispatcher that warms each version of `qwen` up at each of the world's servers."""
    lines = [
        {"url": "/v1/completions", "body": {"model": "qwen", "prompt": prompt}, "repeat": 2}
        for prompt in ("short", "long " * 200)
    ]
    warmup = folder / "warmup.jsonl"
    warmup.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = stage.settings(
        world,
        models=[{"name": "qwen", "match": MATCH, "warmup": str(warmup)} | model],
        serving={
            "interval_s": 0.3,
            "urls": [*world.servers],
            "subset_header": SUBSET,
            "warmup": {"by": "endpoints"},
        },
        gateway={"allowed_paths": ["/v1/*"]},
    )
    return stage.dispatcher(settings, *arguments)


def states(one: Dispatcher, version: str) -> list[str]:
    """Those that it went through."""
    return [each["state"] for each in one.events("version") if each["version"] == version]


def is_open(one: Dispatcher, version: str) -> bool:
    return any(
        each["name"] == version and each["state"] == "open"
        for model in one.status()["models"]
        for each in model["versions"]
    )


def work(world: World) -> list[Entry]:
    """Without what warms up."""
    return [each for each in world.log() if each.batch and not each.direct]


def paid_cold(world: World) -> list[tuple[str, int]]:
    """The first requests to each model on each server."""
    return sorted((each.model, each.model_server) for each in world.log() if each.cold)


@pytest.mark.parametrize("requests", [400, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("transition", ["availability", "resource"])
def test_rollout_costs_a_job_no_404_and_no_cold_request(
    stage: Stage, tmp_path: Path, transition: str, requests: int
) -> None:
    """Four servers are replaced one by one by a new version; the first request to it takes 3 s on each."""
    world = stage.world(
        endpoints=4, slots=32, seconds=0.1, models=OLD, cold_s=COLD_S, subset_header=SUBSET, apart=1
    )
    one = begin(stage, world, tmp_path, transition=transition)
    wait_until_sync(lambda: is_open(one, OLD), 60, what="the first warm-up")
    stage.producer.submit(requests, BODY)
    wait_until_sync(lambda: len(stage.producer.collect()) >= requests // 10, 60, what="some answers")
    # Slower than a warm-up: where the old one is gone before the new one is warm, none can be open.
    world.control(roll={"to": [NEW], "gone_s": 0.5, "pause_s": 3.5})
    wait_until_sync(lambda: is_open(one, NEW), 60, what="the new version")
    stage.producer.submit(requests // 4, BODY, prefix="later")
    found = stage.producer.wait_for_all(timeout_s=120)
    wait_until_sync(lambda: states(one, OLD)[-1] == "gone", 60, what="the end of the old version")

    assert stage.producer.answers() == {"200": requests + requests // 4}
    assert not stage.producer.twice()
    assert {result["model_version"] for (result,) in found.values()} == {OLD, NEW}
    sent = work(world)
    assert [each for each in sent if each.cold] == []
    assert {each.status for each in sent} <= {200, 503}  # a picker that has none of those that were named
    each_once = sorted((model, number) for model in (OLD, NEW) for number in range(4))
    wait_until_sync(lambda: paid_cold(world) == each_once, 60, what="each server to be warmed once")
    assert states(one, OLD)[:3] == ["cold", "open", "draining"]
    assert states(one, NEW) == ["cold", "open"]
    opened = one.events("version")
    order = [(each["version"], each["state"]) for each in opened]
    new_opens, old_closes = order.index((NEW, "open")), order.index((OLD, "draining"))
    began = [each.started_at for each in sent if each.model == NEW and each.started_at is not None]
    ended = [each.ended_at for each in sent if each.model == OLD and each.ended_at is not None]
    if transition == "availability":
        assert new_opens < old_closes
    else:
        assert old_closes < new_opens
        assert max(ended) <= min(began)


def test_job_is_answered_by_one_version_and_a_canary_by_its_share(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(endpoints=2, slots=32, seconds=0.05, models=OLD, apart=1)
    policy = {"policy": {"label": "stable"}, "labels": {"stable": "1"}, "pin": "job"}
    one = begin(stage, world, tmp_path, warmup="", **policy)
    wait_until_sync(lambda: is_open(one, OLD), 60, what="the old version")
    first = stage.producer.submit(300, BODY, prefix="first", labels={"job": "first"})
    wait_until_sync(lambda: len(stage.producer.collect()) >= 30, 60, what="some answers")
    world.control(models=[[OLD, NEW]] * 2)
    (model,) = one.settings["models"]
    one.reconfigure(models=[{**model, "labels": {"stable": "2"}}])
    wait_until_sync(lambda: is_open(one, NEW), 60, what="the new version")
    second = stage.producer.submit(100, BODY, prefix="second", labels={"job": "second"})
    third = stage.producer.submit(20, BODY, prefix="third")
    one.kill()
    one.start()  # what was given out is in the queue
    found = stage.producer.wait_for_all()
    assert {each["model_version"] for id_ in first for each in found[id_]} == {OLD}
    assert {each["model_version"] for id_ in (*second, *third) for each in found[id_]} == {NEW}

    # Back is one line.
    one.reconfigure(models=[{**model, "labels": {"stable": "1"}}])
    wait_until_sync(lambda: is_open(one, OLD), 60, what="the old version")
    back = stage.producer.submit(20, BODY, prefix="back")
    found = stage.producer.wait_for_all()
    assert {each["model_version"] for id_ in back for each in found[id_]} == {OLD}

    one.reconfigure(models=[{**model, "policy": "all", "weights": {"v2": 0.1}, "pin": "request"}])
    wait_until_sync(lambda: is_open(one, OLD) and is_open(one, NEW), 60, what="both")
    some = stage.producer.submit(400, BODY, prefix="some")
    found = stage.producer.wait_for_all()
    canaries = [id_ for id_ in some for each in found[id_] if each["model_version"] == NEW]
    assert 15 <= len(canaries) <= 70
    assert stage.producer.answers() == {"200": len(stage.producer.submitted)}


def test_observer_shows_what_others_have_warmed_and_writes_nothing(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(endpoints=2, slots=32, seconds=0.05, models=OLD, apart=1)
    observer = begin(stage, world, tmp_path, "--observe")

    def shown() -> dict[str, Any]:
        versions = [each for model in observer.status()["models"] for each in model["versions"]]
        return {each["name"]: (each["state"], each["warm"]) for each in versions}

    wait_until_sync(lambda: shown() == {OLD: ("cold", 0)}, 60, what="the observer to see the version")
    assert [*stage.producer.client.scan_iter()] == []
    worker = begin(stage, world, tmp_path)
    wait_until_sync(
        lambda: shown() == {OLD: ("open", 2)}, 60, what="the observer to see what the worker has warmed"
    )
    assert observer.terminate() == worker.terminate() == 0
    assert not observer.events("warm-up")
    assert len(worker.events("warm-up")) == 2
