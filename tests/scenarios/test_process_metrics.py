"""Without knowledge of the pool nothing is sent; with it, work goes on, and nothing was lost meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.scenarios.processes import Dispatcher, Stage, World, hold
from tests.support import free_port, require_tool, running, wait_until_sync

LIMIT = 30
SLACK_S = 1.0
"""For what was decided to happen, on a machine that does other things beside."""


def sent(world: World) -> int:
    """Requests that ever reached the gateway."""
    return int(world.observed()["gateway"]["arrived"])


def last_sent_at(world: World) -> float:
    return world.log()[-1].arrived_at


def ends_well(stage: Stage, one: Dispatcher) -> None:
    """What is left is answered at last: none of it lost, none dead, none twice."""
    stage.producer.wait_for_all(timeout_s=30)
    one.wait_for(leased=0)
    assert stage.producer.answers() == {"200": len(stage.producer.submitted)}
    assert not stage.producer.twice()
    assert not stage.producer.unaccounted()
    assert one.tries("failed") == 0


def test_the_gate_closes_when_the_metrics_go_and_opens_when_they_return(stage: Stage) -> None:
    interval_s, max_age_s = 0.5, 2.0
    world = stage.world(slots=32, seconds=0.2)
    signals = {"interval_s": interval_s, "max_age_s": max_age_s}
    one = stage.dispatcher(stage.settings(world, signals=signals))

    def no_more_than(count: int) -> bool:
        return sent(world) == count

    def more_than(count: int) -> bool:
        return sent(world) > count

    for kind in ("gone", "garbage", "hang"):
        stage.producer.submit(600)
        wait_until_sync(lambda: world.in_flight() >= LIMIT, 20, what="the slack to be filled")
        gone_at = world.control(metrics=kind)["at"]
        one.wait_for(reason="unreadable")
        wait_until_sync(lambda: world.in_flight() == 0, 5, what="what runs to end")
        last, count = last_sent_at(world), sent(world)
        hold(partial(no_more_than, count), 2 * interval_s, what=f"{kind}: sent blind")
        assert last - gone_at <= max_age_s + SLACK_S
        assert stage.producer.count_requests()["pending"] > 0, "otherwise nothing was held back"
        back_at = world.control(metrics="ok")["at"]
        wait_until_sync(partial(more_than, count), 10, what="work to go on")
        resumed_s = next(e.arrived_at for e in world.log() if e.arrived_at > last) - back_at
        print(f"{kind}: last sent {last - gone_at:.2f} s after, first {resumed_s:.2f} s after its return")
        assert resumed_s <= interval_s + SLACK_S
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1
    ends_well(stage, one)


def test_a_page_that_froze_while_the_pool_was_idle_is_found_out(stage: Stage) -> None:
    """It looks fresh and shows room for ever; but it does not show the requests that we have running."""
    world = stage.world(slots=32, seconds=3.0)
    one = stage.dispatcher(stage.settings(world, signals={"interval_s": 0.5}))
    one.wait_for(reason="idle")
    world.control(metrics="frozen")
    stage.producer.submit(90)
    one.wait_for(reason="implausible")
    seen = world.observed()["gateway"]["batch"]
    assert seen["peak"] <= LIMIT + 1
    world.control(metrics="ok", seconds=0.1)
    ends_well(stage, one)
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1


@contextlib.contextmanager
def prometheus(folder: Path, port: int, jobs: str) -> Iterator[None]:
    """A Prometheus for the length of the block, on the data that an earlier one has left."""
    (folder / "prometheus.yml").write_text(f"scrape_configs:\n{jobs}")
    command = [
        require_tool("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(*command, stop_s=20):
        yield


def test_samples_that_grow_old_in_prometheus_close_the_gate(stage: Stage, tmp_path: Path) -> None:
    """Prometheus answers all the time, with what it scraped last."""
    max_age_s, port = 4.0, free_port()
    world = stage.world(slots=32, seconds=0.2)
    target = world.metrics.removeprefix("http://").removesuffix("/metrics")
    scrape = f"- job_name: epp\n  scrape_interval: 1s\n  static_configs: [{{targets: ['{target}'],"
    scrape += " labels: {namespace: default}}]\n"
    signals = {"source": "prometheus", "max_age_s": max_age_s}
    signals["prometheus"] = {"url": f"http://127.0.0.1:{port}"}
    with prometheus(tmp_path, port, scrape):
        one = stage.dispatcher(stage.settings(world, signals=signals))
        stage.producer.submit(600)
        wait_until_sync(lambda: world.in_flight() >= LIMIT, 30, what="the slack to be filled")
    scraped_at = world.observed()["scraped_at"]
    with prometheus(tmp_path, port, "- job_name: other\n"):
        one.wait_for(25, reason="stale")
        wait_until_sync(lambda: world.in_flight() == 0, 5, what="what runs to end")
        last, count = last_sent_at(world), sent(world)
        hold(lambda: sent(world) == count, 1.0, what="sent on an old sample")
        assert last - scraped_at <= max_age_s + SLACK_S
    with prometheus(tmp_path, port, scrape):
        wait_until_sync(lambda: sent(world) > count, 30, what="work to go on")
        ends_well(stage, one)
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1
