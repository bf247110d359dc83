"""Steps that tests of sequences share: claim requests, ask for their turns and end them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dispatcher.core.requests.request import Request, parse
from dispatcher.core.sequences.decisions import Goes, SequenceTerms, TurnEnd, Verdict, Waits
from dispatcher.core.sequences.turns import SequenceSeen, Turn
from dispatcher.ports import Lease, Queue, Settled, Settlement
from tests.conformance.worlds import NOW, World, answer, claim

TERMS = SequenceTerms(max_idle_s=1000, max_age_s=5000, gap_s=500)
NOBODY = Lease(0, "", b"", 0, 0, 0, 0, 0)
LATER = NOW + 3600


def turn_of(lease: Lease) -> Turn:
    request = parse(lease.member)
    assert isinstance(request, Request)
    assert request.sequence is not None
    return request.sequence


def name_of(lease: Lease) -> str:
    request = parse(lease.member)
    assert isinstance(request, Request)
    return request.id


async def lined_up(queue: Queue, leases: Sequence[Lease], terms: SequenceTerms = TERMS) -> Sequence[Verdict]:
    return (await queue.line_up([(lease, turn_of(lease)) for lease in leases], terms)).verdicts


async def take(
    queue: Queue, terms: SequenceTerms = TERMS, most: int = 100
) -> tuple[dict[str, Lease], dict[str, Verdict]]:
    """Claim requests and ask for their turns. Return the leases that are left, and the verdicts by id."""
    leases = await claim(queue, most)
    said = dict(zip(map(name_of, leases), await lined_up(queue, leases, terms), strict=True))
    return {name_of(one): one for one in leases if not isinstance(said[name_of(one)], Waits)}, said


async def goes(queue: Queue, terms: SequenceTerms = TERMS) -> Lease:
    """Return the lease of the only request that goes now."""
    left, said = await take(queue, terms)
    (lease,) = left.values()
    assert isinstance(said[name_of(lease)], Goes), said
    return lease


async def done(queue: Queue, lease: Lease, **left: Any) -> None:
    end = TurnEnd(turn_of(lease), **left)
    result = msgspec.json.encode({"id": name_of(lease), "code": "failed" if end.failed else "done"})
    assert await queue.settle([answer(lease, result).but(turn=end)]) == [Settled.DONE]


async def fail(queue: Queue, lease: Lease) -> None:
    await done(queue, lease, failed=True, cause=f"{name_of(lease)}: it broke")


async def serve_unserved(queue: Queue) -> dict[str, str]:
    """Answer the requests that need no lease. Return the code of each by its id."""
    told = {}
    while found := await queue.unserved(2):
        items = []
        for one in found:
            request = parse(one.item.member)
            assert isinstance(request, Request)
            told[request.id] = one.code.value
            result = msgspec.json.encode({"id": request.id, "code": one.code, "why": one.why})
            items.append((one.item, Settlement(NOBODY, result, "")))
        assert await queue.expire(items) == len(items)
    return told


async def seen(world: World, name: str = "s") -> SequenceSeen:
    found = await world.desk.sequence(name)
    assert found is not None
    return found
