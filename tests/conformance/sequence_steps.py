"""Steps that tests of sequences share: claim requests, claim their turns and end them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dispatcher.features.sequences.decisions import (
    SequenceTerms,
    TurnDecision,
    TurnGranted,
    TurnWaits,
)
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.queue.steps import decode_granted_turn
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import SequenceSnapshot, Turn
from dispatcher.queue.contract import (
    EndAndClaimResult,
    Lease,
    Queue,
    Settlement,
    SettleStatus,
    UnleasedRequest,
)
from dispatcher.requests.model_names import parse_model
from dispatcher.requests.request import Request, parse_member
from tests.conformance.worlds import NOW, World, answer, claim, member, sequences

TERMS = SequenceTerms(max_idle_s=1000, max_age_s=5000, gap_s=500)
NO_LEASE = Lease(0, "", b"", 0, 0, 0, 0, 0)
LATER = NOW + 360_000


def get_turn(lease: Lease, terms: SequenceTerms = TERMS) -> Turn:
    """Return the turn of a request, with the override for its model."""
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    assert isinstance(request.extra, Turn)
    override = terms.match_override(parse_model(request.payload))
    return msgspec.structs.replace(request.extra, override=override)


def get_granted_turns(reply: EndAndClaimResult) -> list[TurnGranted]:
    """Return the turns that were granted in the step that ended other requests."""
    return [decode_granted_turn(*each) for each in reply.extras]


def get_request_id(lease: Lease) -> str:
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    return request.id


async def submit_turns(
    world: World, name: str, *turns: Any, of: str = "s", deadline: int = LATER, model: str = ""
) -> None:
    """Submit requests <name>-<n> in the order of their scores. A turn is an index, None, or fields of
    `data.sequence`."""
    for at, turn in enumerate(turns):
        fields = turn if isinstance(turn, dict) else {"index": turn}
        data = member(
            f"{name}-{at}", deadline=deadline, sequence={"id": of, **fields}, payload={"model": model}
        )
        await world.zadd(deadline + at * 1e-3, data)


async def claim_turns_of(
    queue: Queue, leases: Sequence[Lease], terms: SequenceTerms = TERMS
) -> Sequence[TurnDecision]:
    return (
        await sequences(queue).claim_turns([(lease, get_turn(lease, terms)) for lease in leases], terms)
    ).decisions


async def claim_and_take_turns(
    queue: Queue, terms: SequenceTerms = TERMS, max_count: int = 100
) -> tuple[dict[str, Lease], dict[str, TurnDecision]]:
    """Claim requests and ask for their turns. Return the leases that are left, and the decisions by id."""
    leases = await claim(queue, max_count)
    decisions = dict(
        zip(map(get_request_id, leases), await claim_turns_of(queue, leases, terms), strict=True)
    )
    return {
        get_request_id(one): one
        for one in leases
        if not isinstance(decisions[get_request_id(one)], TurnWaits)
    }, decisions


async def claim_next_turn(queue: Queue, terms: SequenceTerms = TERMS) -> Lease:
    """Return the lease of the only request that is granted its turn now."""
    left, decisions = await claim_and_take_turns(queue, terms)
    (lease,) = left.values()
    assert isinstance(decisions[get_request_id(lease)], TurnGranted), decisions
    return lease


async def finish_request(queue: Queue, lease: Lease, **left: Any) -> None:
    end = TurnEnd(get_turn(lease), **left)
    result = msgspec.json.encode(
        {"id": get_request_id(lease), "code": "failed" if end.has_failed else "done"}
    )
    assert await queue.settle([answer(lease, result).copy_with(extra=end)]) == [SettleStatus.DONE]


async def fail_request(queue: Queue, lease: Lease) -> None:
    await finish_request(queue, lease, has_failed=True, cause=f"{get_request_id(lease)}: it broke")


async def answer_remaining_requests(queue: Queue) -> dict[str, str]:
    """Answer the requests that need no lease. Return the code of each by its id."""
    reply = {}
    while found := await sequences(queue).find_remaining_requests(2):
        items = []
        for one in found:
            request = parse_member(one.request.member)
            assert isinstance(request, Request)
            reply[request.id] = one.error_code.value
            result = msgspec.json.encode({"id": request.id, "code": one.error_code, "why": one.message})
            items.append((one.request, Settlement(NO_LEASE, result, "")))
        assert await queue.settle_unleased(items) == len(items)
    return reply


async def find_all_overdue(queue: Queue, max_count: int) -> Sequence[UnleasedRequest]:
    """Return all requests that may be past their deadline. The two passes of the search take turns."""
    found = {}
    for _ in range(4):
        for one in await queue.find_overdue(max_count):
            found[one.member] = one
    return list(found.values())


async def expire_waiting_request(queue: Queue, name: str, **left: Any) -> None:
    """End a waiting request as if its deadline had passed."""
    for one in await find_all_overdue(queue, 10):
        request = parse_member(one.member)
        assert isinstance(request, Request)
        if request.id == name:
            assert request.extra is not None
            end = TurnEnd(request.extra, **left)
            result = b'{"id":"%s"}' % name.encode()
            assert await queue.settle_unleased([(one, Settlement(NO_LEASE, result, "", extra=end))]) == 1
            return
    raise AssertionError(f"{name} is not found")


async def get_snapshot(world: World, name: str = "s") -> SequenceSnapshot:
    found = await open_sequences(world.queue_admin).get_sequence(name)
    assert found is not None
    return found
