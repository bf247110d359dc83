"""Each caller gets the answers to its own requests although calls are merged and faults are injected."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from dispatcher.client import BatchClient, Item
from tests.scenarios.list_server import ListServer, answer_alone, normalize_answer, run_list_server
from tests.scenarios.processes import POOL, Dispatcher, Stage

LEASE_S = 2.0
MAX_ITEMS = 24
INVALID_TEXT = "invalid-text"
EMBEDDINGS, PREDICT, INFER = "/v1/embeddings", "/v1/models/m:predict", "/v2/models/m/infer"
EMBED, SCORE, RERANK = "/embed", "/score", "/rerank"
RULES = [
    {"paths": [path], "max_size": 16, "max_items": None, "max_delay_s": 0.01}
    for path in (EMBEDDINGS, PREDICT, INFER, EMBED, SCORE, RERANK)
]


def make_request(random_source: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    """Return path and body of a random list call.

    It has one or more texts, sometimes more than the server accepts, or a text that the server rejects.
    """
    count = random_source.choice([1, 1, 1, 1, 2, 3, 7, 40])
    texts = [f"{name} {number}" for number in range(count)]
    if random_source.random() < 0.02:
        texts[random_source.randrange(count)] += INVALID_TEXT
    match random_source.randrange(8):
        case 0 | 1 | 2:
            body: dict[str, Any] = {"model": random_source.choice(["m", "n"]), "input": texts}
            if count == 1 and random_source.random() < 0.5:
                body["input"] = texts[0]
            if random_source.random() < 0.3:
                body["encoding_format"] = "base64"
            return EMBEDDINGS, body
        case 3:
            return PREDICT, {"instances": [{"text": text} for text in texts]}
        case 4:
            data = [float(sum(map(ord, text)) % 997) for text in texts]
            tensor = {"name": "x", "shape": [count, 1], "datatype": "FP32", "data": data}
            return INFER, {"id": name, "inputs": [tensor]}
        case 5:
            return EMBED, {"inputs": texts if random_source.random() < 0.5 or count > 1 else texts[0]}
        case 6:
            return SCORE, {"model": "m", "text_1": "a query", "text_2": texts}
        case _:
            return RERANK, {"model": "m", "query": random_source.choice(["q", "p"]), "documents": texts}


async def submit_and_check(client: BatchClient, caller: int, count: int) -> Counter[str]:
    """Submit requests and compare each answer with that of a single call.

    Return the number of each outcome.
    """
    random_source = random.Random(caller)
    requests = [make_request(random_source, f"c{caller}-{n}") for n in range(count)]
    bodies = [json.dumps(body).encode() for _, body in requests]
    items = [
        Item(body, path=path, id=f"r-{n}", deadline="30m")
        for n, ((path, _), body) in enumerate(zip(requests, bodies, strict=True))
    ]
    results = {result.id: result async for result in client.stream(items, max_pending=100)}
    counts: Counter[str] = Counter()
    for item, body in zip(items, bodies, strict=True):
        result = results[item.id]
        if INVALID_TEXT.encode() in body:
            if result.status != 400:
                pytest.fail(f"{item.path} {body!r:.500} was answered {result!r:.500}")
            counts["bad"] += 1
        else:
            answer, expected = (
                normalize_answer(result.raise_for_status().json()),
                answer_alone(item.path, body),
            )
            if lacks_one_item(answer, expected):
                counts["lacks one"] += (
                    1  # the request was sent as a single call, and the server left out an item
                )
                continue
            if answer != expected:
                pytest.fail(
                    f"{item.path} {body!r:.500} was answered {answer!r:.1500}, alone {expected!r:.1500}"
                )
            counts["good"] += 1
    assert len(results) == count
    return counts


def lacks_one_item(answer: Any, expected: Any) -> bool:
    """Return True if the answer is correct except that one item is missing."""
    if isinstance(expected, dict) and "outputs" in expected:
        return len(answer["outputs"]) == len(expected["outputs"]) and all(
            output["shape"][0] == whole["shape"][0] - 1
            and output["data"] == whole["data"][: len(output["data"])]
            for output, whole in zip(answer["outputs"], expected["outputs"], strict=True)
        )
    if isinstance(expected, list):
        return len(answer) == len(expected) - 1 and all(item in expected for item in answer)
    return isinstance(answer, dict) and any(
        isinstance(whole, list) and lacks_one_item(answer.get(name, whole), whole)
        for name, whole in expected.items()
    )


async def wait_for_merged_requests(dispatcher: Dispatcher, done: asyncio.Event) -> int:
    """Wait until this dispatcher has merged requests or the test is done. Return how many it has merged."""
    while not done.is_set():
        if merged_count := (await asyncio.to_thread(dispatcher.status))["batching_requests"]:
            return int(merged_count)
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 0.02)
    return 0


async def inject_faults(
    stage: Stage, server: ListServer, done: asyncio.Event, interval_s: float, rounds: int
) -> Counter[str]:
    """Inject faults in turn: kill a dispatcher that has merged calls, let calls fail, shuffle answers, lower
    the maximum number of items, and leave out an item.

    The number of rounds is limited. If a fault came back before each retry of the last request, or
    dispatchers were always killed before they take up requests whose owners have died (kernel/suspects.py),
    this request would never be answered. On a busy machine that can happen.
    """
    random_source, fault_counts = random.Random(0), Counter[str]()
    for number in range(5 * rounds):
        match number % 5:
            case 0:
                dispatcher = stage.dispatchers[fault_counts["SIGKILL"] % len(stage.dispatchers)]
                if merged_count := await wait_for_merged_requests(dispatcher, done):
                    await asyncio.to_thread(dispatcher.kill)
                    await asyncio.to_thread(dispatcher.start)
                    fault_counts["SIGKILL"] += 1
                    fault_counts["merged"] += merged_count
            case 1:
                await asyncio.to_thread(server.control, fail=5)
                fault_counts["503"] += 5
            case 2:
                await asyncio.to_thread(server.control, fail=0, shuffled=random_source.random() < 0.5)
                fault_counts["shuffled"] += 1
            case 3:
                await asyncio.to_thread(server.control, max_items=random_source.choice([MAX_ITEMS, 8]))
                fault_counts["changed maximum"] += 1
            case _:
                await asyncio.to_thread(server.control, missing=1)
                fault_counts["lacks an item"] += 1
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), interval_s)
        if done.is_set():
            break
    return fault_counts


@pytest.mark.parametrize(
    ("callers", "requests", "replicas", "interval_s", "rounds"),
    [
        (6, 200, 2, 0.1, 3),
        pytest.param(50, 400, 3, 1.0, 12, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
    ids=["short", "long"],
)
async def test_requests_in_merged_calls_get_their_own_answers(
    stage: Stage, callers: int, requests: int, replicas: int, interval_s: float, rounds: int
) -> None:
    world = stage.world(slots=64)
    with run_list_server(
        call_s=0.004, item_s=0.0005, workers=4, bad=INVALID_TEXT, max_items=MAX_ITEMS
    ) as server:
        settings = stage.settings(
            world,
            max_sys=256,
            gateway={"url": server.url, "allowed_paths": ["/*"]},
            queue={"lease_s": LEASE_S},
            retry={"base_s": 0.2, "max_s": 1.0, "max_attempts": 50},
            batching={"mode": "on", "rules": RULES},
        )
        for _ in range(replicas):
            await asyncio.to_thread(stage.dispatcher, settings)
        done = asyncio.Event()
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(BatchClient(stage.server.url, pool=POOL))
                for _ in range(callers)
            ]
            fault_task = asyncio.create_task(inject_faults(stage, server, done, interval_s, rounds))
            try:
                counts = await asyncio.gather(
                    *(submit_and_check(client, number, requests) for number, client in enumerate(clients))
                )
            finally:
                done.set()
                fault_counts = await fault_task
        kinds = sum(counts, Counter())
        calls = server.observed()
        sizes = Counter(calls["sizes"])
        print(
            f"{callers} callers, {dict(kinds)}, {dict(fault_counts)}; {calls['calls']} calls, "
            f"{sum(count for size, count in sizes.items() if size > 1)} of several items"
        )
        assert kinds.total() == callers * requests
        assert kinds["bad"]
        assert kinds["lacks one"] <= fault_counts["lacks an item"]
        assert fault_counts["SIGKILL"]
        merged_count = [dispatcher.status()["batching_requests"] for dispatcher in stage.dispatchers]
        assert sum(merged_count) + fault_counts["merged"] >= callers * requests / 4
