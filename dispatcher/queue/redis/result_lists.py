"""Check of the result lists that producers name, before the work for their requests is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from dispatcher.queue.keys import encode_key
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.outbox import Outbox
from dispatcher.requests.result import NOT_A_LIST
from dispatcher.requests.submission import QueueUnavailableError

_VALID_S = 60.0
"""Seconds for which a valid list is not checked again."""
_MAX_REMEMBERED = 10_000


class ResultListChecker:
    """Knows which lists are valid. On a Cluster, only lists in the slot of the queue can be checked."""

    def __init__(self, backend: Backend, outbox: Outbox) -> None:
        self._backend = backend
        self._outbox = outbox
        self._valid_until: dict[str, float] = {}
        """Time until which each list counts as valid."""

    def find_problem(self, name: str) -> str | None:
        """Return why no result may be pushed to a list, as the end of a sentence. `None` if it may, as far as
        is known without a call to the server."""
        why = self._backend.names.find_list_problem(name)
        if why is None and self._backend.scripts.is_cluster:
            key = encode_key(name)
            if self._backend.is_in_other_slot(key) and not self._outbox.can_deliver_to(key):
                return NOT_A_LIST
        return why

    async def find_invalid_lists(self, names: Iterable[str]) -> dict[str, str]:
        """Return the invalid lists, each with the reason. A list that cannot be checked now counts as valid:
        the write will find out."""
        problems: dict[str, str] = {}
        unknown: list[str] = []
        now = asyncio.get_running_loop().time()
        for name in names:
            if (why := self.find_problem(name)) is not None:
                problems[name] = why
            elif self._valid_until.get(name, now) <= now and not self._backend.is_in_other_slot(
                encode_key(name)
            ):
                unknown.append(name)
        if unknown:
            problems |= dict.fromkeys(await self._ask_invalid_lists(unknown, now + _VALID_S), NOT_A_LIST)
        return problems

    async def _ask_invalid_lists(self, names: Sequence[str], until: float) -> list[str]:
        try:
            reply = await self._backend.run_script(
                "check_result_lists",
                {"lists": [encode_key(name) for name in names]},
                keys={"PENDING": self._backend.names.queue},
            )
        except QueueUnavailableError:
            return []
        # Producers choose the names, so their number has a bound.
        if len(self._valid_until) > _MAX_REMEMBERED:
            self._valid_until.clear()
        invalid = [name for name, is_unusable in zip(names, reply.value, strict=True) if is_unusable]
        self._valid_until |= dict.fromkeys(set(names).difference(invalid), until)
        return invalid
