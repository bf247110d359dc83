"""Keys of sequences in Redis: how long they are kept, and that they are no result lists."""

from __future__ import annotations

import redis
import redis.asyncio

from dispatcher.features.sequences.decisions import (
    SequenceTerms,
    TurnDecision,
    TurnGranted,
)
from dispatcher.features.sequences.queue.calls import SequenceAdminCalls
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import Turn
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.request import encode_member, parse_member
from tests.queue.factories import NAMES, OwnerAndAdmin, answer, claim, queues
from tests.queue.servers import Server

NEVER = 4 * 10**9
MINE, THEIRS = "a secret of mine, all mine", "a secret of theirs, theirs"


async def next_turn(queue: OwnerAndAdmin, secret: str) -> TurnDecision:
    """Submit one more request and return the decision on its turn. If it is granted, the request ends at
    once."""
    turn = parse_member(encode_member("r", b"{}", NEVER, extra=Turn("s", secret=secret))).extra
    assert turn is not None
    await queue.backend.scripts.client.zadd(NAMES.queue, {encode_member("r", b"{}", NEVER, extra=turn): 1})
    (lease,) = (await claim(queue)).leases
    (verdict,) = (await queue.claim_turns([(lease, turn)], SequenceTerms())).decisions
    end = TurnEnd(turn, conversation=b"[]") if isinstance(verdict, TurnGranted) else None
    await queue.settle([answer(lease).copy_with(extra=end)])
    return verdict


async def test_cancel_marker_is_kept_as_long_as_earlier_requests_may_wait(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    calls, key = (
        SequenceAdminCalls(RedisQueueAdmin(client, NAMES)),
        f"{NAMES.queue_prefix}:sequences:cancelled:s",
    )
    await calls.cancel_sequence("s", None, 1000.0)
    assert 900 < await client.ttl(key) <= 1000
    await calls.cancel_sequence("s", None, 10.0)
    assert 900 < await client.ttl(key) <= 1000, "the longer of the two applies"
    await calls.forget_sequence("s")
    assert 900 < await client.ttl(key) <= 1000
    await calls.cancel_sequence("t")
    assert 600_000 < await client.ttl(f"{NAMES.queue_prefix}:sequences:cancelled:t") <= 604_800


async def test_answered_requests_of_a_closed_run_leave_no_record_of_it(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    turns = [Turn("s", index, secret=MINE) for index in range(3)]
    members = [encode_member(f"r-{turn.index}", b"{}", NEVER, extra=turn) for turn in turns]
    keys = [f"{NAMES.queue_prefix}:sequences:{suffix}" for suffix in ("closed-runs", "turns")]
    async with queues(any_server.url, "a") as (queue,):
        await client.zadd(NAMES.queue, {member: at for at, member in enumerate(members)})
        leases = (await claim(queue)).leases
        await queue.claim_turns(list(zip(leases, turns, strict=True)), SequenceTerms())
        end = TurnEnd(turns[0], has_failed=True, cause="it broke")
        await queue.settle([answer(leases[0]).copy_with(extra=end)])
        for left_count in (2, 1):
            assert await client.exists(*keys) == 2
            assert len(await queue.find_remaining_requests(9)) == left_count
            (remaining,) = await queue.find_remaining_requests(1)
            assert await queue.settle_unleased([(remaining.request, answer(leases[0]))]) == 1
        assert await client.exists(*keys) == 0


def test_secret_and_cancel_markers_are_never_result_lists() -> None:
    for queue in ("batch:{qwen}:requests", "other:{x}"):
        for key in (f"{queue}:sequences:secret", f"{queue}:sequences:cancelled:s"):
            assert NAMES.find_list_problem(key) == "may be a key of a queue"
