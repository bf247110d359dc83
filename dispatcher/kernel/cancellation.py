"""Stage that ends requests whose result nobody wants or can get: cancelled ones, and those that name a result
list that cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from dispatcher.kernel import completions

if TYPE_CHECKING:
    from dispatcher.kernel.claimed_request import ClaimedRequest
    from dispatcher.kernel.context import KernelContext


class CancellationCheck:
    """Checks the claimed requests of one process."""

    def __init__(self, context: KernelContext) -> None:
        self._access = context.access
        self._context = context

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
                self._context.complete(completions.build_cancellation(lease, request))
            elif claimed.result_list_problem is not None:
                self._context.complete(
                    completions.build_invalid_list_error(lease, request, claimed.result_list_problem)
                )
            elif claimed.is_cancelled is None:  # its marker could not be read
                self._context.complete(
                    completions.build_return(lease, after_s=self._access.get_marker_retry_delay())
                )
            else:
                continuing.append(claimed)
        return continuing
