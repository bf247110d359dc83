"""Each caller has exactly its own answers, whoever its requests travelled with, whatever went wrong."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from dispatcher.client import BatchClient, Item
from tests.scenarios.listserver import ListProcess, alone, comparable, list_server
from tests.scenarios.processes import POOL, Dispatcher, Stage

LEASE_S = 2.0
MAX_ITEMS = 24
BAD = "bad-one"
EMBEDDINGS, PREDICT, INFER = "/v1/embeddings", "/v1/models/m:predict", "/v2/models/m/infer"
EMBED, SCORE, RERANK = "/embed", "/score", "/rerank"
RULES = [
    {"paths": [path], "max_size": 16, "max_items": None, "max_delay_s": 0.01}
    for path in (EMBEDDINGS, PREDICT, INFER, EMBED, SCORE, RERANK)
]


def request(chance: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    """Of some shape: one text, or a list that may be longer than the server takes, or one that it refuses."""
    count = chance.choice([1, 1, 1, 1, 2, 3, 7, 40])
    texts = [f"{name} {number}" for number in range(count)]
    if chance.random() < 0.02:
        texts[chance.randrange(count)] += BAD
    match chance.randrange(8):
        case 0 | 1 | 2:
            body: dict[str, Any] = {"model": chance.choice(["m", "n"]), "input": texts}
            if count == 1 and chance.random() < 0.5:
                body["input"] = texts[0]
            if chance.random() < 0.3:
                body["encoding_format"] = "base64"
            return EMBEDDINGS, body
        case 3:
            return PREDICT, {"instances": [{"text": text} for text in texts]}
        case 4:
            data = [float(sum(map(ord, text)) % 997) for text in texts]
            tensor = {"name": "x", "shape": [count, 1], "datatype": "FP32", "data": data}
            return INFER, {"id": name, "inputs": [tensor]}
        case 5:
            return EMBED, {"inputs": texts if chance.random() < 0.5 or count > 1 else texts[0]}
        case 6:
            return SCORE, {"model": "m", "text_1": "a query", "text_2": texts}
        case _:
            return RERANK, {"model": "m", "query": chance.choice(["q", "p"]), "documents": texts}


async def call(client: BatchClient, caller: int, count: int) -> Counter[str]:
    """Submit so many at once, and hold each answer against what it is alone; how many were good and bad."""
    chance = random.Random(caller)
    asked = [request(chance, f"c{caller}-{n}") for n in range(count)]
    bodies = [json.dumps(body).encode() for _, body in asked]
    items = [
        Item(body, path=path, id=f"r-{n}", deadline="30m")
        for n, ((path, _), body) in enumerate(zip(asked, bodies, strict=True))
    ]
    results = {result.id: result async for result in client.stream(items, max_pending=100)}
    found: Counter[str] = Counter()
    for item, body in zip(items, bodies, strict=True):
        result = results[item.id]
        if BAD.encode() in body:
            if result.status != 400:
                pytest.fail(f"{item.path} {body!r:.500} was answered {result!r:.500}")
            found["bad"] += 1
        else:
            answer, own = comparable(result.raise_for_status().json()), alone(item.path, body)
            if lacks_one(answer, own):
                found["lacks one"] += 1  # the call was its own, and this is what the server said to it
                continue
            if answer != own:
                pytest.fail(f"{item.path} {body!r:.500} was answered {answer!r:.1500}, alone {own!r:.1500}")
            found["good"] += 1
    assert len(results) == count
    return found


def lacks_one(answer: Any, own: Any) -> bool:
    """An answer that is right but for one item that is not there."""
    if isinstance(own, list):
        return len(answer) == len(own) - 1 and all(item in own for item in answer)
    return isinstance(answer, dict) and any(
        isinstance(whole, list) and lacks_one(answer.get(name, whole), whole) for name, whole in own.items()
    )


async def merged_by(one: Dispatcher, until: asyncio.Event) -> int:
    """How many requests travelled with others here, as soon as there are any."""
    while not until.is_set():
        if merged := (await asyncio.to_thread(one.status))["batching_requests"]:
            return int(merged)
        with suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), 0.02)
    return 0


async def make_trouble(
    stage: Stage, server: ListProcess, until: asyncio.Event, every_s: float, rounds: int
) -> Counter[str]:
    """In turn: a dispatcher that has merged calls is killed, calls fail, are refused, come shuffled, answers
    lack an item.

    Only so many rounds: trouble that comes back sooner than the last request is tried again, each time, and a
    process that is killed before it takes up requests whose owners have died (dispatch/suspects.py), keep
    that one from its answer for ever. On a machine that does other things beside it is late enough for that.
    """
    chance, done = random.Random(0), Counter[str]()
    for number in range(5 * rounds):
        match number % 5:
            case 0:
                one = stage.dispatchers[done["SIGKILL"] % len(stage.dispatchers)]
                if merged := await merged_by(one, until):
                    await asyncio.to_thread(one.kill)
                    await asyncio.to_thread(one.start)
                    done["SIGKILL"] += 1
                    done["merged"] += merged
            case 1:
                await asyncio.to_thread(server.control, fail=5)
                done["503"] += 5
            case 2:
                await asyncio.to_thread(server.control, fail=0, shuffled=chance.random() < 0.5)
                done["shuffled"] += 1
            case 3:
                await asyncio.to_thread(server.control, max_items=chance.choice([MAX_ITEMS, 8]))
                done["another maximum"] += 1
            case _:
                await asyncio.to_thread(server.control, missing=1)
                done["lacks an item"] += 1
        with suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), every_s)
        if until.is_set():
            break
    return done


@pytest.mark.parametrize(
    ("callers", "requests", "replicas", "every_s", "rounds"),
    [
        (6, 200, 2, 0.1, 3),
        pytest.param(50, 400, 3, 1.0, 12, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
    ids=["short", "long"],
)
async def test_whoever_travels_with_others_has_its_own_answer(
    stage: Stage, callers: int, requests: int, replicas: int, every_s: float, rounds: int
) -> None:
    world = stage.world(slots=64)
    with list_server(call_s=0.004, item_s=0.0005, workers=4, bad=BAD, max_items=MAX_ITEMS) as server:
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
            trouble = asyncio.create_task(make_trouble(stage, server, done, every_s, rounds))
            try:
                found = await asyncio.gather(
                    *(call(client, number, requests) for number, client in enumerate(clients))
                )
            finally:
                done.set()
                troubled = await trouble
        kinds = sum(found, Counter())
        calls = server.observed()
        sizes = Counter(calls["sizes"])
        print(
            f"{callers} callers, {dict(kinds)}, {dict(troubled)}; {calls['calls']} calls, "
            f"{sum(count for size, count in sizes.items() if size > 1)} of several items"
        )
        assert kinds.total() == callers * requests
        assert kinds["bad"]
        assert kinds["lacks one"] <= troubled["lacks an item"]
        assert troubled["SIGKILL"]
        merged = [one.status()["batching_requests"] for one in stage.dispatchers]
        assert sum(merged) + troubled["merged"] >= callers * requests / 4
