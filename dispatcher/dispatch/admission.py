"""First stage: admits claimed requests that are valid, in time, have not waited for longer than their rule
allows, and are not likely to kill their owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dispatcher.core.gateway.outcome import RetryPolicy, decide_after_deaths
from dispatcher.core.requests.request import Rejection, Request, parse_member
from dispatcher.core.sequences.overrides import name_override
from dispatcher.dispatch import completions
from dispatcher.dispatch.claimed_request import ClaimedLeases, ClaimedRequest

if TYPE_CHECKING:
    from dispatcher.dispatch.completions import Completion
    from dispatcher.dispatch.in_flight import InFlightTable
    from dispatcher.dispatch.options import Options
    from dispatcher.dispatch.parsed_requests import ParsedRequestCache
    from dispatcher.dispatch.queue_timeouts import QueueTimeouts
    from dispatcher.ports import Lease, Queue

LARGE_MEMBER_BYTES = 65_536
"""Longest member that is kept beside its parsed request, which holds the payload once more."""


class Admission:
    """Admits the requests of one process. `complete` takes completions of requests that are not admitted.

    `parsed_requests` has the requests that were parsed before and returned to the queue.
    """

    def __init__(
        self,
        queue: Queue,
        in_flight: InFlightTable,
        parsed_requests: ParsedRequestCache,
        timeouts: QueueTimeouts,
        options: Options,
        complete: Callable[[Completion], None],
    ) -> None:
        self._queue = queue
        self._in_flight = in_flight
        self._parsed_requests = parsed_requests
        self._timeouts = timeouts
        self._options = options
        self._complete = complete

    def reconfigure(self, options: Options) -> None:
        self._options = options

    def admit_leases(self, claimed: ClaimedLeases) -> list[ClaimedRequest]:
        """Add the leases to the table, and return the requests that are admitted."""
        admitted: list[ClaimedRequest] = []
        max_bytes, retry, unix_now = (
            self._options.max_payload_bytes,
            self._options.retry,
            self._queue.unix_now(),
        )
        terms = self._options.sequences.terms
        timeouts = None if self._timeouts.is_empty else self._timeouts
        for number, lease in enumerate(claimed.leases):
            known = self._parsed_requests.take_request(lease, max_bytes)
            parsed = known.request if known else parse_member(lease.member, max_payload_bytes=max_bytes)
            if terms.overrides and isinstance(parsed, Request):
                parsed = name_override(parsed, terms, self._options.default_path)
            checked = check_request(lease, parsed, unix_now, retry)
            # A generation that was started in slices does not wait any more.
            if timeouts is not None and not lease.progress and isinstance(checked, Request):
                checked = timeouts.check_wait(lease, checked, unix_now) or checked
            if not isinstance(checked, Request):
                request = parsed if isinstance(parsed, Request) else None
                self._in_flight.add_lease(lease, claimed.asked_at, request, is_probe=claimed.is_probe)
                self._complete(checked)
                continue
            # The payload is in the request already: do not keep large bytes twice while the request runs.
            kept = lease if len(lease.member) <= LARGE_MEMBER_BYTES else lease.copy_with(member=b"")
            entry = self._in_flight.add_lease(kept, claimed.asked_at, checked, is_probe=claimed.is_probe)
            turn = claimed.granted_turns[number] if claimed.granted_turns else None
            admitted.append(ClaimedRequest(entry, checked, known.generation if known else None, turn=turn))
        return admitted


def check_request(
    lease: Lease, parsed: Request | Rejection, unix_now: float, policy: RetryPolicy
) -> Request | Completion:
    """Return the request if it is admitted, else its completion.

    The checks are in the order of what the consumer of the result should learn first.
    """
    if isinstance(parsed, Rejection):
        return completions.build_rejection(lease, parsed)
    if (decision := decide_after_deaths(lease.deaths_as_suspect, policy)) is not None:
        return completions.build_dead_letter_after_deaths(lease, parsed, decision)
    if parsed.deadline <= unix_now:
        return completions.build_deadline_error(lease, parsed)
    return parsed
