"""Nothing is sent without current metrics, and requests continue without loss when metrics return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.scenarios.processes import Dispatcher, Stage, World, assert_stays_true
from tests.support import free_port, require_tool, running_process, wait_until_sync

LIMIT = 30
TOLERANCE_S = 1.0
"""Tolerance for reactions on a busy machine."""


def count_arrived(world: World) -> int:
    """Return the number of requests that have reached the gateway."""
    return int(world.observed()["gateway"]["arrived"])


def get_last_arrival(world: World) -> float:
    return world.log()[-1].arrived_at


def assert_all_answered_once(stage: Stage, dispatcher: Dispatcher) -> None:
    """Wait for all results. Assert that no request is lost, dead-lettered or answered twice."""
    stage.producer.wait_for_all(timeout_s=30)
    dispatcher.wait_for(leased=0)
    assert stage.producer.count_results() == {"200": len(stage.producer.submitted)}
    assert not stage.producer.find_duplicates()
    assert not stage.producer.find_lost_requests()
    assert dispatcher.count_attempts("failed") == 0


@pytest.mark.slow
@pytest.mark.first
def test_gate_closes_when_metrics_fail_and_opens_when_they_return(stage: Stage) -> None:
    interval_s, max_age_s = 0.5, 2.0
    world = stage.world(slots=32, seconds=0.2)
    signals = {"interval_s": interval_s, "max_age_s": max_age_s}
    dispatcher = stage.dispatcher(stage.settings(world, signals=signals))

    def is_count(count: int) -> bool:
        return count_arrived(world) == count

    def is_more_than(count: int) -> bool:
        return count_arrived(world) > count

    for kind in ("gone", "garbage", "hang"):
        stage.producer.submit(600)
        wait_until_sync(lambda: world.is_filled(LIMIT), 20, what="the idle capacity to be used")
        broken_at = world.control(metrics=kind)["at"]
        dispatcher.wait_for(reason="unreadable")
        wait_until_sync(lambda: world.in_flight() == 0, 5, what="running requests to end")
        last_arrival, count = get_last_arrival(world), count_arrived(world)
        assert_stays_true(partial(is_count, count), 2 * interval_s, what=f"{kind}: sent without metrics")
        assert last_arrival - broken_at <= max_age_s + TOLERANCE_S
        assert stage.producer.count_requests()["pending"] > 0, "otherwise no request had to wait"
        restored_at = world.control(metrics="ok")["at"]
        wait_until_sync(partial(is_more_than, count), 10, what="requests to be sent again")
        resume_s = next(e.arrived_at for e in world.log() if e.arrived_at > last_arrival) - restored_at
        print(
            f"{kind}: last sent {last_arrival - broken_at:.2f} s after, "
            f"first {resume_s:.2f} s after its return"
        )
        assert resume_s <= interval_s + TOLERANCE_S
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1
    assert_all_answered_once(stage, dispatcher)


def test_metrics_page_that_froze_while_the_pool_was_idle_is_detected(stage: Stage) -> None:
    """The page looks current and always shows idle capacity, but not the running batch requests."""
    world = stage.world(slots=32, seconds=3.0)
    dispatcher = stage.dispatcher(stage.settings(world, signals={"interval_s": 0.5}))
    dispatcher.wait_for(reason="idle")
    world.control(metrics="frozen")
    stage.producer.submit(90)
    dispatcher.wait_for(reason="implausible")
    batch = world.observed()["gateway"]["batch"]
    assert batch["peak"] <= LIMIT + 1
    world.control(metrics="ok", seconds=0.1)
    assert_all_answered_once(stage, dispatcher)
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1


@contextlib.contextmanager
def run_prometheus(folder: Path, port: int, jobs: str) -> Iterator[None]:
    """Run Prometheus for the duration of the block with the data of the previous one."""
    (folder / "prometheus.yml").write_text(f"scrape_configs:\n{jobs}")
    command = [
        require_tool("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running_process(*command, stop_s=20):
        yield


@pytest.mark.slow
def test_stale_samples_in_prometheus_close_the_gate(stage: Stage, tmp_path: Path) -> None:
    """Prometheus keeps answering with the last sample that it scraped."""
    max_age_s, port = 4.0, free_port()
    world = stage.world(slots=32, seconds=0.2)
    target = world.metrics.removeprefix("http://").removesuffix("/metrics")
    scrape = f"- job_name: epp\n  scrape_interval: 1s\n  static_configs: [{{targets: ['{target}'],"
    scrape += " labels: {namespace: default}}]\n"
    signals = {"source": "prometheus", "max_age_s": max_age_s}
    signals["prometheus"] = {"url": f"http://127.0.0.1:{port}"}
    with run_prometheus(tmp_path, port, scrape):
        dispatcher = stage.dispatcher(stage.settings(world, signals=signals))
        stage.producer.submit(600)
        wait_until_sync(lambda: world.is_filled(LIMIT), 30, what="the idle capacity to be used")
    scraped_at = world.observed()["scraped_at"]
    with run_prometheus(tmp_path, port, "- job_name: other\n"):
        dispatcher.wait_for(25, reason="stale")
        wait_until_sync(lambda: world.in_flight() == 0, 5, what="running requests to end")
        last_arrival, count = get_last_arrival(world), count_arrived(world)
        assert_stays_true(lambda: count_arrived(world) == count, 1.0, what="sent with an old sample")
        assert last_arrival - scraped_at <= max_age_s + TOLERANCE_S
    with run_prometheus(tmp_path, port, scrape):
        wait_until_sync(lambda: count_arrived(world) > count, 30, what="requests to be sent again")
        assert_all_answered_once(stage, dispatcher)
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1
