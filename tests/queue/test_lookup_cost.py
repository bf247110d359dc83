"""Lookups cost the dispatchers little: no call reads more than a page, however many requests there are."""

from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio

from dispatcher.cli.find_requests import find_by_id
from dispatcher.queue.contract import Release
from dispatcher.requests.found_request import LookupPage, RequestLocation, encode_spellings
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from tests.queue.factories import claim, member, queues
from tests.queue.servers import Server

MANY = 100_000
PAGE = 512
DEADLINE = 2_000_000_000


async def test_no_lookup_blocks_for_long_with_a_hundred_thousand_requests(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    payload = b'{"prompt": "' + b"x" * 300 + b'"}'
    async with queues(any_server.url, "a") as (queue,):
        for first in range(0, MANY, 5000):
            made = {
                encode_member(f"r-{at}", payload, DEADLINE + at): DEADLINE + at
                for at in range(first, first + 5000)
            }
            await client.zadd(queue.names.queue, made)
        sought = encode_member("sought", payload, DEADLINE, token="t")
        await queue.submit([Submission(sought, float(DEADLINE), "sought", "t", DEADLINE)])

        await client.config_resetstat()
        near = await queue.find_by_id("sought")
        assert ([each.member for each in near.requests], near.after) == ([sought], "")
        assert near.examined_count == 1, "only the request with the token, and no other with its deadline"

        found, looked, after, words = 0, 0, "", [encode_spellings("sought")]
        while True:
            page: LookupPage = await queue.search_requests(words, after)
            assert page.examined_count <= PAGE * 2, "a page of a cursor may be somewhat larger than requested"
            found, looked, after = found + len(page.requests), looked + page.examined_count, page.after
            if not after:
                break
        assert (found, looked >= MANY) == (1, True)
        last = await queue.list_requests(RequestLocation.PENDING, PAGE, str(MANY - 10))
        assert (len(last.requests), last.after) == (11, "")

        reply: Any = await client.info("commandstats")
        # A call costs about twice as much as the scan of its page.
        assert reply["cmdstat_evalsha"]["usec"] < 5 * reply["cmdstat_zscan"]["usec"], reply
        assert reply["cmdstat_evalsha"]["calls"] < 2 * MANY / PAGE


async def test_pages_of_large_members_have_fewer_requests(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    large = {encode_member(f"r-{at}", b'{"p": "' + b"x" * 400_000 + b'"}', DEADLINE): at for at in range(40)}
    await client.zadd("batch:{pool}:requests", large)
    seen: set[bytes] = set()
    async with queues(any_server.url, "a") as (queue,):
        after = ""
        while True:
            page = await queue.search_requests([], after)
            seen |= {each.member for each in page.requests}
            # A page is at least one bucket of the hash table: seven members in Valkey, and those that found
            # no room there. The hash differs in each run; up to 12 of 40 members were in one bucket.
            assert len(page.requests) <= 20
            if not (after := page.after):
                break
        assert seen == set(large)
        page = await queue.list_requests(RequestLocation.PENDING, 99)
        assert (len(page.requests), page.after) == (2, "2")


@pytest.mark.parametrize("returned", [False, True])
async def test_request_of_our_client_is_found_by_its_token_among_many_with_one_deadline(
    any_server: Server, client: redis.asyncio.Redis, returned: bool
) -> None:
    """Members sort before and behind the request by their bytes, in an order that differs from a locale's."""
    prefixes = [
        b"A",
        b"{",
        b'{"internal":{"retry_count":0,"request_token":"T',
        "\u00e4".encode(),
        b"\xff",
        b"z",
    ]
    async with queues(any_server.url, "a") as (queue,):
        made = {each + b"%d" % at: DEADLINE for at in range(1000) for each in prefixes}
        sought = encode_member("sought", {"prompt": "hi"}, DEADLINE, token="t" * 48)
        await queue.submit([Submission(sought, float(DEADLINE), "sought", "t" * 48, DEADLINE)])
        if returned:
            (lease,) = (await claim(queue)).leases
            await queue.release([Release(lease, 0.0)])
        await client.zadd(queue.names.queue, made)
        near = await queue.find_by_id("sought")
        assert [(each.member, each.entry > 0) for each in near.requests] == [(sought, returned)]
        assert (near.after, near.examined_count) == ("", 1)


async def test_leased_request_is_found_before_requests_with_its_deadline_are_read(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    async with queues(any_server.url, "a") as (queue,):
        sought = encode_member("sought", {"prompt": "hi"}, DEADLINE, token="t")
        await queue.submit([Submission(sought, float(DEADLINE), "sought", "t", DEADLINE)])
        await claim(queue)
        await client.zadd(queue.names.queue, {b"m%d" % at: DEADLINE for at in range(1000)})
        near = await queue.find_by_id("sought")
        assert ([each.member for each in near.requests], near.after, near.examined_count) == ([sought], "", 1)


async def test_token_at_another_place_of_the_member_is_found_by_its_deadline(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    """A member that was copied or accepted again may have its token at another place."""
    sought = member("sought", DEADLINE, token="t").replace(b'{"internal":{', b'{"internal":{"labels":{},')
    async with queues(any_server.url, "a") as (queue,):
        await queue.submit([Submission(sought, float(DEADLINE), "sought", "t", DEADLINE)])
        await client.zadd(queue.names.queue, {b"m%d" % at: DEADLINE for at in range(10)})
        near = await queue.find_by_id("sought")
        assert ([each.member for each in near.requests], near.examined_count) == ([sought], 11)


async def test_search_without_an_index_reads_a_bounded_number_of_requests(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    async with queues(any_server.url, "a") as (queue,):
        await client.zadd(queue.names.queue, {member(f"r-{at}"): at for at in range(5000)})
        found, looked_at = await find_by_id(queue.queue_admin, "nobody", 1000)
        assert (found, 1000 <= looked_at < 1000 + 2 * PAGE) == ([], True)
        found, looked_at = await find_by_id(queue.queue_admin, "nobody")
        assert (found, looked_at) == ([], 5000)
