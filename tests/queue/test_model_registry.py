"""Model registry on real servers: foreign values, lifetimes, and limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from dispatcher.features.models.queue.registry import pin_versions
from dispatcher.features.models.queue.registry_rules import (
    MAX_MARKERS,
    MAX_PIN_S,
    MODEL_IN_USE_S,
    WARM_MARKER_S,
    WARM_UP_LOCK_S,
)
from dispatcher.features.models.registry import ModelRegistryState, PinRequest
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.lua_files import FEATURE_POOL_KEYS
from dispatcher.requests.submission import QueueUnavailableError
from tests.queue.factories import NAMES, OwnerAndAdmin, answer, claim, queues, submission
from tests.queue.key_checks import assert_drained, assert_only_known_keys
from tests.queue.servers import Server

PAIR = ("qwen-v1", "10.0.0.1:8000")
AT = dict(zip(FEATURE_POOL_KEYS, NAMES.feature_pool_keys, strict=True))


@pytest.fixture
async def queue(any_server: Server, client: redis.asyncio.Redis) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a") as (one,):
        yield one
    await assert_only_known_keys(client, NAMES, *NAMES.feature_pool_keys)


async def fill_registry(queue: OwnerAndAdmin) -> ModelRegistryState:
    await queue.mark_warm(*PAIR)
    await queue.take_warm_up_lock("qwen-v2", PAIR[1])
    await queue.pin_versions([PinRequest("chat-7", "qwen-v1", ["qwen-v1"], 100)])
    return await queue.refresh_warm_markers([PAIR], (), ["qwen-v1"])


async def test_registry_of_an_unserved_pool_keeps_only_labels_and_drains(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    await fill_registry(queue)
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


async def test_registries_of_two_pools_are_independent(
    queue: OwnerAndAdmin, any_server: Server, client: redis.asyncio.Redis
) -> None:
    theirs = QueueNames("batch:{other}:requests", "batch:{other}:results")
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    await fill_registry(queue)
    async with queues(any_server.url, "a", names=theirs) as (other,):
        assert await other.refresh_warm_markers([PAIR], (), ()) == ModelRegistryState()
        assert await other.take_warm_up_lock("qwen-v2", PAIR[1])
        pinned = await other.pin_versions([PinRequest("chat-7", "qwen-v2", ["qwen-v1", "qwen-v2"], 100)])
        assert pinned == ["qwen-v2"]
    await client.delete(*theirs.feature_pool_keys)


async def test_pins_last_as_long_as_the_longest_of_them(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    for for_s in (1000.0, 10.0, 1e30):
        await queue.pin_versions([PinRequest(f"for-{for_s}", "v1", (), for_s)])
        longest = min(max(for_s, 1000), MAX_PIN_S)
        assert longest - 5 < await client.ttl(AT["PINS"]) <= longest + 2
        assert longest - 5 < await client.ttl(AT["PINS_LAST_USED"]) <= longest + 2


async def test_number_of_pins_is_limited_and_expired_ones_are_removed(
    queue: OwnerAndAdmin, client: Any
) -> None:
    async def ask(*keys: str, most: int = 3, for_s: float = 100.0) -> set[str]:
        await pin_versions(queue.backend, [PinRequest(key, "v1", ["v1"], for_s) for key in keys], most)
        kept = {key.decode() for key in await client.hkeys(AT["PINS"])} - {""}
        assert kept == {key.decode() for key in await client.zrange(AT["PINS_LAST_USED"], 0, -1)}
        return kept

    assert await ask("a") == {"a"}
    assert await ask("b", for_s=0) == {"a", "b"}, "an expired one is dropped"
    assert await ask("c") == {"a", "b", "c"}
    assert await ask("a") == {"a", "c"}, "the least recently used one is dropped"
    assert await ask("d", "e") == {"a", "d", "e"}
    assert await ask("f", "g", "h", "i") == {"g", "h", "i"}
    assert await ask("j", most=1) == {"j"}


async def test_pins_from_before_a_clock_step_are_dropped_first(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
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


async def write_entry(client: redis.asyncio.Redis, key: str, kind: str) -> None:
    value: Any = FOREIGN[kind]
    if kind == "string":
        await client.set(key, value)
    elif kind == "list":
        await client.rpush(key, *value)
    elif kind == "hash":
        await client.hset(key, mapping=value)
    else:
        await client.zadd(key, value)


@pytest.mark.parametrize("name", FEATURE_POOL_KEYS)
async def test_foreign_key_in_the_registry_is_kept_ignored_and_reported(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, name: str
) -> None:
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    whole = await fill_registry(queue)
    await client.delete(AT[name])
    await write_entry(client, AT[name], "list")
    for reply in (await fill_registry(queue), await queue.read_model_registry()):
        kind = FEATURE_POOL_KEYS[name][1]
        assert reply.problem == f"{AT[name]} holds a list, not a {kind}"
        assert (reply.warm_markers == whole.warm_markers) is (name != "WARM_MARKERS")
        assert (reply.models_in_use == whole.models_in_use) is (name != "MODELS_IN_USE")
        assert (reply.labels == whole.labels) is (name != "LABELS")
        assert (reply.drained_models.keys() == whole.drained_models.keys()) is (name != "DRAINS")
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
    assert await fill_registry(queue) == whole


async def test_foreign_keys_in_the_registry_stop_no_other_step(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    for key in NAMES.feature_pool_keys:
        await write_entry(client, key, "list")
    await queue.submit([submission("r-1")])
    (lease,) = (await claim(queue)).leases
    assert await queue.settle([answer(lease)]) == ["done"]
    await queue.sweep()
    reply = await queue.refresh_warm_markers([PAIR], [PAIR], ["qwen-v1"])
    assert reply.problem.count("holds a list") == len(FEATURE_POOL_KEYS)
    assert (reply.warm_markers, reply.models_in_use, reply.labels, reply.drained_models) == (
        frozenset(),
        frozenset(),
        {},
        {},
    )
    await client.delete(*NAMES.feature_pool_keys)


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
async def test_invalid_entries_in_the_registry_are_ignored(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, name: str
) -> None:
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v2", "ada")
    whole = await fill_registry(queue)
    await client.zadd(AT[name], dict.fromkeys(ODD, 1e300))
    reply = await fill_registry(queue)
    assert (reply.warm_markers, reply.models_in_use, reply.labels) == (
        whole.warm_markers,
        whole.models_in_use,
        whole.labels,
    )
    assert reply.drained_models.keys() == whole.drained_models.keys()
    assert f"{len(ODD)} entries of the model registry cannot be read" in reply.problem
    assert reply.problem.isprintable()
    assert len(reply.problem) < 300
    assert await queue.take_warm_up_lock("qwen-v2", PAIR[1])
    await queue.set_label("qwen", "stable", "2", "ada")
    assert await queue.undrain_version("qwen-v2")


@pytest.mark.parametrize("score", ["-inf", "-1", "1e18", "inf"])
async def test_drain_without_a_valid_time_applies(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, score: str
) -> None:
    await client.zadd(AT["DRAINS"], {'["qwen-v1","ada","why"]': float(score)})
    assert (await queue.read_model_registry()).drained_models == {"qwen-v1": "by ada: why"}
    assert await queue.undrain_version("qwen-v1")


async def test_label_that_was_written_twice_has_the_last_version(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
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
async def test_foreign_pin_is_kept_no_longer_than_our_pins(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, value: str
) -> None:
    for key in ("", "chat-7"):
        await client.hset(AT["PINS"], key, value.encode("latin-1"))
    reply = await queue.pin_versions([PinRequest("chat-7", "v2", ["v1"], 100)])
    assert reply == ["v1" if value.startswith("999") and value.endswith("v1") else "v2"]
    assert 0 < await client.ttl(AT["PINS"]) <= MAX_PIN_S + 2
    again = await queue.pin_versions([PinRequest("chat-7", "v3", ["v1", "v2"], 100)])
    assert again == reply


async def test_very_large_registry_is_returned_in_part(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.mark_warm(*PAIR)
    async with client.pipeline() as pipeline:
        for start in range(0, MAX_MARKERS + 10, 10_000):
            pipeline.zadd(AT["WARM_MARKERS"], {f'["v{start + at}","e"]': 1e300 for at in range(10_000)})
        await pipeline.execute()
    assert len((await queue.read_model_registry()).warm_markers) == MAX_MARKERS
    await client.delete(AT["WARM_MARKERS"])


async def test_full_server_refreshes_markers_and_rejects_labels_and_drains_as_a_whole(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.set_label("qwen", "stable", "1", "ada")
    whole = await fill_registry(queue)
    await client.config_set("maxmemory", 1)
    try:
        assert await fill_registry(queue) == whole
        with pytest.raises(QueueUnavailableError, match="out of memory"):
            await queue.set_label("qwen", "stable", "2", "ada")
        assert (await queue.read_model_registry()).labels == {("qwen", "stable"): "1"}
        assert await queue.set_label("qwen", "stable", None, "ada")
    finally:
        await client.config_set("maxmemory", 0)


async def test_registry_of_a_large_pool_is_returned_in_one_step(queue: OwnerAndAdmin) -> None:
    """There are more entries than one command of a script can name."""
    pairs = {(f"qwen-v{version}", f"10.0.{host}.1:8000") for version in range(40) for host in range(250)}
    models = [f"qwen-v{number}" for number in range(3000)]
    assert (await queue.refresh_warm_markers(pairs, (), models)).models_in_use == set(models)
    for pair in list(pairs)[:20]:
        await queue.mark_warm(*pair)
    assert len((await queue.refresh_warm_markers(pairs, (), models)).warm_markers) == 20
    reply = await queue.refresh_warm_markers((), pairs, ())
    assert (reply.warm_markers, reply.models_in_use) == (frozenset(), frozenset())


async def test_registry_keys_do_not_count_as_remains_of_requests(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await fill_registry(queue)
    await assert_drained(client, NAMES)
