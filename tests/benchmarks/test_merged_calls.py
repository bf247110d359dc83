"""What merged calls are worth: items a second beside the same dispatcher with batching off, in one run.

The servers are stand-ins whose cost is stated: so much for a call and so much for each of its items. Whether
a real server is like one of them is what `batching.mode: auto` measures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.stages import stage_in
from tests.scenarios.listserver import list_server
from tests.scenarios.processes import Dispatcher, Stage
from tests.support import wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
# The short form is in tests/dispatch/merging/test_merger.py, in virtual time.

EMBEDDINGS = "/v1/embeddings"
INFER = "/v2/models/m/infer"
LIMIT = 128


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with stage_in(tmp_path) as made:
        yield made


def ready(stage: Stage, url: str, rules: Sequence[Mapping[str, Any]]) -> Dispatcher:
    world = stage.world(slots=4 * LIMIT)
    settings = stage.settings(
        world,
        max_sys=4 * LIMIT,
        budget={"max_in_flight": LIMIT},
        queue={"lease_s": 30},
        gateway={"url": url, "allowed_paths": ["/*"]},
        batching={"mode": "off", "rules": list(rules)},
    )
    one = stage.dispatcher(settings)
    one.wait_for(limit=LIMIT)
    return one


def turn(one: Dispatcher, mode: str) -> None:
    generation = one.status()["config_generation"]
    one.reconfigure(batching={"mode": mode})
    one.wait_for(config_generation=generation + 1)


def payload(path: str) -> bytes:
    if path == EMBEDDINGS:
        return b'{"model":"m","input":"a text of some length, to be embedded"}'
    tensor = b'{"name":"x","shape":[1,4],"datatype":"FP32","data":[0.25,0.5,0.75,1.0]}'
    return b'{"inputs":[' + tensor + b"]}"


def rate(stage: Stage, path: str, requests: int) -> float:
    """Requests per second from the last one's submission to the last one's result."""
    stage.producer.submit(requests, payload(path), endpoint=path)
    started = time.perf_counter()
    wait_until_sync(
        lambda: stage.producer.client.llen(stage.producer.names.result_list) >= requests,
        requests / 20 + 30,
        what="all results",
        every_s=0.005,
    )
    found = requests / (time.perf_counter() - started)
    stage.producer.collect()
    assert stage.producer.answers().keys() == {"200"}
    return found


@pytest.mark.parametrize(
    ("path", "server", "rule", "least"),
    [
        pytest.param(
            EMBEDDINGS,
            {"call_s": 0.005, "item_s": 0.0001},
            {"paths": [EMBEDDINGS], "max_size": 32},
            15.0,
            id="embeddings",
        ),
        # 400 a second one by one, 1,000 by sixteen: 2.5 ms = a + b, 16 ms = a + 16 b.
        pytest.param(
            INFER,
            {"call_s": 0.0016, "item_s": 0.0009},
            {"paths": [INFER], "max_size": 16},
            2.2,
            id="triton",
        ),
    ],
)
def test_merged_calls_pay_where_a_call_costs_something(
    stage: Stage,
    path: str,
    server: dict[str, float],
    rule: dict[str, Any],
    least: float,
) -> None:
    with ExitStack() as stack:
        one = ready(stage, stack.enter_context(list_server(**server)).url, [rule])
        single = rate(stage, path, 1000)
        turn(one, "on")
        rate(stage, path, 400)  # the first merged calls are checked
        merged = rate(stage, path, 20_000)
        turn(one, "auto")
        rate(stage, path, 5000)
        found = rate(stage, path, 20_000)
        told = one.status()["batching"]
    print(
        f"{path}: off {single:.0f}/s, on {merged:.0f}/s ({merged / single:.1f} x), "
        f"auto {found:.0f}/s ({found / single:.1f} x), {told}"
    )
    assert merged >= least * single
    assert found >= 0.85 * least * single


def test_auto_costs_next_to_nothing_where_merging_does_not_pay(stage: Stage) -> None:
    """A server that runs 64 calls at once, and takes as long for each item of one."""
    with ExitStack() as stack:
        url = stack.enter_context(list_server(call_s=0, item_s=0.05, workers=64)).url
        one = ready(stage, url, [{"paths": [EMBEDDINGS], "max_size": 32}])
        rate(stage, EMBEDDINGS, 500)
        single = rate(stage, EMBEDDINGS, 20_000)
        turn(one, "auto")
        found = rate(stage, EMBEDDINGS, 20_000)
        (told,) = one.status()["batching"]
    print(f"off {single:.0f}/s, auto {found:.0f}/s ({found / single:.3f} x), {told}")
    assert told["size"] == 1
    assert found >= 0.95 * single
