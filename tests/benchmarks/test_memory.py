"""Memory of a dispatcher: idle, with large requests in flight, and after very many small requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.benchmarks.process_costs import MIB, make_stage, read_rss_mib
from tests.scenarios.processes import Stage
from tests.support import wait_until_sync

pytestmark = pytest.mark.timeout(900)

IDLE_MIB = 110


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with make_stage(tmp_path) as stage:
        yield stage


def test_idle_dispatcher_needs_little_memory(stage: Stage) -> None:
    world = stage.world()
    dispatcher = stage.dispatcher(stage.settings(world))
    dispatcher.wait_for(reason="idle")
    readings = world.observed()["scrapes"]
    wait_until_sync(lambda: world.observed()["scrapes"] >= readings + 3, 15, what="three more readings")
    print(f"idle: {read_rss_mib(dispatcher):.1f} MiB")
    assert read_rss_mib(dispatcher) <= IDLE_MIB


def test_idle_dispatcher_that_reads_prometheus_needs_little_memory(stage: Stage) -> None:
    """The source needs more modules. No server has to answer its queries for this test."""
    world = stage.world()
    settings = stage.settings(world) | {
        "signals": {"source": "prometheus", "prometheus": {"url": world.gateway}}
    }
    dispatcher = stage.dispatcher(settings)
    answered = wait_until_sync(lambda: world.observed()["gateway"]["arrived"], 20, what="queries")
    print(f"idle, with Prometheus: {read_rss_mib(dispatcher):.1f} MiB after {answered} queries")
    assert read_rss_mib(dispatcher) <= IDLE_MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "max_copies"),
    [(b'"seconds":0.5', 2), (b'"echo":true', 4)],
    ids=["short-answers", "answers-as-large"],
)
def test_large_requests_in_flight_need_few_copies_and_free_their_memory(
    stage: Stage, answer: bytes, max_copies: int
) -> None:
    """Memory is at most that of an idle process plus few copies of the payloads and answers in flight.

    It is freed when the requests are finished. There are 8 payloads of 4 MiB, with small or equally large
    answers.
    """
    count, size = 8, 4 * MIB
    world = stage.world(slots=32, seconds=0.5)
    dispatcher = stage.dispatcher(
        stage.settings(world, budget={"max_in_flight": count}, queue={"lease_s": 30})
    )
    dispatcher.wait_for(reason="idle")
    stage.producer.submit(3 * count, b'{"sim":{%s},"prompt":"%s"}' % (answer, b"x" * size))
    results = stage.producer.names.result_list
    wait_until_sync(lambda: stage.producer.client.llen(results) == 3 * count, 90, what="all results")
    peak = read_peak_mib(dispatcher.child.pid)
    print(
        f"{count} × {size // MIB} MiB in flight: {peak:.1f} MiB at most, {read_rss_mib(dispatcher):.1f} after"
    )
    assert peak <= IDLE_MIB + max_copies * count * size / MIB
    wait_until_sync(
        lambda: read_rss_mib(dispatcher) <= IDLE_MIB, 15, what="the memory to be freed", every_s=0.1
    )


def read_peak_mib(pid: int) -> float:
    """Return the peak memory of the process (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "requests_per_round"),
    [(4, 2_500), pytest.param(10, 20_000, marks=pytest.mark.long)],
    ids=["10,000", "200,000"],
)
def test_memory_does_not_grow_with_the_number_of_requests(
    stage: Stage, rounds: int, requests_per_round: int
) -> None:
    """After the first rounds, in which pools and caches fill, memory does not grow any more."""
    world = stage.world(slots=512, seconds=0.005, log_max=1000)
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=256, queue={"lease_s": 30}))
    dispatcher.wait_for(reason="idle")
    rss_by_round, started, producer = [], time.monotonic(), stage.producer
    for _ in range(rounds):
        producer.submit(requests_per_round)
        wait_until_sync(
            lambda: producer.client.llen(producer.names.result_list) == requests_per_round,
            requests_per_round / 50,
            what="all results",
            every_s=0.05,
        )
        producer.client.delete(producer.names.result_list)
        rss_by_round.append(round(read_rss_mib(dispatcher), 1))
    print(
        f"{rounds * requests_per_round:,} requests in {time.monotonic() - started:.0f} s: {rss_by_round} MiB"
    )
    assert max(rss_by_round) <= IDLE_MIB
    # The load ledger and the arenas of the allocator vary a little.
    assert rss_by_round[-1] <= rss_by_round[1] + 3
    assert psutil.Process(dispatcher.child.pid).num_fds() < 600
