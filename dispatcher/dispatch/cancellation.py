"""Stage that ends requests whose result nobody wants or can get: cancelled ones, and those that name a result
list that cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dispatcher.dispatch import completions

if TYPE_CHECKING:
    from dispatcher.dispatch.claimed_request import ClaimedRequest
    from dispatcher.dispatch.completions import Completion
    from dispatcher.dispatch.queue_access import QueueAccess


class CancellationCheck:
    """Checks the claimed requests of one process. `complete` takes completions of requests that have
    ended."""

    def __init__(self, access: QueueAccess, complete: Callable[[Completion], None]) -> None:
        self._access = access
        self._complete = complete

    def look_up(self, requests: list[ClaimedRequest]) -> Awaitable[None] | None:
        """Return the call to the queue that these requests need. `None` if they need none.

        A claim does not read cancel markers: one lookup for all claimed requests is cheaper.
        """
        has_tokens, result_lists = False, set()
        for claimed in requests:
            request = claimed.request
            has_tokens = has_tokens or request.token != ""
            if request.results:
                result_lists.add(request.results)
        if not result_lists:
            return self._read_markers(requests) if has_tokens else None
        if not has_tokens:
            return self._check_lists(requests, result_lists)
        return self._read_both(requests, result_lists)

    async def _read_both(self, requests: list[ClaimedRequest], result_lists: set[str]) -> None:
        await asyncio.gather(self._read_markers(requests), self._check_lists(requests, result_lists))

    async def _read_markers(self, requests: list[ClaimedRequest]) -> None:
        flags = await self._access.check_cancelled([claimed.entry for claimed in requests])
        for claimed, is_cancelled in zip(requests, flags, strict=True):
            claimed.is_cancelled = is_cancelled

    async def _check_lists(self, requests: list[ClaimedRequest], result_lists: set[str]) -> None:
        problems = await self._access.queue.find_invalid_result_lists(result_lists)
        if problems:
            for claimed in requests:
                claimed.result_list_problem = problems.get(claimed.request.results)

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        """Return the requests that continue. All others are completed."""
        continuing = []
        for claimed in requests:
            lease, request = claimed.entry.lease, claimed.request
            if claimed.is_cancelled:
                self._complete(completions.build_cancellation(lease, request))
            elif claimed.result_list_problem is not None:
                self._complete(
                    completions.build_invalid_list_error(lease, request, claimed.result_list_problem)
                )
            elif claimed.is_cancelled is None:  # the markers could not be read
                self._complete(completions.build_return(lease))
            else:
                continuing.append(claimed)
        return continuing
