"""Who knows what every request was promised, and judges by what lies in the lists at the end.

Callers submit requests, and record what was acknowledged. `judge` compares the record with the result lists
and uses no other source. What a server may forget when it dies (docs/reference/queue-contract.md, "What Redis
itself may lose") is recognized by time: a request that was neither submitted nor answered in a `Gap` must not
be missing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from redis import RedisError

from dispatcher.client import BatchClient, BatchError, Handle
from dispatcher.core.requests.request import encode_member
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.scripts import Client as RedisClient
from tests.support import wait_until

Kind = Literal["plain", "refused", "failing", "cancelled"]
"""`refused`: the gateway answers it with 429 for ever; `failing`: with 500; `cancelled`: nobody wants it."""
_REFUSED = 0.05
"""Of the first tenth of the requests: a pool that is always refused something is never filled."""
_FAILING = 0.05
_CANCELLED = 0.02
CALLERS = 5
_AGAIN_S = 0.5
"""After a submission that was refused, or not answered."""

_ENDS: Mapping[Kind, frozenset[str]] = {
    # Resets and refusals of a bad day may use up the tries of any request.
    "plain": frozenset({"200", "RETRIES_EXHAUSTED"}),
    "refused": frozenset({"DEADLINE_EXCEEDED"}),
    "failing": frozenset({"RETRIES_EXHAUSTED", "DEADLINE_EXCEEDED"}),
    "cancelled": frozenset({"200", "RETRIES_EXHAUSTED", "CANCELLED"}),
}


@dataclass
class Accepted:
    """A request in the book."""

    id: str
    list: str
    payload: str
    kind: Kind
    certain: bool = True
    """False: whether it was accepted is not known, for no reply came. It may have one result, or none."""
    at: float = 0.0
    """When the reply to its submission came."""


@dataclass(frozen=True)
class Gap:
    """From when to when acknowledged writes may be forgotten: CLOCK_MONOTONIC."""

    since: float
    until: float

    def __contains__(self, at: float) -> bool:
        return self.since <= at <= self.until


@dataclass
class Verdict:
    """Ids by what is wrong with them; all empty: nothing is."""

    once: int = 0
    missing: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    misdelivered: list[str] = field(default_factory=list)
    """In a list that is not the caller's, or an id that nobody submitted."""
    wrong: list[str] = field(default_factory=list)
    """The answer is another request's, or an end that this kind of request cannot have."""
    forgotten: list[str] = field(default_factory=list)
    """Missing, by a server that may forget: allowed."""
    repeated: list[str] = field(default_factory=list)
    """Two of them, by a server that may forget: allowed."""
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def found(self) -> dict[str, list[str]]:
        kinds = ("missing", "twice", "misdelivered", "wrong", "forgotten", "repeated")
        return {kind: getattr(self, kind) for kind in kinds}

    @property
    def faults(self) -> dict[str, list[str]]:
        """What no mode allows."""
        allowed = ("forgotten", "repeated")
        return {kind: ids for kind, ids in self.found.items() if ids and kind not in allowed}


def judge(
    book: Mapping[str, Accepted],
    lists: Mapping[str, Iterable[bytes]],
    gaps: Sequence[Gap] = (),
    served: Mapping[str, Sequence[float]] | None = None,
) -> Verdict:
    """`lists`: what lies in each list. `served`: when the gateway ended each try of a request."""
    verdict = Verdict()
    found: Counter[str] = Counter()
    for name, results in lists.items():
        for raw in results:
            result = json.loads(raw)
            known = book.get(result["id"])
            if known is None or known.list != name:
                verdict.misdelivered.append(f"{result['id']} in {name}")
                continue
            found[known.id] += 1
            end = str(result.get("error_code") or result.get("status_code"))
            verdict.ends[end] += 1
            if end not in _ENDS[known.kind] or (end == "200" and result["payload"] != known.payload):
                verdict.wrong.append(f"{known.id} ({known.kind}): {raw.decode(errors='replace')[:300]}")

    def in_gap(one: Accepted) -> bool:
        touched = [one.at, *(served or {}).get(one.id, ())]
        return any(at in gap for at in touched for gap in gaps)

    for one in book.values():
        times = found[one.id]
        if times == 1:
            verdict.once += 1
        elif times > 1:
            (verdict.repeated if in_gap(one) else verdict.twice).append(one.id)
        elif one.certain:
            (verdict.forgotten if in_gap(one) else verdict.missing).append(one.id)
    return verdict


