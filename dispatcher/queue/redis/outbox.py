"""Delivery of results on a Cluster to lists in other slots. They wait in an outbox in the slot of the
queue."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from redis.crc import key_slot

from dispatcher.core.requests.result import decode_result, misdirected
from dispatcher.ports import QueueUnavailableError
from dispatcher.queue.redis import script_calls
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import SCRIPT_BYTES, Argument, ForbiddenError
from dispatcher.telemetry.events import Event, emit

_MARKER_TTL_S = 604_800
"""Lifetime of a marker in seconds. It is longer than any result may stay in the outbox after its push,
because the marker prevents a second push."""
_MOST = 100
_AWAY_S = 5.0
"""Seconds for which a list is skipped after it could not be reached. Each try takes time that other lists
need."""


class Outbox:
    """Delivers each result exactly once, even if several dispatchers deliver at the same time.

    The numbers of results only rise. Every dispatcher delivers in their order and removes a result only after
    its push. So a marker in the slot of the list, with the newest pushed number, shows for each result
    whether it was pushed.
    """

    def __init__(self, backend: Backend, ttl_s: int) -> None:
        self._backend = backend
        self._scripts = backend.scripts
        self._names = backend.names
        self._ttl_s = ttl_s
        self._away: dict[bytes, float] = {}

    def reaches(self, name: bytes) -> bool:
        """Return whether a marker can be in the slot of the list. It cannot if there is a stray brace in the
        name."""
        return key_slot(self._marker(name)) == key_slot(name)

    @property
    def waits(self) -> bool:
        """True if a list is unreachable, so that each delivery has to skip the results for it. The sweep does
        that at times."""
        return bool(self._away)

    async def carry(self) -> None:
        """Deliver all results in the outbox. Results for an unreachable list stay here and hold up no others.

        Raises QueueUnavailableError if the outbox cannot be read.
        """
        now = asyncio.get_running_loop().time()
        self._away = {name: until for name, until in self._away.items() if until > now}
        after = "-inf"
        while found := await self._read(after):
            lists: dict[bytes, list[tuple[bytes, bytes, bytes]]] = defaultdict(list)
            for element in found:
                number, list_name, result = _parse(element)
                lists[list_name].append((number, result, element))
                # Results for an unreachable list stay in the outbox, so the next page begins after this
                # number.
                after = f"({number.decode()}"
            reachable = [item for item in lists.items() if item[0] not in self._away]
            await asyncio.gather(*(self._try(name, results) for name, results in reachable))

    async def _try(self, name: bytes, results: Sequence[tuple[bytes, bytes, bytes]]) -> None:
        try:
            await self._deliver(name, results)
        except QueueUnavailableError as error:  # the results are safe in the outbox
            self._away[name] = asyncio.get_running_loop().time() + _AWAY_S
            shown = name.decode(errors="replace")
            emit(Event.RESULT_LIST_AWAY, list=shown, waiting=len(results), why=str(error))

    async def _read(self, after: str) -> Sequence[bytes]:
        return await posted(self._backend, after, _MOST)

    async def _deliver(self, name: bytes, results: Sequence[tuple[bytes, bytes, bytes]]) -> None:
        pushes = [(number, result) for number, result, _ in results]
        if not await self._push(name, self._marker(name), pushes):
            default = self._names.results.encode()
            pushes = [(number, _refused(name, result)) for number, result, _ in results]
            # A marker of its own: the numbers of this list may be lower than those that the default list has.
            marker = self._marker(default, b":for:" + name)
            if name == default or not await self._push(default, marker, pushes):
                raise QueueUnavailableError(f"{self._names.results} is no list: results have no place to go")
        elements = [element for _, _, element in results]

        # Removed only after the push: a crash in between repeats the push, which the marker then ignores.
        async def remove() -> None:
            await self._scripts.client.zrem(self._names.outbox, *elements)

        await self._scripts.attempt(remove)

    async def _push(self, name: bytes, marker: bytes, pushes: Sequence[tuple[bytes, bytes]]) -> bool:
        """Push results. Return False if the list can never take them: it is no list, or this user may not
        write to it."""
        lives = {"ttl_s": self._ttl_s, "marker_s": _MARKER_TTL_S}
        try:
            return await script_calls.push(self._backend, name, marker, pushes, **lives)
        except ForbiddenError:
            if await self._may_touch(name):
                raise  # the marker or a command is forbidden, which the operator has to change
            return False

    async def _may_touch(self, name: bytes) -> bool:
        try:
            await self._scripts.attempt(lambda: self._scripts.client.type(name))
        except ForbiddenError:
            return False
        return True

    def _marker(self, name: bytes, suffix: bytes = b"") -> bytes:
        own = b":posted:" + self._names.queue.encode().replace(b"{", b"").replace(b"}", b"") + suffix
        # A name without a hash tag becomes the tag, so that the marker is in the slot of the list.
        tagged = name if key_slot(name + b":") == key_slot(name) else b"{" + name + b"}"
        return tagged + own


async def posted(backend: Backend, after: str, most: int) -> Sequence[bytes]:
    """Return the next elements of the outbox: at most a megabyte, or one element if it is larger."""
    args: list[Argument] = [after, most, SCRIPT_BYTES]
    found: Sequence[bytes] = (await backend.scripts.run("posted", [backend.names.outbox], args)).value
    return found


def _parse(element: bytes) -> tuple[bytes, bytes, bytes]:
    number, length, rest = element.split(b"\n", 2)
    return number, rest[: int(length)], rest[int(length) :]


def _refused(name: bytes, result: bytes) -> bytes:
    told = decode_result(result)
    return misdirected(told.id, name.decode(errors="replace"), token=told.request_token or "")
