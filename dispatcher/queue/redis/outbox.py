"""On a Cluster: results for lists in other slots, carried there from the outbox in the queue's own."""

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
"""Longer than any result may wait in the outbox after its push, for the marker is what prevents a second."""
_MOST = 100
_AWAY_S = 5.0
"""A list that could not be reached is left alone for so long: trying takes time that its neighbours need."""


class Outbox:
    """Carries each result over exactly once, whoever else carries at the same time.

    Numbers rise, every carrier goes in their order and removes a result only after its push; so a marker with
    the newest number pushed, in the list's own slot, tells for each one whether it was.
    """

    def __init__(self, backend: Backend, ttl_s: int) -> None:
        self._backend = backend
        self._scripts = backend.scripts
        self._names = backend.names
        self._ttl_s = ttl_s
        self._away: dict[bytes, float] = {}

    def reaches(self, name: bytes) -> bool:
        """Whether there can be a marker in that list's slot: not with a stray brace in its name."""
        return key_slot(self._marker(name)) == key_slot(name)

    @property
    def waits(self) -> bool:
        """A list is away, so that carrying means to pass over what waits for it: the sweep does, at times."""
        return bool(self._away)

    async def carry(self) -> None:
        """Carry over what is there. A list whose node is away waits, alone; its results are safe here.

        Raises QueueUnavailableError where the outbox itself cannot be read.
        """
        now = asyncio.get_running_loop().time()
        self._away = {name: until for name, until in self._away.items() if until > now}
        after = "-inf"
        while found := await self._read(after):
            lists: dict[bytes, list[tuple[bytes, bytes, bytes]]] = defaultdict(list)
            for element in found:
                number, list_name, result = _parse(element)
                lists[list_name].append((number, result, element))
                after = f"({number.decode()}"
            reachable = [item for item in lists.items() if item[0] not in self._away]
            await asyncio.gather(*(self._try(name, results) for name, results in reachable))

    async def _try(self, name: bytes, results: Sequence[tuple[bytes, bytes, bytes]]) -> None:
        try:
            await self._deliver(name, results)
        except QueueUnavailableError as error:
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
            marker = self._marker(default, b":for:" + name)
            if name == default or not await self._push(default, marker, pushes):
                raise QueueUnavailableError(f"{self._names.results} is no list: results have no place to go")
        elements = [element for _, _, element in results]

        async def remove() -> None:
            await self._scripts.client.zrem(self._names.outbox, *elements)

        await self._scripts.attempt(remove)

    async def _push(self, name: bytes, marker: bytes, pushes: Sequence[tuple[bytes, bytes]]) -> bool:
        """False where the list cannot have them, ever: it is none, or this user may not touch it."""
        lives = {"ttl_s": self._ttl_s, "marker_s": _MARKER_TTL_S}
        try:
            return await script_calls.push(self._backend, name, marker, pushes, **lives)
        except ForbiddenError:
            if await self._may_touch(name):
                raise  # it is the marker, or a command: the operator's to mend
            return False

    async def _may_touch(self, name: bytes) -> bool:
        try:
            await self._scripts.attempt(lambda: self._scripts.client.type(name))
        except ForbiddenError:
            return False
        return True

    def _marker(self, name: bytes, suffix: bytes = b"") -> bytes:
        own = b":posted:" + self._names.queue.encode().replace(b"{", b"").replace(b"}", b"") + suffix
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
