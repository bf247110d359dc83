"""How leases of requests of sequences end without being sent."""

from __future__ import annotations

from dispatcher.features.sequences.queue.calls import RemainingRequest
from dispatcher.kernel import completions
from dispatcher.queue.contract import DeadLetter, Lease, Settlement
from dispatcher.requests.request import Rejection, Request, parse_member
from dispatcher.requests.result import ErrorCode


def build_turn_rejection(lease: Lease, request: Request, code: ErrorCode, message: str) -> Settlement:
    """Settle a request that its sequence rejected. The sequence does not know the request, and no turn
    ends."""
    return completions.build_error(lease, request, code, message).copy_with(extra=None)


def build_remaining_error(remaining: RemainingRequest) -> Settlement:
    """Settle a request without a lease whose sequence has ended. The sequence knows that it was not sent."""
    parsed = parse_member(remaining.request.member)
    if isinstance(parsed, Request):
        return build_turn_rejection(completions.NO_LEASE, parsed, remaining.error_code, remaining.message)
    if parsed.id is None:
        return Settlement(completions.NO_LEASE, b"", "")
    refused = Rejection(remaining.error_code, remaining.message, parsed.id, parsed.token, parsed.results)
    completion = completions.build_rejection(completions.NO_LEASE, refused)
    return completion.settlement if isinstance(completion, DeadLetter) else completion
