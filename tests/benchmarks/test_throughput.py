"""What a request costs one dispatcher, beside a bare aiohttp loop that claims and settles nothing.

Both run in turn against the same gateway on the same machine (tests/floors.py). Dispatcher, gateway and Redis
fill every core there is, so that the CPU of all of them bounds the rate, and CPU is what is judged: requests
a second beside a busy neighbour are only shown. That the loop does not idle is held where idling shows: by
test_latency.py, and by the scenario in which the slack is used however long the way.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import psutil
import pytest

from tests.benchmarks.stages import cpu_s, stage_in
from tests.floors import Beside, beside
from tests.scenarios.processes import Dispatcher, Stage, World
from tests.support import running, wait_until_sync

pytestmark = pytest.mark.timeout(600)

BARE = Path(__file__).with_name("bare_client.py")
ANSWER_S = 0.01
SHORT, LONG = 600, 10_000
PAIRS = 21
ROUNDS = 3
"""Neighbours on the same host cost the larger program more, for seconds at a time: one calm round will do."""
TRIES = 3


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with stage_in(tmp_path) as made:
        yield made


def ready(stage: Stage, world: World, limit: int) -> Dispatcher:
    """A dispatcher that may have so many in flight, whatever the pool."""
    pool = 4 * limit
    settings = stage.settings(world, max_sys=pool, budget={"max_in_flight": limit}, queue={"lease_s": 30})
    one = stage.dispatcher(settings)
    one.wait_for(limit=limit)
    return one


def forward(stage: Stage, requests: int) -> float:
    """Requests per second from the last one's submission to the last one's result."""
    stage.producer.submit(requests)
    started = time.perf_counter()
    wait_until_sync(
        lambda: stage.producer.client.llen(stage.producer.names.result_list) >= requests,
        requests / 100 + 30,
        what="all results",
        every_s=0.02,
    )
    rate = requests / (time.perf_counter() - started)
    stage.producer.collect()
    return rate


@dataclass(frozen=True, slots=True)
class Cost:
    """Requests per second, and CPU seconds for each request: the process' own, and with gateway and Redis."""

    rate: float
    own_s: float
    whole_s: float = 0.0


@contextmanager
def bare_client(world: World, workers: int) -> Iterator[Callable[[int], Cost]]:
    """Posts so many requests when told to."""
    command = [sys.executable, str(BARE), f"{world.gateway}/v1/completions", str(workers)]
    with running(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin, process.stdout

        def post(requests: int) -> Cost:
            asked.write(b"%d\n" % requests)
            asked.flush()
            return Cost(**json.loads(told.readline()))

        yield post


@pytest.mark.parametrize(
    ("limit", "most", "requests"),
    [
        pytest.param(256, 2.2, SHORT, id="short-256", marks=pytest.mark.serial),
        pytest.param(256, 2.0, LONG, id="long-256", marks=pytest.mark.long),
        pytest.param(64, 2.3, LONG, id="long-64", marks=pytest.mark.long),
    ],
)
async def test_a_request_costs_about_twice_a_bare_clients(
    stage: Stage, limit: int, most: float, requests: int
) -> None:
    """Claim, lease, settle and result included: the dispatcher's own CPU, and that of all it makes work.

    With 64 in flight a turn holds fewer requests than with 256, and fewer still beside a busy neighbour."""
    world = stage.world(slots=4 * limit, seconds=ANSWER_S)
    one = ready(stage, world, limit)
    forward(stage, 500)
    others = [process.pid for process in psutil.Process().children() if process.pid != one.child.pid]
    ours: list[Cost] = []
    bare: list[Cost] = []

    def measured(act: Callable[[], Cost], costs: list[Cost]) -> float:
        """What it took, and gateway and Redis meanwhile."""
        before = sum(map(cpu_s, others))
        cost = act()
        costs.append(replace(cost, whole_s=cost.own_s + (sum(map(cpu_s, others)) - before) / requests))
        return cost.own_s

    with bare_client(world, limit) as post:

        def forwarded() -> Cost:
            before = cpu_s(one.child.pid)
            rate = forward(stage, requests)
            return Cost(rate, (cpu_s(one.child.pid) - before) / requests)

        async def round_of_pairs() -> Beside:
            ours.clear()
            bare.clear()
            return await beside(
                lambda: measured(forwarded, ours), lambda: measured(lambda: post(requests), bare), PAIRS
            )

        found = await round_of_pairs()
        for _ in range(ROUNDS - 1):
            if found.ratio > most:
                found = await round_of_pairs()
    del ours[0], bare[0]  # warming up
    whole = statistics.median(one.whole_s / other.whole_s for one, other in zip(ours, bare, strict=True))
    for who, costs in (("dispatcher", ours), ("bare client", bare)):
        rate, own_s, whole_s = (statistics.median(one) for one in zip(*map(astuple, costs), strict=True))
        print(f"limit {limit}, {who}: {rate:,.0f}/s, {own_s * 1e6:.0f} µs, of all {whole_s * 1e6:.0f} µs")
    print(f"limit {limit}: {found.ratio:.2f} × the CPU, {whole:.2f} × that of all")
    assert stage.producer.answers().keys() == {"200"}
    assert not stage.producer.twice()
    assert found.ratio <= most
    assert whole <= most


@pytest.mark.long
def test_two_replicas_cost_no_more_cpu_than_one(stage: Stage) -> None:
    """What a second core brings cannot be seen where gateway and Redis run on the same two. What can: a
    request costs no more for being one of two replicas', so that only the cores bound what they do together.
    """
    world = stage.world(slots=512, seconds=ANSWER_S)
    one = ready(stage, world, 128)
    forward(stage, 500)
    alone, shared = [], []
    for _ in range(TRIES):
        before = cpu_s(one.child.pid)
        rate = forward(stage, LONG)
        alone.append((cpu_s(one.child.pid) - before) / LONG)
        print(f"one: {rate:,.0f}/s, {alone[-1] * 1e6:.0f} µs a request")
    two = ready(stage, world, 128)
    for _ in range(TRIES):
        before = cpu_s(one.child.pid) + cpu_s(two.child.pid)
        rate = forward(stage, LONG)
        shared.append((cpu_s(one.child.pid) + cpu_s(two.child.pid) - before) / LONG)
        print(f"two: {rate:,.0f}/s, {shared[-1] * 1e6:.0f} µs a request")
    assert min(shared) <= 1.25 * min(alone)
