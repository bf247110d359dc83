"""CPU of a request whose tokens are counted, compared with one whose tokens are not.

Two dispatchers with their own Redis and gateway run alternately (tests/cost_comparison.py). The CPU is that
of the whole process, with Redis and HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.process_costs import make_stage, read_cpu_s
from tests.cost_comparison import compare_costs
from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMIT = 64
ANSWER_S = 0.01
REQUESTS = 1_500
PAIR_COUNT = 21
MAX_ROUNDS = 3
"""Other load on the host changes a few pairs. One quiet round is enough."""
MAX_RATIO = 1.04


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[list[Stage]]:
    with ExitStack() as stack:
        yield [stack.enter_context(make_stage(tmp_path / name)) for name in ("counted", "not-counted")]


def measure_cpu_s(stage: Stage, dispatcher: Dispatcher) -> float:
    """Return the CPU seconds of the dispatcher for each request."""
    before = read_cpu_s(dispatcher.child.pid)
    producer = stage.producer
    producer.submit(REQUESTS)
    wait_until_sync(
        lambda: producer.client.llen(producer.names.result_list) >= REQUESTS,
        60,
        what="all results",
        every_s=0.02,
    )
    producer.collect()
    return (read_cpu_s(dispatcher.child.pid) - before) / REQUESTS


async def test_counted_tokens_cost_at_most_4_percent_of_a_request(stages: list[Stage]) -> None:
    dispatchers = []
    sections: list[dict[str, Any]] = [{"per_endpoint": 10**8}, {"mode": "off"}]
    for stage, tokens in zip(stages, sections, strict=True):
        world = stage.world(slots=4 * LIMIT, seconds=ANSWER_S, kv_at_full=0.5)
        settings = stage.settings(world, max_sys=4 * LIMIT, budget={"max_in_flight": LIMIT}, tokens=tokens)
        dispatchers.append(stage.dispatcher(settings))
    for dispatcher in dispatchers:
        dispatcher.wait_for(limit=LIMIT)
    ratio = 0.0
    for number in range(MAX_ROUNDS):
        comparison = await compare_costs(
            lambda: measure_cpu_s(stages[0], dispatchers[0]),
            lambda: measure_cpu_s(stages[1], dispatchers[1]),
            PAIR_COUNT,
        )
        print(f"counted tokens: {comparison}")
        ratio = min(ratio, comparison.ratio) if number else comparison.ratio
        if ratio <= MAX_RATIO:
            break
    counted, not_counted = (each.status()["kv_capacity_tokens"] for each in dispatchers)
    assert counted == 10**8
    assert not_counted is None
    assert ratio <= MAX_RATIO
