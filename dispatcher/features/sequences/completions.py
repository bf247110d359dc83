"""How requests of sequences end."""

from __future__ import annotations

from dispatcher.common.printable import truncate_text
from dispatcher.features.sequences.queue.calls import RemainingRequest
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import Turn
from dispatcher.kernel import completions
from dispatcher.queue.contract import DeadLetter, Lease, Settlement
from dispatcher.requests.request import Rejection, Request, parse_member
from dispatcher.wire_format import ErrorCode

_MAX_ID_CHARS, _MAX_CAUSE_CHARS = 80, 300
"""Length limits of the request id and of the cause in errors of later requests of a sequence."""


def end_turn(settlement: Settlement, _is_dead_letter: bool = False) -> Settlement:
    """Return the settlement with what the request leaves to its sequence, unless it has that already."""
    turn = settlement.request_extra
    if not isinstance(turn, Turn) or settlement.extra is not None:
        return settlement
    return settlement.copy_with(extra=build_turn_end(settlement, turn))


def build_turn_end(settlement: Settlement, turn: Turn) -> TurnEnd:
    if not settlement.failure:
        return TurnEnd(turn)
    cause = f"request {truncate_text(settlement.request_id, _MAX_ID_CHARS)} has failed: {settlement.failure}"
    return TurnEnd(turn, has_failed=True, cause=truncate_text(cause, _MAX_CAUSE_CHARS))


def build_turn_rejection(lease: Lease, request: Request, code: ErrorCode, message: str) -> Settlement:
    """Settle a request that its sequence rejected. The sequence does not know the request, and no turn
    ends."""
    return completions.build_error(lease, request, code, message).copy_with(request_extra=None)


def build_remaining_error(remaining: RemainingRequest) -> Settlement:
    """Settle a request without a lease whose sequence has ended. The sequence knows that it was not sent."""
    parsed = parse_member(remaining.request.member)
    if isinstance(parsed, Request):
        lease = completions.NO_LEASE.copy_with(progress=remaining.request.progress)
        return build_turn_rejection(lease, parsed, remaining.error_code, remaining.message)
    if parsed.id is None:
        return Settlement(completions.NO_LEASE, b"", "")
    refused = Rejection(remaining.error_code, remaining.message, parsed.id, parsed.token, parsed.results)
    completion = completions.build_rejection(completions.NO_LEASE, refused)
    return completion.settlement if isinstance(completion, DeadLetter) else completion
