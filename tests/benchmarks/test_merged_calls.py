"""Gain of merged calls: items per second with and without batching, by the same dispatcher in one run.

The stand-in servers have a fixed cost per call and per item. Whether a real server is similar is what
`batching.mode: auto` measures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.process_costs import make_stage
from tests.scenarios.list_server import run_list_server
from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
# The short form is in tests/features/merging/test_merger.py, in virtual time.

EMBEDDINGS = "/v1/embeddings"
INFER = "/v2/models/m/infer"
LIMIT = 128


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with make_stage(tmp_path) as stage:
        yield stage


def start_dispatcher(stage: Stage, url: str, rules: Sequence[Mapping[str, Any]]) -> Dispatcher:
    world = stage.world(slots=4 * LIMIT)
    settings = stage.settings(
        world,
        max_sys=4 * LIMIT,
        budget={"max_in_flight": LIMIT},
        queue={"lease_s": 30},
        # The server is not part of the world whose metrics are read. A second reading would lack the requests
        # at it, and close the gate.
        signals={"interval_s": 300, "max_age_s": 1800},
        gateway={"url": url, "allowed_paths": ["/*"]},
        batching={"mode": "off", "rules": list(rules)},
    )
    dispatcher = stage.dispatcher(settings)
    dispatcher.wait_for(limit=LIMIT)
    return dispatcher


def set_mode(dispatcher: Dispatcher, mode: str) -> None:
    generation = dispatcher.status()["config_generation"]
    dispatcher.reconfigure(batching={"mode": mode})
    dispatcher.wait_for(config_generation=generation + 1)


def make_payload(path: str) -> bytes:
    if path == EMBEDDINGS:
        return b'{"model":"m","input":"a text of some length, to be embedded"}'
    tensor = b'{"name":"x","shape":[1,4],"datatype":"FP32","data":[0.25,0.5,0.75,1.0]}'
    return b'{"inputs":[' + tensor + b"]}"


def measure_rate(stage: Stage, path: str, requests: int) -> float:
    """Submit requests, and return the rate from the end of the submission to the last result."""
    stage.producer.submit(requests, make_payload(path), endpoint=path)
    started = time.perf_counter()
    wait_until_sync(
        lambda: stage.producer.client.llen(stage.producer.names.result_list) >= requests,
        requests / 20 + 30,
        what="all results",
        every_s=0.005,
    )
    requests_per_s = requests / (time.perf_counter() - started)
    stage.producer.collect()
    assert stage.producer.count_results().keys() == {"200"}
    return requests_per_s


@pytest.mark.parametrize(
    ("path", "server", "rule", "min_gain"),
    [
        pytest.param(
            EMBEDDINGS,
            {"call_s": 0.005, "item_s": 0.0001},
            {"paths": [EMBEDDINGS], "max_size": 32},
            15.0,
            id="embeddings",
        ),
        # 400 items/s with single calls, 1,000 with calls of 16: 2.5 ms = a + b, 16 ms = a + 16 b.
        pytest.param(
            INFER,
            {"call_s": 0.0016, "item_s": 0.0009},
            {"paths": [INFER], "max_size": 16},
            2.2,
            id="triton",
        ),
    ],
)
def test_merged_calls_are_faster_if_calls_have_a_fixed_cost(
    stage: Stage,
    path: str,
    server: dict[str, float],
    rule: dict[str, Any],
    min_gain: float,
) -> None:
    with ExitStack() as stack:
        dispatcher = start_dispatcher(stage, stack.enter_context(run_list_server(**server)).url, [rule])
        single_rate = measure_rate(stage, path, 1000)
        set_mode(dispatcher, "on")
        measure_rate(stage, path, 400)  # the first merged calls include parity checks
        merged_rate = measure_rate(stage, path, 20_000)
        set_mode(dispatcher, "auto")
        measure_rate(stage, path, 5000)
        auto_rate = measure_rate(stage, path, 20_000)
        targets = dispatcher.status()["batching"]
    print(
        f"{path}: off {single_rate:.0f}/s, on {merged_rate:.0f}/s ({merged_rate / single_rate:.1f} x), "
        f"auto {auto_rate:.0f}/s ({auto_rate / single_rate:.1f} x), {targets}"
    )
    assert merged_rate >= min_gain * single_rate
    assert auto_rate >= 0.85 * min_gain * single_rate


def test_auto_mode_costs_little_if_merging_has_no_gain(stage: Stage) -> None:
    """The server runs 64 calls at once, and the duration of a call is proportional to its items."""
    with ExitStack() as stack:
        url = stack.enter_context(run_list_server(call_s=0, item_s=0.05, workers=64)).url
        dispatcher = start_dispatcher(stage, url, [{"paths": [EMBEDDINGS], "max_size": 32}])
        measure_rate(stage, EMBEDDINGS, 500)
        single_rate = measure_rate(stage, EMBEDDINGS, 20_000)
        set_mode(dispatcher, "auto")
        auto_rate = measure_rate(stage, EMBEDDINGS, 20_000)
        (target,) = dispatcher.status()["batching"]
    print(f"off {single_rate:.0f}/s, auto {auto_rate:.0f}/s ({auto_rate / single_rate:.3f} x), {target}")
    assert target["size"] == 1
    assert auto_rate >= 0.95 * single_rate
