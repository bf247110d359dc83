"""First stage: admits claimed requests that are valid, in time, have not waited for longer than their rule
allows, and are not likely to kill their owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dispatcher.kernel import completions
from dispatcher.kernel.claimed_request import ClaimedLeases, ClaimedRequest
from dispatcher.requests.outcomes.judge import decide_after_deaths
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import Rejection, Request, parse_member

if TYPE_CHECKING:
    from dispatcher.kernel.completions import Completion
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.in_flight import InFlightLease
    from dispatcher.kernel.queue_timeouts import QueueTimeouts
    from dispatcher.queue.contract import Lease

LARGE_MEMBER_BYTES = 65_536
"""Longest member that is kept beside its parsed request, which holds the payload once more."""


class Admission:
    """Admits the requests of one process."""

    def __init__(self, context: KernelContext, timeouts: QueueTimeouts) -> None:
        self._context = context
        self._timeouts = timeouts

    def admit_leases(self, claimed: ClaimedLeases, entries: Sequence[InFlightLease]) -> list[ClaimedRequest]:
        """Return the requests that are admitted. `entries` are the claimed leases in the table."""
        admitted: list[ClaimedRequest] = []
        context, unix_now = self._context, self._context.access.queue.unix_now()
        max_bytes, retry = context.options.max_payload_bytes, context.options.retry
        timeouts = None if self._timeouts.is_empty else self._timeouts
        for number, entry in enumerate(entries):
            lease = entry.lease
            known = context.parsed_requests.take_request(lease, max_bytes)
            parsed = known.request if known else parse_member(lease.member, max_payload_bytes=max_bytes)
            if isinstance(parsed, Rejection):
                context.complete(completions.build_rejection(lease, parsed))
                continue
            for rewrite in context.hooks.rewrite_request:
                parsed = rewrite(parsed)
            context.in_flight.set_request(entry, parsed)
            checked = check_request(lease, parsed, unix_now, retry)
            # A request with progress has begun, and does not wait any more.
            if timeouts is not None and not lease.progress and isinstance(checked, Request):
                checked = timeouts.check_wait(lease, checked, unix_now) or checked
            if not isinstance(checked, Request):
                context.complete(checked)
                continue
            # The payload is in the request already: do not keep large bytes twice while the request runs.
            if len(lease.member) > LARGE_MEMBER_BYTES:
                context.in_flight.drop_member(entry)
            extra = claimed.extras[number] if claimed.extras else None
            admitted.append(ClaimedRequest(entry, checked, known.remembered if known else None, extra))
        return admitted


def check_request(
    lease: Lease, request: Request, unix_now: float, policy: RetryPolicy
) -> Request | Completion:
    """Return the request if it is admitted, else its completion.

    The checks are in the order of what the consumer of the result should learn first.
    """
    if (decision := decide_after_deaths(lease.deaths_as_suspect, policy)) is not None:
        return completions.build_dead_letter_after_deaths(lease, request, decision)
    if request.deadline <= unix_now:
        return completions.build_deadline_error(lease, request)
    return request
