"""Cost of order: requests of 1,000 sequences, compared with the same requests without sequences.

One dispatcher runs both alternately. Answers come after 10 ms and the limit is high, so that CPU is the
bottleneck. A queue sorted by sequence is the worst case, since all but one request of each sequence in a
claim must wait. In a queue sorted by turn hardly any request waits. The test checks CPU, and prints requests
per second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from dispatcher.features.sequences.turns import Turn
from dispatcher.requests.request import encode_member
from tests.benchmarks.process_costs import make_stage, read_cpu_s
from tests.cost_comparison import compare_costs
from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT = 256
long = pytest.mark.long


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with make_stage(tmp_path) as stage:
        yield stage


@dataclass(frozen=True, slots=True)
class Costs:
    """Requests per second, and CPU seconds of dispatcher and queue server for each request."""

    rate: float
    own_s: float
    server_s: float


class SequenceBenchmark:
    """One dispatcher, which runs the same requests repeatedly."""

    def __init__(self, stage: Stage, sequences: int, turns: int, queue_order: str) -> None:
        world = stage.world(slots=4 * LIMIT, seconds=0.01)
        settings = stage.settings(
            world, max_sys=4 * LIMIT, budget={"max_in_flight": LIMIT}, queue={"lease_s": 30}
        )
        self.dispatcher: Dispatcher = stage.dispatcher(settings)
        self.dispatcher.wait_for(limit=LIMIT)
        self.producer = stage.producer
        self.server_pid = int(stage.producer.client.info("server")["process_id"])
        self.sequence_count, self.turn_count, self.queue_order = sequences, turns, queue_order
        self.run_count = 0

    def make_members(self, *, in_sequences: bool) -> dict[bytes, float]:
        self.run_count += 1
        deadline = int(time.time()) + 3600
        members: dict[bytes, float] = {}
        for sequence in range(self.sequence_count):
            for turn in range(self.turn_count):
                sort_keys = (f"{sequence:05}", f"{turn:03}")
                name = "-".join(
                    [
                        str(self.run_count),
                        *(sort_keys if self.queue_order == "sequences" else sort_keys[::-1]),
                    ]
                )
                turn_data = Turn(f"{self.run_count}-{sequence}", turn) if in_sequences else None
                members[encode_member(name, b'{"prompt":"hi"}', deadline, extra=turn_data)] = deadline
        return members

    def run(self, *, in_sequences: bool) -> Costs:
        members, client = self.make_members(in_sequences=in_sequences), self.producer.client
        self.producer.add_members(members)
        started_at, dispatcher_cpu_s, server_cpu_s = (
            time.perf_counter(),
            read_cpu_s(self.dispatcher.child.pid),
            read_cpu_s(self.server_pid),
        )
        wait_until_sync(
            lambda: client.llen(self.producer.names.result_list) >= len(members),
            len(members) / 50 + 30,
            what="all results",
            every_s=0.02,
        )
        taken_s, count = time.perf_counter() - started_at, len(members)
        costs = (
            (read_cpu_s(self.dispatcher.child.pid) - dispatcher_cpu_s) / count,
            (read_cpu_s(self.server_pid) - server_cpu_s) / count,
        )
        self.producer.collect()
        return Costs(count / taken_s, *costs)


@pytest.mark.parametrize(
    ("sequences", "turns", "queue_order", "pairs", "max_ratio"),
    [
        pytest.param(100, 6, "turns", 5, 2.0, id="short", marks=pytest.mark.serial),
        pytest.param(1000, 10, "turns", 5, 1.5, id="turns", marks=long),
        pytest.param(1000, 10, "sequences", 5, 1.8, id="sequences", marks=long),
    ],
)
async def test_order_costs_less_than_a_request_itself(
    stage: Stage, sequences: int, turns: int, queue_order: str, pairs: int, max_ratio: float
) -> None:
    benchmark = SequenceBenchmark(stage, sequences, turns, queue_order)
    ordered_costs: list[Costs] = []
    unordered_costs: list[Costs] = []

    def measure(*, in_sequences: bool) -> float:
        costs = benchmark.run(in_sequences=in_sequences)
        (ordered_costs if in_sequences else unordered_costs).append(costs)
        return costs.own_s + costs.server_s

    comparison = await compare_costs(
        lambda: measure(in_sequences=True), lambda: measure(in_sequences=False), pairs
    )
    for name, runs in (("in sequences", ordered_costs[1:]), ("without sequences", unordered_costs[1:])):
        rate, own_s, server_s = (
            statistics.median(values) for values in zip(*map(astuple, runs), strict=True)
        )
        print(
            f"{queue_order}, {name}: {rate:,.0f}/s, {own_s * 1e6:.0f} µs, "
            f"of the server {server_s * 1e6:.0f} µs"
        )
    rate_ratio = statistics.median(
        ordered.rate / unordered.rate
        for ordered, unordered in zip(ordered_costs[1:], unordered_costs[1:], strict=True)
    )
    print(
        f"{queue_order}: {comparison.ratio:.2f} × the CPU of dispatcher and server, "
        f"{rate_ratio:.2f} × the rate"
    )
    assert benchmark.producer.count_results().keys() == {"200"}
    assert not benchmark.producer.find_duplicates()
    assert comparison.ratio <= max_ratio
