"""Delivery of results on a Cluster to lists in other slots. They wait in an outbox in the slot of the
queue."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from redis.crc import key_slot

from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import PermissionDeniedError
from dispatcher.queue.redis.steps.outbox import push_results, read_outbox
from dispatcher.requests.result import decode_result, encode_bad_list
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.telemetry.events import Event, emit

_MARKER_TTL_S = 604_800
"""Lifetime of a marker in seconds. It is longer than any result may stay in the outbox after its push,
because the marker prevents a second push."""
_MAX_ELEMENTS = 100
_UNREACHABLE_S = 5.0
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
        self._unreachable_until: dict[bytes, float] = {}

    def can_deliver_to(self, name: bytes) -> bool:
        """Return whether a marker can be in the slot of the list. It cannot if there is a stray brace in the
        name."""
        return key_slot(self._build_marker_key(name)) == key_slot(name)

    @property
    def has_unreachable_list(self) -> bool:
        """True if a result list is unreachable. Each delivery then skips the results for it, and the sweep
        tries again from time to time."""
        return bool(self._unreachable_until)

    async def deliver_pending(self) -> None:
        """Deliver all results in the outbox. Results for an unreachable list stay here and hold up no others.

        Raises QueueUnavailableError if the outbox cannot be read.
        """
        now = asyncio.get_running_loop().time()
        self._unreachable_until = {
            name: until for name, until in self._unreachable_until.items() if until > now
        }
        after = "-inf"
        while found := await read_outbox(self._backend, after, _MAX_ELEMENTS):
            lists: dict[bytes, list[tuple[bytes, bytes, bytes]]] = defaultdict(list)
            for element in found:
                number, list_name, result = _parse_element(element)
                lists[list_name].append((number, result, element))
                # Results for an unreachable list stay in the outbox, so the next page begins after this
                # number.
                after = f"({number.decode()}"
            reachable = [item for item in lists.items() if item[0] not in self._unreachable_until]
            await asyncio.gather(*(self._try_deliver(name, results) for name, results in reachable))

    async def _try_deliver(self, name: bytes, results: Sequence[tuple[bytes, bytes, bytes]]) -> None:
        try:
            await self._deliver_list(name, results)
        except QueueUnavailableError as error:  # the results are safe in the outbox
            self._unreachable_until[name] = asyncio.get_running_loop().time() + _UNREACHABLE_S
            shown = name.decode(errors="replace")
            emit(Event.RESULT_LIST_UNREACHABLE, list=shown, waiting=len(results), why=str(error))

    async def _deliver_list(self, name: bytes, results: Sequence[tuple[bytes, bytes, bytes]]) -> None:
        pushes = [(number, result) for number, result, _ in results]
        if not await self._push_results(name, self._build_marker_key(name), pushes):
            default = self._names.result_list.encode()
            pushes = [(number, _build_invalid_list_result(name, result)) for number, result, _ in results]
            # A marker of its own: the numbers of this list may be lower than those that the default list has.
            marker = self._build_marker_key(default, b":for:" + name)
            if name == default or not await self._push_results(default, marker, pushes):
                raise QueueUnavailableError(
                    f"{self._names.result_list} is not a list: results cannot be delivered"
                )
        elements = [element for _, _, element in results]

        # Removed only after the push: a crash in between repeats the push, which the marker then ignores.
        async def remove_elements() -> None:
            await self._scripts.client.zrem(self._names.outbox_key, *elements)

        await self._scripts.call_with_retries(remove_elements)

    async def _push_results(self, name: bytes, marker: bytes, pushes: Sequence[tuple[bytes, bytes]]) -> bool:
        """Push results. Return False if the list can never take them: it is not a list, or this user may not
        write to it."""
        try:
            return await push_results(
                self._backend, name, marker, pushes, ttl_s=self._ttl_s, marker_ttl_s=_MARKER_TTL_S
            )
        except PermissionDeniedError:
            if await self._has_access(name):
                raise  # the marker or a command is forbidden, which the operator has to change
            return False

    async def _has_access(self, name: bytes) -> bool:
        try:
            await self._scripts.call_with_retries(lambda: self._scripts.client.type(name))
        except PermissionDeniedError:
            return False
        return True

    def _build_marker_key(self, name: bytes, suffix: bytes = b"") -> bytes:
        own = b":posted:" + self._names.queue.encode().replace(b"{", b"").replace(b"}", b"") + suffix
        # A name without a hash tag becomes the tag, so that the marker is in the slot of the list.
        tagged = name if key_slot(name + b":") == key_slot(name) else b"{" + name + b"}"
        return tagged + own


def _parse_element(element: bytes) -> tuple[bytes, bytes, bytes]:
    number, length, rest = element.split(b"\n", 2)
    return number, rest[: int(length)], rest[int(length) :]


def _build_invalid_list_result(name: bytes, result: bytes) -> bytes:
    decoded = decode_result(result)
    return encode_bad_list(decoded.id, name.decode(errors="replace"), token=decoded.request_token or "")
