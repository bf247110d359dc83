"""`queue copy` keeps the order of requests of sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dispatcher.cli.connection import QueueTarget
from dispatcher.cli.queue import copy_requests
from dispatcher.features.sequences.decisions import (
    SequenceCounters,
    SequenceCounts,
    SequenceTerms,
    TurnGranted,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import LANE, OnError, Turn
from dispatcher.queue.contract import Lease, Release, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.found_request import RequestLocation
from dispatcher.requests.request import Request, encode_member, parse_member
from dispatcher.requests.submission import Submission
from tests.queue.factories import OwnerAndAdmin, claim, queues
from tests.queue.servers import ENGINES, Server, server

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
LATER = int(time.time()) + 86_400
TERMS = SequenceTerms(gap_s=0.3)


@pytest.fixture
async def source_and_target(tmp_path: Path) -> AsyncIterator[tuple[OwnerAndAdmin, OwnerAndAdmin, Server]]:
    """Return the source and the target of the copy."""
    with server(ENGINES[-1], tmp_path / "source") as near, server(ENGINES[-1], tmp_path / "target") as far:
        async with (
            queues(near.url, "owner", names=NAMES) as (source,),
            queues(far.url, "owner", names=NAMES) as (target,),
        ):
            yield source, target, far


async def submit_requests(queue: OwnerAndAdmin, *turns: Turn, first: int = 0) -> None:
    """Submit requests with the ids `<sequence>.<number>`, and later deadlines for later numbers."""
    for number, turn in enumerate(turns, first):
        until = LATER + number
        member = encode_member(f"{turn.id}.{number}", b"{}", until, extra=turn)
        await queue.submit([Submission(member, until)])


async def claim_turns(queue: OwnerAndAdmin) -> list[tuple[str, Lease, Turn]]:
    """Claim all claimable requests and check their turns. Return the leases whose turn it is, by id."""
    turns = []
    for lease in (await claim(queue)).leases:
        request = parse_member(lease.member)
        assert isinstance(request, Request)
        assert request.extra is not None
        turns.append((request.id, lease, request.extra))
    said = await queue.claim_turns([(lease, turn) for _, lease, turn in turns], TERMS)
    return [
        one for one, verdict in zip(turns, said.decisions, strict=True) if isinstance(verdict, TurnGranted)
    ]


async def settle(
    queue: OwnerAndAdmin, claimed: list[tuple[str, Lease, Turn]], *, failed: bool = False
) -> None:
    await queue.settle(
        [
            Settlement(lease, b'{"id":"%s","payload":""}' % name.encode(), "", extra=TurnEnd(turn, failed))
            for name, lease, turn in claimed
        ]
    )


async def serve_all(queue: OwnerAndAdmin, most_s: float = 5.0) -> list[str]:
    """Answer requests until none waits. Return their ids in the order of sending."""
    order: list[str] = []
    until = time.monotonic() + most_s
    while (await queue.count_requests()).pending:
        assert time.monotonic() < until, f"no request can be sent: {order}"
        await queue.sweep()
        some = await claim_turns(queue)
        order += [name for name, _, _ in some]
        await settle(queue, some)
        await asyncio.sleep(0.01)
    return order


async def test_copied_requests_of_sequences_keep_their_order(
    source_and_target: tuple[OwnerAndAdmin, OwnerAndAdmin, Server],
) -> None:
    """The first has been answered, one was given back when its dispatcher stopped, the others wait, and
    of the last no dispatcher knew. Those with an index wait for what went before the copy, for one gap."""
    source, target, far = source_and_target
    await submit_requests(source, *(Turn("a", index) for index in range(5)))
    await submit_requests(source, *(Turn("b") for _ in range(5)))
    await settle(source, await claim_turns(source))
    heads = await claim_turns(source)
    assert sorted(name for name, _, _ in heads) == ["a.1", "b.1"]
    await source.release([Release(lease) for _, lease, _ in heads])
    await submit_requests(source, Turn("a", 5), first=5)
    await submit_requests(source, Turn("b"), first=5)
    await source.pause("ann", "moving")
    found = await copy_requests(source.queue_admin, QueueTarget(far.url, NAMES), live=False)
    assert found is not None
    places, added, leased = found
    assert (places[LANE], places[RequestLocation.RETURNED]) == (6, 2)
    assert (added, leased) == (10, 0)

    began = time.monotonic()
    first = await claim_turns(target)
    assert [name for name, _, _ in first] == ["b.1"]
    await settle(target, first)
    order = await serve_all(target)
    assert [name for name in order if name[0] == "b"] == [f"b.{n}" for n in range(2, 6)]
    assert [name for name in order if name[0] == "a"] == [f"a.{n}" for n in range(1, 6)]
    assert time.monotonic() - began >= TERMS.gap_s, "the sequence waited for index 0"
    assert (await target.count_requests()).of(SequenceCounters).gaps == 1
    again = await copy_requests(source.queue_admin, QueueTarget(far.url, NAMES), live=False)
    assert again is not None
    assert again[1] == 0, "each request is copied once"


async def test_clients_continue_their_sequences_at_the_other_redis(
    source_and_target: tuple[OwnerAndAdmin, OwnerAndAdmin, Server],
) -> None:
    source, target, far = source_and_target
    secret = await source.get_or_create_sequence_secret()
    await source.pause("ann", "moving")
    await copy_requests(source.queue_admin, QueueTarget(far.url, NAMES), live=False)
    assert await target.get_or_create_sequence_secret() == secret


async def test_held_state_of_a_sequence_is_not_copied(
    source_and_target: tuple[OwnerAndAdmin, OwnerAndAdmin, Server],
) -> None:
    """docs/how-to/operations.md says that a held sequence is not held at the other Redis."""
    source, target, far = source_and_target
    await submit_requests(source, Turn("a", 0, on_error=OnError.HOLD), Turn("a", 1))
    await settle(source, await claim_turns(source), failed=True)
    assert (await source.count_requests()).of(SequenceCounts).held == 1
    await source.pause("ann", "moving")
    await copy_requests(source.queue_admin, QueueTarget(far.url, NAMES), live=False)
    assert await serve_all(target) == ["a.1"]
    assert (await target.count_requests()).of(SequenceCounts).held == 0
