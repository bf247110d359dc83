"""What order costs: requests of 1,000 sequences beside the same requests of none, in turn, by one dispatcher.

Answers after 10 ms and a limit that is no bound, so that CPU is. A line that holds one sequence behind the
other is the worst there is: of all that a claim brings all but one of each sequence have to wait. In one
that holds all first turns, then all second ones, hardly any has to. CPU is judged, requests a second shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from dispatcher.core.requests.request import encode_member
from dispatcher.core.sequences.turns import Turn
from tests.benchmarks.stages import cpu_s, stage_in
from tests.floors import beside
from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync

pytestmark = pytest.mark.timeout(900)

LIMIT = 256
LONG = pytest.mark.long


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with stage_in(tmp_path) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Spent:
    """Requests per second, and CPU seconds for each: the dispatcher's, the server's."""

    rate: float
    own_s: float
    server_s: float


class Bench:
    """One dispatcher, given the same requests over and over."""

    def __init__(self, stage: Stage, sequences: int, turns: int, line: str) -> None:
        world = stage.world(slots=4 * LIMIT, seconds=0.01)
        settings = stage.settings(
            world, max_sys=4 * LIMIT, budget={"max_in_flight": LIMIT}, queue={"lease_s": 30}
        )
        self.one: Dispatcher = stage.dispatcher(settings)
        self.one.wait_for(limit=LIMIT)
        self.producer = stage.producer
        self.server = int(stage.producer.client.info("server")["process_id"])
        self.list_sequences, self.turns, self.take_snapshot = sequences, turns, line
        self.runs = 0

    def members(self, *, in_sequences: bool) -> dict[bytes, float]:
        self.runs += 1
        deadline = int(time.time()) + 3600
        found: dict[bytes, float] = {}
        for sequence in range(self.list_sequences):
            for turn in range(self.turns):
                places = (f"{sequence:05}", f"{turn:03}")
                name = "-".join(
                    [str(self.runs), *(places if self.take_snapshot == "sequences" else places[::-1])]
                )
                of = Turn(f"{self.runs}-{sequence}", turn) if in_sequences else None
                found[encode_member(name, b'{"prompt":"hi"}', deadline, sequence=of)] = deadline
        return found

    def run_batch(self, *, in_sequences: bool) -> Spent:
        members, client = self.members(in_sequences=in_sequences), self.producer.client
        self.producer.put(members)
        began, own, server = time.perf_counter(), cpu_s(self.one.child.pid), cpu_s(self.server)
        wait_until_sync(
            lambda: client.llen(self.producer.names.result_list) >= len(members),
            len(members) / 50 + 30,
            what="all results",
            every_s=0.02,
        )
        taken_s, count = time.perf_counter() - began, len(members)
        spent = (cpu_s(self.one.child.pid) - own) / count, (cpu_s(self.server) - server) / count
        self.producer.collect()
        return Spent(count / taken_s, *spent)


@pytest.mark.parametrize(
    ("sequences", "turns", "line", "pairs", "most"),
    [
        pytest.param(100, 6, "turns", 5, 2.0, id="short"),
        pytest.param(1000, 10, "turns", 5, 1.5, id="turns", marks=LONG),
        pytest.param(1000, 10, "sequences", 5, 1.8, id="sequences", marks=LONG),
    ],
)
async def test_order_costs_a_part_of_what_a_request_costs(
    stage: Stage, sequences: int, turns: int, line: str, pairs: int, most: float
) -> None:
    bench = Bench(stage, sequences, turns, line)
    ours: list[Spent] = []
    plain: list[Spent] = []

    def cost(*, in_sequences: bool) -> float:
        spent = bench.run_batch(in_sequences=in_sequences)
        (ours if in_sequences else plain).append(spent)
        return spent.own_s + spent.server_s

    found = await beside(lambda: cost(in_sequences=True), lambda: cost(in_sequences=False), pairs)
    for who, some in (("in sequences", ours[1:]), ("in none", plain[1:])):
        rate, own_s, server_s = (statistics.median(one) for one in zip(*map(astuple, some), strict=True))
        print(f"{line}, {who}: {rate:,.0f}/s, {own_s * 1e6:.0f} µs, of the server {server_s * 1e6:.0f} µs")
    rates = statistics.median(one.rate / other.rate for one, other in zip(ours[1:], plain[1:], strict=True))
    print(f"{line}: {found.ratio:.2f} × the CPU of dispatcher and server, {rates:.2f} × the rate")
    assert bench.producer.answers().keys() == {"200"}
    assert not bench.producer.twice()
    assert found.ratio <= most
