"""Stage that orders the requests of sequences: checks their turn, sends them to the same server, and stores
what the next one needs.

    check turn    Ask the queue about claimed requests of sequences. A granted one is sent as usual, a waiting
                  one is no longer leased, a rejected one ends with its error.
    prepare       Add the id of the sequence, the sticky token of the server that answered before, and the
                  conversation so far, if it is kept. After two failed attempts, leave out the sticky token,
                  so that any server can answer.
    turn end      Store the sticky token of the answer, and the conversation for the next request.

The queue stores both, so that any replica can continue. If no claimed request belongs to a sequence, the
queue is not asked.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from dispatcher.features.sequences.completions import build_turn_end, build_turn_rejection
from dispatcher.features.sequences.conversation import (
    CannotContinue,
    build_payload,
    encode_conversation,
    prepare_request,
)
from dispatcher.features.sequences.decisions import (
    TurnDecision,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.features.sequences.options import SequenceOptions
from dispatcher.features.sequences.queue.calls import SequenceCalls
from dispatcher.features.sequences.queue.steps import decode_granted_turn
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.queue_steps import SequenceStep
from dispatcher.features.sequences.turns import CarryMode, Turn
from dispatcher.kernel import completions
from dispatcher.kernel.hooks import LeasePart
from dispatcher.queue.contract import Settlement
from dispatcher.requests.affinity import Affinity, AffinityOptions
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.wire_format import ErrorCode

if TYPE_CHECKING:
    from dispatcher.gateway.contract import AttemptResult
    from dispatcher.kernel.claimed_request import ClaimedRequest
    from dispatcher.kernel.completions import Completion
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.in_flight import InFlightLease
    from dispatcher.requests.request import Request

MAX_ATTEMPTS_AT_SERVER = 2
"""Number of failed attempts after which a request may go to any server."""
_VALID_TOKEN = re.compile(r"[!-~]{1,2048}")
"""Tokens that can be sent back unchanged in a header."""


class TurnChecker(LeasePart):
    """Checks turns in one process."""

    def __init__(self, context: KernelContext) -> None:
        self.turn_counts: dict[str, int] = dict.fromkeys(("granted", "waits", "rejected"), 0)
        """Number of decisions of the queue, by kind."""
        self.server_counts: dict[str, int] = dict.fromkeys(("same", "other", "none"), 0)
        """Number of answers to requests with a sticky token, by server: the same, another one, or (`none`)
        not named."""
        self.conversation_counts: dict[str, int] = dict.fromkeys(("continued", "refused"), 0)
        """Number of requests that were to be sent with their conversation."""
        self._context = context
        self._access = context.access
        self._calls = context.access.queue.open_calls(SequenceCalls)
        self.leases: dict[str, TurnDecision | None] = {}
        """Decisions about the turns of requests, by the token of the lease. `None` while the queue has not
        been asked, or could not be."""

    @property
    def _options(self) -> SequenceOptions:
        return self._context.options.of(SequenceOptions)

    def look_up(self, requests: list[ClaimedRequest]) -> Awaitable[None] | None:
        """Return the call to the queue that these requests need. `None` if they need none."""
        unknown = []
        for claimed in requests:
            if claimed.request.extra is not None:
                # Turns that came with a flush are granted already.
                granted = None if claimed.extra is None else decode_granted_turn(*claimed.extra)
                self.leases[claimed.entry.lease.token] = granted
                if granted is None:
                    unknown.append(claimed)
                else:
                    self.turn_counts["granted"] += 1
        return self._claim_turns(unknown) if unknown else None

    async def _claim_turns(self, requests: list[ClaimedRequest]) -> None:
        access = self._access
        asked_at = access.clock()
        turns = [
            (claimed.entry.lease, turn) for claimed in requests if (turn := claimed.request.extra) is not None
        ]
        call = self._calls.claim_turns(turns, self._options.terms)
        reply = await access.call_queue(SequenceStep.CLAIM_TURNS, call)
        if reply is None:
            return
        access.record_sign_of_life(asked_at)
        access.update_from_reply(reply)
        for claimed, decision in zip(requests, reply.decisions, strict=True):
            # After an exception in another stage, the request may have been dropped meanwhile.
            if claimed.entry.lease.token in self.leases:
                self.leases[claimed.entry.lease.token] = decision
            match decision:
                case TurnGranted():
                    self.turn_counts["granted"] += 1
                case TurnWaits():
                    self.turn_counts["waits"] += 1
                case TurnRejected():
                    self.turn_counts["rejected"] += 1

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        """Return the requests that belong to no sequence or whose turn is granted, in order. All others are
        removed or completed."""
        return [claimed for claimed in requests if claimed.request.extra is None or self._apply_turn(claimed)]

    def _apply_turn(self, claimed: ClaimedRequest) -> bool:
        """Apply the decision about the turn. Return True if the request continues."""
        entry, request = claimed.entry, claimed.request
        match self.leases[entry.lease.token]:
            case TurnGranted() as granted:
                prepared = self._prepare_request(entry, request, granted)
                if isinstance(prepared, CannotContinue):
                    self._context.complete(
                        completions.build_error(entry.lease, request, ErrorCode.INVALID_REQUEST, prepared.why)
                    )
                    return False
                claimed.request = prepared
                self._context.in_flight.set_request(entry, prepared)
                return True
            case TurnWaits():
                claimed.waits = True
                self._context.parsed_requests.store_request(entry.lease, request)
                # The queue has ended the lease with its decision; there is nothing to report.
                self._context.remove_lost_lease(entry.lease.token)
            case TurnRejected(code, why):
                self._context.complete(build_turn_rejection(entry.lease, request, code, why))
            case None:  # the queue could not be asked
                self._context.complete(completions.build_return(entry.lease))
        return False

    def forget_lease(self, token: str) -> None:
        """Forget a lease that has ended."""
        self.leases.pop(token, None)

    def _prepare_request(
        self, entry: InFlightLease, request: Request, granted: TurnGranted
    ) -> Request | CannotContinue:
        """Return the request as it is sent: with headers of the sequence and with its conversation."""
        turn, options = request.extra, self._options
        names = self._context.options.of(AffinityOptions)
        token_header = names.token_header.lower()
        assert turn is not None  # noqa: S101 -- its turn is granted
        headers = {names.id_header.lower(): turn.id} if names.id_header else {}
        # After failures, the server of the token may be the cause.
        if token_header and granted.sticky_token and entry.lease.failed_attempts < MAX_ATTEMPTS_AT_SERVER:
            headers[token_header] = granted.sticky_token
        payload = request.payload
        if self._carries_conversation(turn):
            body = build_payload(payload, granted.conversation, options.max_carry_bytes)
            self.conversation_counts["refused" if isinstance(body, CannotContinue) else "continued"] += 1
            if isinstance(body, CannotContinue):
                return body
            payload = body
        session = Affinity(headers, token_header, turn.id, is_first=granted.is_first, is_last=turn.last)
        return prepare_request(request, payload, session)

    def _carries_conversation(self, turn: Turn) -> bool:
        return (turn.carry or self._options.carry) is CarryMode.MESSAGES

    def end(self, entry: InFlightLease, completion: Completion, result: AttemptResult) -> Completion:
        """Return the completion with the end of the request's turn, which the sequence records."""
        granted, request = self.leases[entry.lease.token], entry.request
        if (
            not isinstance(granted, TurnGranted)
            or request is None
            or not isinstance(completion, Settlement)
            or not isinstance(completion.request_extra, Turn)
        ):
            return completion
        end, carry = build_turn_end(completion, completion.request_extra), None
        token = self._choose_token(granted, request, result)
        if (
            self._carries_conversation(end.turn)
            and not end.has_failed
            and isinstance(result.outcome, Delivered)
        ):
            carry = encode_conversation(request.payload, result.outcome.body, self._options.max_carry_bytes)
        if token is not None or carry is not None:
            end = TurnEnd(end.turn, end.has_failed, end.cause, token, carry)
        return completion.copy_with(extra=end)

    def _choose_token(self, granted: TurnGranted, request: Request, result: AttemptResult) -> str | None:
        """Return the sticky token to store. `None` to keep the stored one, empty to delete it."""
        # The header comes from a server and is sent back later: accept only what is safe in a header.
        new_token = result.sticky_token if _VALID_TOKEN.fullmatch(result.sticky_token) else ""
        if not granted.sticky_token:
            return new_token or None
        if new_token:
            self.server_counts["same" if new_token == granted.sticky_token else "other"] += 1
            return None if new_token == granted.sticky_token else new_token
        session = request.affinity
        # A token was sent but none came back: the stored one stays valid. Delete it only if it was left out
        # on purpose.
        if session is None or session.token_header in session.headers:
            return None
        self.server_counts["none"] += 1
        return ""
