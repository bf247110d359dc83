"""What is said of versions of models, on real servers: what others write, what is left, what is full."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from dispatcher.ports import ModelRegistryState, PinRequest, QueueUnavailableError
from dispatcher.queue.constants import MAX_MARKERS, MAX_PIN_S, MODEL_IN_USE_S, WARM_MARKER_S, WARM_UP_LOCK_S
from dispatcher.queue.keys import MODEL_REGISTRY_KEYS, QueueNames
from dispatcher.queue.redis.model_registry import pin_versions
from tests.queue.known import assert_drained, assert_only_known_keys
from tests.queue.made import NAMES, OwnerAndDesk, answer, claim, queues, submission
from tests.queue.servers import Server

PAIR = ("qwen-v1", "10.0.0.1:8000")
AT = dict(zip(MODEL_REGISTRY_KEYS, NAMES.model_registry_keys, strict=True))


@pytest.fixture
async def queue(any_server: Server, client: redis.asyncio.Redis) -> AsyncIterator[OwnerAndDesk]:
    async with queues(any_server.url, "a") as (one,):
        yield one
    await assert_only_known_keys(client, NAMES, *NAMES.model_registry_keys)


async def say_all(queue: OwnerAndDesk) -> ModelRegistryState:
    await queue.mark_warm(*PAIR)
    await queue.take_warm_up_lock("qwen-v2", PAIR[1])
    await queue.pin_versions([PinRequest("chat-7", "qwen-v1", ["qwen-v1"], 100)])
    return await queue.refresh_warm_markers([PAIR], (), ["qwen-v1"])


async def test_a_pool_that_nobody_serves_leaves_nothing_but_what_operators_said(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    await say_all(queue)
    lives = {name: await client.ttl(key) for name, key in AT.items()}
    expected = {
        "WARM_MARKERS": WARM_MARKER_S,
        "WARM_UP_LOCKS": WARM_UP_LOCK_S,
        "MODELS_IN_USE": MODEL_IN_USE_S,
        "PINS": 101,
        "PINS_LAST_USED": 101,
    }
    assert dict.fromkeys(("LABELS", "DRAINS"), -1) == {name: left for name, left in lives.items() if left < 0}
    assert all(0 < lives[name] <= most + 1 for name, most in expected.items()), lives
    await queue.set_label("qwen", "stable", None, "ada")
    await queue.undrain_version("qwen-v2")
    assert not await client.exists(AT["LABELS"], AT["DRAINS"])


async def test_two_pools_that_serve_the_same_names_know_nothing_of_each_other(
    queue: OwnerAndDesk, any_server: Server, client: redis.asyncio.Redis
) -> None:
    theirs = QueueNames("batch:{other}:requests", "batch:{other}:results")
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    await say_all(queue)
    async with queues(any_server.url, "a", names=theirs) as (other,):
        assert await other.refresh_warm_markers([PAIR], (), ()) == ModelRegistryState()
        assert await other.take_warm_up_lock("qwen-v2", PAIR[1])
        pinned = await other.pin_versions([PinRequest("chat-7", "qwen-v2", ["qwen-v1", "qwen-v2"], 100)])
        assert pinned == ["qwen-v2"]
    await client.delete(*theirs.model_registry_keys)


async def test_pins_last_as_long_as_the_longest_of_them(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    for for_s in (1000.0, 10.0, 1e30):
        await queue.pin_versions([PinRequest(f"for-{for_s}", "v1", (), for_s)])
        longest = min(max(for_s, 1000), MAX_PIN_S)
        assert longest - 5 < await client.ttl(AT["PINS"]) <= longest + 2
        assert longest - 5 < await client.ttl(AT["PINS_LAST_USED"]) <= longest + 2


async def test_no_more_pins_are_kept_than_may_be_and_what_is_over_goes(
    queue: OwnerAndDesk, client: Any
) -> None:
    async def ask(*keys: str, most: int = 3, for_s: float = 100.0) -> set[str]:
        await pin_versions(queue.backend, [PinRequest(key, "v1", ["v1"], for_s) for key in keys], most)
        kept = {key.decode() for key in await client.hkeys(AT["PINS"])} - {""}
        assert kept == {key.decode() for key in await client.zrange(AT["PINS_LAST_USED"], 0, -1)}
        return kept

    assert await ask("a") == {"a"}
    assert await ask("b", for_s=0) == {"a", "b"}, "which is over"
    assert await ask("c") == {"a", "b", "c"}
    assert await ask("a") == {"a", "c"}, "it was not asked for the longest"
    assert await ask("d", "e") == {"a", "d", "e"}
    assert await ask("f", "g", "h", "i") == {"g", "h", "i"}
    assert await ask("j", most=1) == {"j"}


async def test_pins_asked_for_before_the_clock_stepped_back_go_before_those_of_now(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    async def ask(key: str) -> list[str]:
        return await pin_versions(queue.backend, [PinRequest(key, "v1", ["v1"], 100)], 2)

    await ask("a")
    await ask("b")
    for key in (b"a", b"b", b"foreign"):
        await client.zadd(AT["PINS_LAST_USED"], {key: float("inf") if key == b"foreign" else 1e11})
    await ask("c")
    await ask("d")
    assert await client.zrange(AT["PINS_LAST_USED"], 0, -1) == [b"c", b"d"]
    assert set(await client.hkeys(AT["PINS"])) == {b"", b"c", b"d"}


FOREIGN = {"string": "someone's", "list": ["someone's"], "zset": {"someone's": 1}, "hash": {"a": "b"}}


async def put(client: redis.asyncio.Redis, key: str, kind: str) -> None:
    value: Any = FOREIGN[kind]
    if kind == "string":
        await client.set(key, value)
    elif kind == "list":
        await client.rpush(key, *value)
    elif kind == "hash":
        await client.hset(key, mapping=value)
    else:
        await client.zadd(key, value)


@pytest.mark.parametrize("name", MODEL_REGISTRY_KEYS)
async def test_a_foreign_key_is_left_alone_costs_what_it_stands_for_and_is_told_of(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, name: str
) -> None:
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    whole = await say_all(queue)
    await client.delete(AT[name])
    await put(client, AT[name], "list")
    for told in (await say_all(queue), await queue.read_model_registry()):
        kind = MODEL_REGISTRY_KEYS[name][1]
        assert told.problem == f"{AT[name]} holds a list, not a {kind}"
        assert (told.warm_markers == whole.warm_markers) is (name != "WARM_MARKERS")
        assert (told.models_in_use == whole.models_in_use) is (name != "MODELS_IN_USE")
        assert (told.labels == whole.labels) is (name != "LABELS")
        assert (told.drained_models.keys() == whole.drained_models.keys()) is (name != "DRAINS")
    assert await queue.take_warm_up_lock(*PAIR) is (name != "WARM_UP_LOCKS")
    await queue.release_warm_up_lock(*PAIR)
    again = await queue.pin_versions([PinRequest("chat-7", "qwen-v2", ["qwen-v1"], 100)])
    assert again == ["qwen-v2" if name.startswith("PINS") else "qwen-v1"]
    if name == "LABELS":
        with pytest.raises(QueueUnavailableError, match="models:labels holds a list, not a zset"):
            await queue.set_label("qwen", "stable", "2", "ada")
    if name == "DRAINS":
        with pytest.raises(QueueUnavailableError, match="models:drains holds a list, not a zset"):
            await queue.undrain_version("qwen-v2")
    assert await client.lrange(AT[name], 0, -1) == [b"someone's"]
    await client.delete(AT[name])
    if name in ("LABELS", "DRAINS"):
        assert (await queue.read_model_registry()).problem == ""
        return
    assert await say_all(queue) == whole


async def test_foreign_keys_stop_no_other_step(queue: OwnerAndDesk, client: redis.asyncio.Redis) -> None:
    for key in NAMES.model_registry_keys:
        await put(client, key, "list")
    await queue.submit([submission("r-1")])
    (lease,) = (await claim(queue)).leases
    assert await queue.settle([answer(lease)]) == ["done"]
    await queue.sweep()
    told = await queue.refresh_warm_markers([PAIR], [PAIR], ["qwen-v1"])
    assert told.problem.count("holds a list") == len(MODEL_REGISTRY_KEYS)
    assert (told.warm_markers, told.models_in_use, told.labels, told.drained_models) == (
        frozenset(),
        frozenset(),
        {},
        {},
    )
    await client.delete(*NAMES.model_registry_keys)


ODD = [
    b"\xff\xfe",
    b"null",
    b'["one"]',
    b'["z","b","c","d","e"]',
    b'["z",1]',
    b'{"a":"b"}',
    b"[" * 100_000,
    b'["z","\xff"]',
    b'["\\ud800","b"]',
]


@pytest.mark.parametrize("name", ["WARM_MARKERS", "WARM_UP_LOCKS", "MODELS_IN_USE", "LABELS", "DRAINS"])
async def test_what_others_write_among_it_counts_for_nothing(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, name: str
) -> None:
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    whole = await say_all(queue)
    await client.zadd(AT[name], dict.fromkeys(ODD, 1e300))
    told = await say_all(queue)
    assert (told.warm_markers, told.models_in_use, told.labels) == (
        whole.warm_markers,
        whole.models_in_use,
        whole.labels,
    )
    assert told.drained_models.keys() == whole.drained_models.keys()
    assert f"{len(ODD)} entries of the model registry cannot be read" in told.problem
    assert told.problem.isprintable()
    assert len(told.problem) < 300
    assert await queue.take_warm_up_lock("qwen-v2", PAIR[1])
    await queue.set_label("qwen", "stable", "2", "ada")
    assert await queue.undrain_version("qwen-v2")


@pytest.mark.parametrize("score", ["-inf", "-1", "1e18", "inf"])
async def test_a_drain_of_no_known_time_is_one(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, score: str
) -> None:
    await client.zadd(AT["DRAINS"], {'["qwen-v1","ada","why"]': float(score)})
    assert (await queue.read_model_registry()).drained_models == {"qwen-v1": "by ada: why"}
    assert await queue.undrain_version("qwen-v1")


async def test_a_label_that_was_written_twice_means_what_was_said_last(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    twice = {'["qwen","stable","2","ada"]': 2, '["qwen","stable","1","bob"]': 1}
    await client.zadd(AT["LABELS"], twice)
    assert (await queue.read_model_registry()).labels == {("qwen", "stable"): "2"}
    await queue.set_label("qwen", "stable", "3", "ada")
    assert await client.zcard(AT["LABELS"]) == 1


@pytest.mark.parametrize(
    "value",
    [
        "",
        "v1",
        "1 v1",
        "-1.0 v1",
        "9" * 400 + ".0 v1",
        "9" * 20 + ".0 v1",
        "nan v1",
        "99999999999.0",
        "\x00\xff",
    ],
)
async def test_a_pin_that_others_wrote_is_kept_no_longer_than_one_of_ours(
    queue: OwnerAndDesk, client: redis.asyncio.Redis, value: str
) -> None:
    for key in ("", "chat-7"):
        await client.hset(AT["PINS"], key, value.encode("latin-1"))
    told = await queue.pin_versions([PinRequest("chat-7", "v2", ["v1"], 100)])
    assert told == ["v1" if value.startswith("999") and value.endswith("v1") else "v2"]
    assert 0 < await client.ttl(AT["PINS"]) <= MAX_PIN_S + 2
    again = await queue.pin_versions([PinRequest("chat-7", "v3", ["v1", "v2"], 100)])
    assert again == told


async def test_marks_of_more_than_any_pool_has_are_told_in_part(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    await queue.mark_warm(*PAIR)
    async with client.pipeline() as pipeline:
        for start in range(0, MAX_MARKERS + 10, 10_000):
            pipeline.zadd(AT["WARM_MARKERS"], {f'["v{start + at}","e"]': 1e300 for at in range(10_000)})
        await pipeline.execute()
    assert len((await queue.read_model_registry()).warm_markers) == MAX_MARKERS
    await client.delete(AT["WARM_MARKERS"])


async def test_a_full_server_lets_marks_be_refreshed_and_refuses_what_operators_say_whole(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    await queue.set_label("qwen", "stable", "1", "ada")
    whole = await say_all(queue)
    await client.config_set("maxmemory", 1)
    try:
        assert await say_all(queue) == whole
        with pytest.raises(QueueUnavailableError, match="out of memory"):
            await queue.set_label("qwen", "stable", "2", "ada")
        assert (await queue.read_model_registry()).labels == {("qwen", "stable"): "1"}
        assert await queue.set_label("qwen", "stable", None, "ada")
    finally:
        await client.config_set("maxmemory", 0)


async def test_a_large_pool_is_told_in_one_step(queue: OwnerAndDesk) -> None:
    """More than one command of a script may name."""
    pairs = {(f"qwen-v{version}", f"10.0.{host}.1:8000") for version in range(40) for host in range(250)}
    models = [f"qwen-v{number}" for number in range(3000)]
    assert (await queue.refresh_warm_markers(pairs, (), models)).models_in_use == set(models)
    for pair in list(pairs)[:20]:
        await queue.mark_warm(*pair)
    assert len((await queue.refresh_warm_markers(pairs, (), models)).warm_markers) == 20
    told = await queue.refresh_warm_markers((), pairs, ())
    assert (told.warm_markers, told.models_in_use) == (frozenset(), frozenset())


async def test_nothing_of_it_counts_as_left_of_a_request(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    await say_all(queue)
    await assert_drained(client, NAMES)
