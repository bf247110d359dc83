"""Data of sequences in Redis: how long it is kept, and how data of an older version is taken over."""

from __future__ import annotations

from typing import cast

import msgspec
import redis
import redis.asyncio

from dispatcher.core.requests.request import encode_member, parse_member
from dispatcher.core.sequences.decisions import (
    SequenceTerms,
    TurnDecision,
    TurnEnd,
    TurnGranted,
    TurnRejected,
)
from dispatcher.core.sequences.turns import Turn
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from tests.queue.made import NAMES, OwnerAndDesk, answer, claim, queues
from tests.queue.servers import Server

NEVER = 4 * 10**9
MINE, THEIRS = "a secret of mine, all mine", "a secret of theirs, theirs"


async def next_turn(queue: OwnerAndDesk, secret: str) -> TurnDecision:
    """Submit one more request and return the verdict on its turn. If it goes, it ends at once."""
    turn = parse_member(encode_member("r", b"{}", NEVER, sequence=Turn("s", secret=secret))).sequence
    assert turn is not None
    await queue.backend.scripts.client.zadd(NAMES.queue, {encode_member("r", b"{}", NEVER, sequence=turn): 1})
    (lease,) = (await claim(queue)).leases
    (verdict,) = (await queue.claim_turns([(lease, turn)], SequenceTerms())).decisions
    end = TurnEnd(turn, conversation=b"[]") if isinstance(verdict, TurnGranted) else None
    await queue.settle([answer(lease).copy_with(turn_end=end)])
    return verdict


async def test_a_sequence_that_an_older_version_wrote_last_is_of_whoever_comes_next(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    """An older version does not write the owner back, because it does not know the field."""
    async with queues(any_server.url, "a") as (queue,):
        assert isinstance(await next_turn(queue, MINE), TurnGranted)
        key = f"{NAMES.queue_prefix}:sequences"
        packed = msgspec.msgpack.decode(cast("bytes", await client.hget(key, "s")))
        await client.hset(key, "s", msgspec.msgpack.encode(packed[:15]))
        verdict = await next_turn(queue, MINE)
        assert isinstance(verdict, TurnGranted)
        assert verdict.conversation == b"[]", "it goes on"
        assert isinstance(await next_turn(queue, THEIRS), TurnRejected)


async def test_a_cancel_is_kept_for_as_long_as_what_it_cancels_may_wait(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    desk, key = RedisQueueAdmin(client, NAMES), f"{NAMES.queue_prefix}:sequences:cancelled:s"
    await desk.cancel_sequence("s", None, 1000.0)
    assert 900 < await client.ttl(key) <= 1000
    await desk.cancel_sequence("s", None, 10.0)
    assert 900 < await client.ttl(key) <= 1000, "the longer one of the two counts"
    await desk.forget_sequence("s")
    assert 900 < await client.ttl(key) <= 1000
    await desk.cancel_sequence("t")
    assert 600_000 < await client.ttl(f"{NAMES.queue_prefix}:sequences:cancelled:t") <= 604_800


def test_no_result_list_is_the_secret_or_a_mark_of_any_queue() -> None:
    for queue in ("batch:{qwen}:requests", "other:{x}"):
        for key in (f"{queue}:sequences:secret", f"{queue}:sequences:cancelled:s"):
            assert NAMES.find_list_problem(key) == "may be a key of a queue"
