"""Scripts for the features that are present, and queues with requests of a feature that is not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import combinations

import pytest
import redis.asyncio

from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.sequences.decisions import SequenceTerms
from dispatcher.features.sequences.turns import Turn
from dispatcher.queue.contract import Release
from dispatcher.queue.lua_files import ALL_FEATURES, FEATURE_BY_FILE, LUA_FEATURES, TEXTS
from dispatcher.queue.redis.lua_scripts import load_script
from dispatcher.queue.redis.scripts import MissingFeatureError
from tests.queue.factories import NAMES, OwnerAndAdmin, answer, claim, claim_one, queues, submission
from tests.queue.servers import Server

STORED_FIELD = f"features:{NAMES.queue}"
SCRIPTS = sorted(name for name, text in TEXTS.items() if "\n-- Keys: queue" in text)
SUBSETS = [each for size in range(len(ALL_FEATURES) + 1) for each in combinations(ALL_FEATURES, size)]


@asynccontextmanager
async def queue_without(server: Server, *absent: str) -> AsyncIterator[OwnerAndAdmin]:
    features = tuple(each for each in ALL_FEATURES if each not in absent)
    async with queues(server.url, "without", features=features) as (queue,):
        yield queue


@pytest.fixture
async def queue(any_server: Server, client: redis.asyncio.Redis) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "with") as (one,):
        yield one


async def use_feature(queue: OwnerAndAdmin, feature: str) -> None:
    """Store a request that needs the feature."""
    await queue.submit([submission("r-1", 4_000_000_000)])
    lease = await claim_one(queue)
    if feature == "sequences":
        await queue.claim_turns([(lease, Turn("chat"))], SequenceTerms())
    elif feature == "models":
        await queue.release([Release(lease, extra=ModelWait("m"))])
    else:
        await queue.release([Release(lease, progress=b"part 1")])


@pytest.mark.parametrize("features", SUBSETS, ids="+".join)
async def test_scripts_of_the_queue_compile_with_any_features(
    any_server: Server, client: redis.asyncio.Redis, features: tuple[str, ...]
) -> None:
    for name in SCRIPTS:
        if FEATURE_BY_FILE.get(name, features) in (features, *features):
            await client.script_load(load_script(name, features).text)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in FEATURE_BY_FILE])
def test_script_without_features_has_nothing_of_them(name: str) -> None:
    text = load_script(name, ()).text
    names = {key for each in LUA_FEATURES.values() for key in (*each.keys, each.extra[0])}
    assert {each for each in names if each in text} == set()
    assert not any(TEXTS[file] in text for file in FEATURE_BY_FILE)


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "\n-- Hooks: " in text])
def test_only_before_writes_may_raise(name: str) -> None:
    """Redis does not undo the writes of a script that fails."""
    others = re.sub(
        r"^function \S+\.before_writes\(.*?^end$", "", TEXTS[name], flags=re.MULTILINE | re.DOTALL
    )
    assert not re.search(r"\b(error|check_types|check_used)\(", others)


def test_indexes_of_features_in_an_entry_stay() -> None:
    """Entries that are stored now are read by later versions."""
    assert {each.name: each.extra[1] for each in LUA_FEATURES.values()} == {
        "sequences": 14,
        "models": 15,
        "slices": 16,
    }


def test_script_of_an_absent_feature_is_not_built() -> None:
    with pytest.raises(ValueError, match="claim_turns"):
        load_script("claim_turns", ("models",))


@pytest.mark.parametrize("feature", ALL_FEATURES)
async def test_queue_with_requests_of_an_absent_feature_is_refused(
    any_server: Server, queue: OwnerAndAdmin, client: redis.asyncio.Redis, feature: str
) -> None:
    async with queue_without(any_server, feature) as other:
        await other.sweep()
        await use_feature(queue, feature)
        assert await client.hget(NAMES.control_key, STORED_FIELD) == feature.encode()
        await queue.submit([submission("r-2", 4_000_000_000)])
        for step in (claim(other), other.sweep()):
            with pytest.raises(MissingFeatureError, match=f"feature {feature}"):
                await step
        assert (await claim(queue)).leases


@pytest.mark.parametrize("feature", ALL_FEATURES)
async def test_sweep_records_features_that_an_earlier_version_has_used(
    any_server: Server, queue: OwnerAndAdmin, client: redis.asyncio.Redis, feature: str
) -> None:
    await use_feature(queue, feature)
    await client.hdel(NAMES.control_key, STORED_FIELD)
    await queue.sweep()
    assert await client.hget(NAMES.control_key, STORED_FIELD) == feature.encode()


async def test_queue_is_accepted_again_when_the_last_request_of_a_feature_has_ended(
    any_server: Server, queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await use_feature(queue, "slices")
    await use_feature(queue, "models")
    assert await client.hget(NAMES.control_key, STORED_FIELD) == b"slices models"
    await queue.return_waiting_for_models(["m"])
    await queue.sweep()
    assert await client.hget(NAMES.control_key, STORED_FIELD) == b"slices"
    (lease, *_) = (await claim(queue)).leases
    await queue.settle([answer(lease)])
    await queue.sweep()
    assert await client.hget(NAMES.control_key, STORED_FIELD) is None
    async with queue_without(any_server, *ALL_FEATURES) as other:
        await other.sweep()
