"""Identities of pools that the dispatchers of a queue share in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from dispatcher.queue.constants import MAX_POOL_IDENTITIES
from tests.queue.factories import NAMES, OwnerAndAdmin, queues
from tests.queue.servers import Server
from tests.support import wait_until


@pytest.fixture
async def queue(any_server: Server, client: object) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a") as (one,):
        yield one


@pytest.fixture
def admin(any_server: Server) -> redis.Redis:
    return any_server.client()


async def test_each_owner_reads_the_pools_of_all(queue: OwnerAndAdmin) -> None:
    assert await queue.share_pool_identity(b"", 30.0) == []
    assert await queue.share_pool_identity(b"east", 30.0) == [b"east"]
    assert sorted(await queue.share_pool_identity(b"west", 30.0)) == [b"east", b"west"]
    assert sorted(await queue.share_pool_identity(b"", 30.0)) == [b"east", b"west"]


async def test_pool_that_is_not_recorded_again_is_forgotten(queue: OwnerAndAdmin, admin: redis.Redis) -> None:
    await queue.share_pool_identity(b"east", 0.05)
    await asyncio.sleep(0.1)
    assert await queue.share_pool_identity(b"west", 30.0) == [b"west"]
    assert admin.zcard(NAMES.identities_key) == 1
    assert 0 < int(str(admin.ttl(NAMES.identities_key))) <= 30
    await queue.share_pool_identity(b"west", 0.05)
    await wait_until(lambda: not admin.exists(NAMES.identities_key), 5)


async def test_number_of_pools_in_a_reply_is_bounded(queue: OwnerAndAdmin) -> None:
    for number in range(MAX_POOL_IDENTITIES + 5):
        await queue.share_pool_identity(f"pool-{number}".encode(), 30.0)
    assert len(await queue.share_pool_identity(b"", 30.0)) == MAX_POOL_IDENTITIES
