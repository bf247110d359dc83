"""Looking costs those who work little: no call reads more than a page, however many wait."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from dispatcher.core.located import Looked, Whereabouts, spellings
from dispatcher.core.request import encode_member
from dispatcher.ports import Submission
from tests.queue.made import queues
from tests.queue.servers import Server

MANY = 100_000
PAGE = 512
DEADLINE = 2_000_000_000


async def test_no_call_blocks_for_long_while_a_hundred_thousand_wait(
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
        near = await queue.near("sought")
        assert ([each.member for each in near.found], near.after) == ([sought], "")
        assert near.looked_at == 2, "those of the same deadline, and no other"

        found, looked, after, words = 0, 0, "", [spellings("sought")]
        while True:
            page: Looked = await queue.search(words, after)
            assert page.looked_at <= PAGE * 2, "a cursor's page may be somewhat larger than was asked for"
            found, looked, after = found + len(page.found), looked + page.looked_at, page.after
            if not after:
                break
        assert (found, looked >= MANY) == (1, True)
        last = await queue.lying(Whereabouts.PENDING, PAGE, str(MANY - 10))
        assert (len(last.found), last.after) == (11, "")

        told: Any = await client.info("commandstats")
        assert told["cmdstat_evalsha"]["usec_per_call"] < 20_000, told["cmdstat_evalsha"]
        assert told["cmdstat_evalsha"]["calls"] < 2 * MANY / PAGE


async def test_large_members_are_read_in_smaller_pages(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    large = {encode_member(f"r-{at}", b'{"p": "' + b"x" * 400_000 + b'"}', DEADLINE): at for at in range(40)}
    await client.zadd("batch:{pool}:requests", large)
    seen: set[bytes] = set()
    async with queues(any_server.url, "a") as (queue,):
        after = ""
        while True:
            page = await queue.search([], after)
            seen |= {each.member for each in page.found}
            # One bucket of the server's own table, whatever it holds: seven in Valkey, and those that found
            # no room there. Its hash is another in each run; of 40 members 12 have been seen in one.
            assert len(page.found) <= 20
            if not (after := page.after):
                break
        assert seen == set(large)
        page = await queue.lying(Whereabouts.PENDING, 99)
        assert (len(page.found), page.after) == (2, "2")