class Caller:
    """A producer with a result list of its own; or, `foreign`, one that knows `ZADD` and the default list."""

    def __init__(self, name: str, url: str, names: QueueNames, *, foreign: bool, seed: str) -> None:
        self.book: dict[str, Accepted] = {}
        self._name = name
        self._redis: Any = connect(url)
        self._names = names
        options: dict[str, Any] = {"queue": names.queue, "results": names.result_list, "retry_for": 0.0}
        self._client = None if foreign else BatchClient(url, **options)
        self._list = names.result_list if foreign else f"batch-results:{name}"
        self._chance = random.Random(seed)

    async def submit(self, longest_s: float, refused_for_s: float, *, early: bool) -> Handle | None:
        """One request. A handle: its caller will want to cancel it in a moment."""
        chance = self._chance
        kinds: tuple[Kind, ...] = ("refused", "failing", "cancelled", "plain")
        shares = (_REFUSED if early else 0.0, _FAILING, _CANCELLED if self._client is not None else 0.0)
        (drawn,) = chance.choices(kinds, (*shares, 1.0 - sum(shares)))
        kind: Kind = "plain" if drawn == "cancelled" else drawn
        id_ = f"{self._name}-{len(self.book)}"
        how: dict[str, Any] = {"echo": True, "seconds": round(chance.uniform(0.02, longest_s), 3)}
        if kind != "plain":
            how = {"kind": "status", "status": 429 if kind == "refused" else 500, "body": "no"}
        payload = json.dumps({"from": self._name, "id": id_, "salt": chance.random(), "sim": how})
        one = self.book[id_] = Accepted(id_, self._list, payload, kind, certain=False)
        deadline_s = refused_for_s if kind == "refused" else 3600.0
        handle = None
        try:
            if self._client is not None:
                handle = await self._client.enqueue(
                    payload.encode(), deadline=deadline_s, id=id_, results=self._list
                )
            else:
                deadline = int(time.time() + deadline_s)
                member = encode_member(id_, payload.encode(), deadline)
                await self._redis.zadd(self._names.queue, {member: deadline})
            one.certain = True
        except (BatchError, RedisError, OSError):
            pass  # whether it was accepted nobody knows
        one.at = time.monotonic()
        return handle if drawn == "cancelled" else None

    async def cancel_request(self, handle: Handle, after_s: float) -> None:
        assert self._client is not None
        await asyncio.sleep(after_s)
        self.book[handle.id].kind = "cancelled"
        try:
            await self._client.cancel(handle)
        except BatchError:
            return  # it may have been heard all the same

    async def aclose(self) -> None:
        await self._redis.aclose()
        if self._client is not None:
            await self._client.aclose()

    async def call(
        self, count: int, allowed: Callable[[], float], longest_s: float, refused_for_s: float
    ) -> None:
        """Until so many are accepted, as many of them at a time as `allowed` (a share) says by then."""
        accepted = 0

        def now() -> bool:
            return accepted <= count * allowed()

        async with asyncio.TaskGroup() as tasks:
            while accepted < count:
                await wait_until(now, 1200, every_s=0.05)
                handle = await self.submit(longest_s, refused_for_s, early=accepted < count / 10)
                if next(reversed(self.book.values())).certain:
                    accepted += 1
                else:
                    await asyncio.sleep(_AGAIN_S)
                if handle is not None:
                    tasks.create_task(self.cancel_request(handle, self._chance.uniform(0.0, 2.0)))


async def lists_of(redis: RedisClient, names: QueueNames) -> dict[str, list[bytes]]:
    """What lies in every result list, the default one included."""
    client: Any = redis  # redis-py types replies for every protocol at once
    lists = [names.result_list, *(f"batch-results:caller-{number}" for number in range(CALLERS))]
    return {name: await client.lrange(name, 0, -1) for name in lists}
