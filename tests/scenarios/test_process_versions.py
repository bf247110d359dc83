"""Versions of a model with real processes: rollouts, pinned jobs, and canaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.processes import Dispatcher, LogEntry, Stage, World
from tests.support import wait_until_sync

OLD, NEW = "qwen-v1", "qwen-v2"
MATCH = "qwen-v{version}"
COLD_S = 3.0
BODY = b'{"model":"qwen","prompt":"hi"}'
SUBSET = "x-endpoints"


def start_dispatcher(stage: Stage, world: World, folder: Path, *arguments: str, **model: Any) -> Dispatcher:
    """Start a dispatcher that warms up each version of `qwen` on each server of the world."""
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


def list_states(dispatcher: Dispatcher, version: str) -> list[str]:
    """Return the states that the version went through."""
    return [each["state"] for each in dispatcher.events("version") if each["version"] == version]


def is_open(dispatcher: Dispatcher, version: str) -> bool:
    return any(
        each["name"] == version and each["state"] == "open"
        for model in dispatcher.status()["models"]
        for each in model["versions"]
    )


def list_batch_entries(world: World) -> list[LogEntry]:
    """Return the log entries of batch requests without those of warm-ups."""
    return [each for each in world.log() if each.batch and not each.direct]


def list_cold_requests(world: World) -> list[tuple[str, int]]:
    """Return model and server of each request that was the first one for its model on its server."""
    return sorted((each.model, each.model_server) for each in world.log() if each.cold)


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize("requests", [400, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("transition", ["availability", "resource"])
def test_rollout_causes_no_404_and_no_cold_batch_request(
    stage: Stage, tmp_path: Path, transition: str, requests: int
) -> None:
    """Four servers are replaced one by one by a new version; the first request to it takes 3 s on each."""
    world = stage.world(
        endpoints=4, slots=32, seconds=0.1, models=OLD, cold_s=COLD_S, subset_header=SUBSET, apart=1
    )
    dispatcher = start_dispatcher(stage, world, tmp_path, transition=transition)
    wait_until_sync(lambda: is_open(dispatcher, OLD), 60, what="the first warm-up")
    stage.producer.submit(requests, BODY)
    wait_until_sync(lambda: len(stage.producer.collect()) >= requests // 10, 60, what="some answers")
    # The rollout is slower than a warm-up, since otherwise no version would be open between both.
    world.control(roll={"to": [NEW], "gone_s": 0.5, "pause_s": 3.5})
    wait_until_sync(lambda: is_open(dispatcher, NEW), 60, what="the new version to be open")
    stage.producer.submit(requests // 4, BODY, prefix="later")
    results = stage.producer.wait_for_all(timeout_s=120)
    wait_until_sync(lambda: list_states(dispatcher, OLD)[-1] == "gone", 60, what="the end of the old version")

    assert stage.producer.count_results() == {"200": requests + requests // 4}
    assert not stage.producer.find_duplicates()
    assert {result["model_version"] for (result,) in results.values()} == {OLD, NEW}
    entries = list_batch_entries(world)
    assert [each for each in entries if each.cold] == []
    assert {each.status for each in entries} <= {200, 503}  # 503: the picker had none of the named endpoints
    one_per_server = sorted((model, number) for model in (OLD, NEW) for number in range(4))
    wait_until_sync(
        lambda: list_cold_requests(world) == one_per_server, 60, what="each server to be warmed once"
    )
    assert list_states(dispatcher, OLD)[:3] == ["cold", "open", "draining"]
    assert list_states(dispatcher, NEW) == ["cold", "open"]
    version_events = dispatcher.events("version")
    changes = [(each["version"], each["state"]) for each in version_events]
    new_opens, old_closes = changes.index((NEW, "open")), changes.index((OLD, "draining"))
    started_times = [each.started_at for each in entries if each.model == NEW and each.started_at is not None]
    ended_times = [each.ended_at for each in entries if each.model == OLD and each.ended_at is not None]
    if transition == "availability":
        assert new_opens < old_closes
    else:
        assert old_closes < new_opens
        assert max(ended_times) <= min(started_times)


def test_job_stays_on_one_version_and_canary_gets_its_share(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(endpoints=2, slots=32, seconds=0.05, models=OLD, apart=1)
    policy = {"policy": {"label": "stable"}, "labels": {"stable": "1"}, "pin": "job"}
    dispatcher = start_dispatcher(stage, world, tmp_path, warmup="", **policy)
    wait_until_sync(lambda: is_open(dispatcher, OLD), 60, what="the old version to be open")
    first_ids = stage.producer.submit(300, BODY, prefix="first", labels={"job": "first"})
    wait_until_sync(lambda: len(stage.producer.collect()) >= 30, 60, what="some answers")
    world.control(models=[[OLD, NEW]] * 2)
    (model,) = dispatcher.settings["models"]
    dispatcher.reconfigure(models=[{**model, "labels": {"stable": "2"}}])
    wait_until_sync(lambda: is_open(dispatcher, NEW), 60, what="the new version to be open")
    second_ids = stage.producer.submit(100, BODY, prefix="second", labels={"job": "second"})
    third_ids = stage.producer.submit(20, BODY, prefix="third")
    dispatcher.kill()
    dispatcher.start()  # claimed requests are stored in the queue
    results = stage.producer.wait_for_all()
    assert {each["model_version"] for id_ in first_ids for each in results[id_]} == {OLD}
    assert {each["model_version"] for id_ in (*second_ids, *third_ids) for each in results[id_]} == {NEW}

    # One changed line rolls back.
    dispatcher.reconfigure(models=[{**model, "labels": {"stable": "1"}}])
    wait_until_sync(lambda: is_open(dispatcher, OLD), 60, what="the old version to be open")
    rolled_back_ids = stage.producer.submit(20, BODY, prefix="back")
    results = stage.producer.wait_for_all()
    assert {each["model_version"] for id_ in rolled_back_ids for each in results[id_]} == {OLD}

    dispatcher.reconfigure(models=[{**model, "policy": "all", "weights": {"v2": 0.1}, "pin": "request"}])
    wait_until_sync(
        lambda: is_open(dispatcher, OLD) and is_open(dispatcher, NEW), 60, what="both versions to be open"
    )
    canary_ids = stage.producer.submit(400, BODY, prefix="some")
    results = stage.producer.wait_for_all()
    canaries = [id_ for id_ in canary_ids for each in results[id_] if each["model_version"] == NEW]
    assert 15 <= len(canaries) <= 70
    assert stage.producer.count_results() == {"200": len(stage.producer.submitted)}


def test_observer_shows_warm_versions_and_writes_nothing(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(endpoints=2, slots=32, seconds=0.05, models=OLD, apart=1)
    observer = start_dispatcher(stage, world, tmp_path, "--observe")

    def get_shown_versions() -> dict[str, Any]:
        versions = [each for model in observer.status()["models"] for each in model["versions"]]
        return {each["name"]: (each["state"], each["warm"]) for each in versions}

    wait_until_sync(
        lambda: get_shown_versions() == {OLD: ("cold", 0)}, 60, what="the observer to see the version"
    )
    assert [*stage.producer.client.scan_iter()] == []
    worker = start_dispatcher(stage, world, tmp_path)
    wait_until_sync(
        lambda: get_shown_versions() == {OLD: ("open", 2)},
        60,
        what="the observer to see what the worker has warmed",
    )
    assert observer.terminate() == worker.terminate() == 0
    assert not observer.events("warm-up")
    assert len(worker.events("warm-up")) == 2
