"""Check of the result lists that producers name, before the work for their requests is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from dispatcher.core.requests.result import NO_LIST
from dispatcher.ports import QueueUnavailableError
from dispatcher.queue.redis import script_calls
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.outbox import Outbox
from dispatcher.queue.redis.script_calls import key_of

_FIT_S = 60.0
"""Seconds for which a valid list is not checked again."""
_MOST = 10_000


class Destinations:
    """Knows which lists are valid. On a Cluster, only lists in the slot of the queue can be checked."""

    def __init__(self, backend: Backend, outbox: Outbox) -> None:
        self._backend = backend
        self._outbox = outbox
        self._fit: dict[str, float] = {}
        """Time until which each list counts as valid."""

    def refused(self, name: str) -> str | None:
        """Return why no result may be pushed to a list, as the end of a sentence. `None` if it may, as far as
        is known without a call to the server."""
        why = self._backend.names.refused_list(name)
        if why is None and self._backend.scripts.is_cluster:
            key = key_of(name)
            if self._backend.elsewhere(key) and not self._outbox.reaches(key):
                return NO_LIST
        return why

    async def all_refused(self, names: Iterable[str]) -> dict[str, str]:
        """Return the invalid lists, each with the reason. A list that cannot be checked now counts as valid:
        the write will find out."""
        refused: dict[str, str] = {}
        unknown: list[str] = []
        now = asyncio.get_running_loop().time()
        for name in names:
            if (why := self.refused(name)) is not None:
                refused[name] = why
            elif self._fit.get(name, now) <= now and not self._backend.elsewhere(key_of(name)):
                unknown.append(name)
        if unknown:
            refused |= dict.fromkeys(await self._unfit(unknown, now + _FIT_S), NO_LIST)
        return refused

    async def _unfit(self, names: Sequence[str], until: float) -> list[str]:
        try:
            unfit = await script_calls.unfit(self._backend, [key_of(name) for name in names])
        except QueueUnavailableError:
            return []
        if len(self._fit) > _MOST:  # producers choose the names, so their number has a bound
            self._fit.clear()
        self._fit.update((name, until) for name, no in zip(names, unfit, strict=True) if not no)
        return [name for name, no in zip(names, unfit, strict=True) if no]
