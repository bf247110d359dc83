"""Steps that tests of sequences share: claim requests, ask for their turns and end them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.sequences.decisions import SequenceTerms, TurnDecision, TurnEnd, TurnGranted, TurnWaits
from dispatcher.core.sequences.turns import SequenceSnapshot, Turn
from dispatcher.ports import Lease, Queue, Settlement, SettleStatus
from tests.conformance.worlds import NOW, World, answer, claim

TERMS = SequenceTerms(max_idle_s=1000, max_age_s=5000, gap_s=500)
NOBODY = Lease(0, "", b"", 0, 0, 0, 0, 0)
LATER = NOW + 3600


def turn_of(lease: Lease) -> Turn:
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    assert request.sequence is not None
    return request.sequence


def name_of(lease: Lease) -> str:
    request = parse_member(lease.member)
    assert isinstance(request, Request)
    return request.id


async def lined_up(
    queue: Queue, leases: Sequence[Lease], terms: SequenceTerms = TERMS
) -> Sequence[TurnDecision]:
    return (await queue.claim_turns([(lease, turn_of(lease)) for lease in leases], terms)).decisions


async def take(
    queue: Queue, terms: SequenceTerms = TERMS, most: int = 100
) -> tuple[dict[str, Lease], dict[str, TurnDecision]]:
    """Claim requests and ask for their turns. Return the leases that are left, and the verdicts by id."""
    leases = await claim(queue, most)
    said = dict(zip(map(name_of, leases), await lined_up(queue, leases, terms), strict=True))
    return {name_of(one): one for one in leases if not isinstance(said[name_of(one)], TurnWaits)}, said


async def goes(queue: Queue, terms: SequenceTerms = TERMS) -> Lease:
    """Return the lease of the only request that goes now."""
    left, said = await take(queue, terms)
    (lease,) = left.values()
    assert isinstance(said[name_of(lease)], TurnGranted), said
    return lease


async def done(queue: Queue, lease: Lease, **left: Any) -> None:
    end = TurnEnd(turn_of(lease), **left)
    result = msgspec.json.encode({"id": name_of(lease), "code": "failed" if end.has_failed else "done"})
    assert await queue.settle([answer(lease, result).copy_with(turn_end=end)]) == [SettleStatus.DONE]


async def fail(queue: Queue, lease: Lease) -> None:
    await done(queue, lease, has_failed=True, cause=f"{name_of(lease)}: it broke")


async def serve_unserved(queue: Queue) -> dict[str, str]:
    """Answer the requests that need no lease. Return the code of each by its id."""
    told = {}
    while found := await queue.find_remaining_requests(2):
        items = []
        for one in found:
            request = parse_member(one.request.member)
            assert isinstance(request, Request)
            told[request.id] = one.error_code.value
            result = msgspec.json.encode({"id": request.id, "code": one.error_code, "why": one.message})
            items.append((one.request, Settlement(NOBODY, result, "")))
        assert await queue.settle_unleased(items) == len(items)
    return told


async def seen(world: World, name: str = "s") -> SequenceSnapshot:
    found = await world.desk.get_sequence(name)
    assert found is not None
    return found
