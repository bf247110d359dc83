"""What a dispatcher takes: at rest, with large requests in flight, and after very many small ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.benchmarks.stages import MIB, rss_mib, stage_in
from tests.scenarios.processes import Stage
from tests.support import wait_until_sync

pytestmark = pytest.mark.timeout(900)

IDLE_MIB = 110


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with stage_in(tmp_path) as made:
        yield made


def test_at_rest(stage: Stage) -> None:
    world = stage.world()
    one = stage.dispatcher(stage.settings(world))
    one.wait_for(reason="idle")
    readings = world.observed()["scrapes"]
    wait_until_sync(lambda: world.observed()["scrapes"] >= readings + 3, 15, what="three more readings")
    print(f"at rest: {rss_mib(one):.1f} MiB")
    assert rss_mib(one) <= IDLE_MIB


def test_at_rest_reading_through_prometheus(stage: Stage) -> None:
    """Its client library is what weighs; nobody has to answer for that."""
    world = stage.world()
    settings = stage.settings(world) | {
        "signals": {"source": "prometheus", "prometheus": {"url": world.gateway}}
    }
    one = stage.dispatcher(settings)
    answered = wait_until_sync(lambda: world.observed()["gateway"]["arrived"], 20, what="queries")
    print(f"at rest, through Prometheus: {rss_mib(one):.1f} MiB after {answered} queries")
    assert rss_mib(one) <= IDLE_MIB


@pytest.mark.parametrize(
    ("answer", "copies"),
    [(b'"seconds":0.5', 2), (b'"echo":true', 4)],
    ids=["short-answers", "answers-as-large"],
)
def test_large_requests_in_flight(stage: Stage, answer: bytes, copies: int) -> None:
    """≤ what it takes at rest and twice what is in flight: payloads of 8 × 4 MiB, and answers as large; when
    they are gone, so is their memory."""
    count, size = 8, 4 * MIB
    world = stage.world(slots=32, seconds=0.5)
    one = stage.dispatcher(stage.settings(world, budget={"max_in_flight": count}, queue={"lease_s": 30}))
    one.wait_for(reason="idle")
    stage.producer.submit(3 * count, b'{"sim":{%s},"prompt":"%s"}' % (answer, b"x" * size))
    results = stage.producer.names.result_list
    wait_until_sync(lambda: stage.producer.client.llen(results) == 3 * count, 90, what="all results")
    peak = peak_mib(one.child.pid)
    print(f"{count} × {size // MIB} MiB in flight: {peak:.1f} MiB at most, {rss_mib(one):.1f} after")
    assert peak <= IDLE_MIB + copies * count * size / MIB
    wait_until_sync(lambda: rss_mib(one) <= IDLE_MIB, 15, what="the memory to be given back", every_s=0.1)


def peak_mib(pid: int) -> float:
    """The most it ever was (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize(
    ("rounds", "each"),
    [(4, 2_500), pytest.param(10, 20_000, marks=pytest.mark.long)],
    ids=["10,000", "200,000"],
)
def test_nothing_grows_with_the_number_of_requests(stage: Stage, rounds: int, each: int) -> None:
    """Once what grows to its working size has done so, every later round ends where that one did."""
    world = stage.world(slots=512, seconds=0.005, log_max=1000)
    one = stage.dispatcher(stage.settings(world, max_sys=256, queue={"lease_s": 30}))
    one.wait_for(reason="idle")
    found, started, producer = [], time.monotonic(), stage.producer
    for _ in range(rounds):
        producer.submit(each)
        wait_until_sync(
            lambda: producer.client.llen(producer.names.result_list) == each,
            each / 50,
            what="all results",
            every_s=0.05,
        )
        producer.client.delete(producer.names.result_list)
        found.append(round(rss_mib(one), 1))
    print(f"{rounds * each:,} requests in {time.monotonic() - started:.0f} s: {found} MiB")
    assert max(found) <= IDLE_MIB
    # The ledger of the last seconds and the allocator's arenas breathe a little.
    assert found[-1] <= found[1] + 3
    assert psutil.Process(one.child.pid).num_fds() < 600
