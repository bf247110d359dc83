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
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dispatcher.core.gateway.outcome import Delivered
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.conversation import (
    CannotContinue,
    build_payload,
    encode_conversation,
    prepare_request,
)
from dispatcher.core.sequences.decisions import TurnEnd, TurnGranted, TurnRejected, TurnWaits
from dispatcher.core.sequences.turns import CarryMode, Session
from dispatcher.dispatch import completions
from dispatcher.dispatch.parsed_requests import ParsedRequestCache
from dispatcher.ports import Settlement

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.core.sequences.turns import Turn
    from dispatcher.dispatch.claimed_request import ClaimedRequest
    from dispatcher.dispatch.completions import Completion
    from dispatcher.dispatch.in_flight import InFlightLease, InFlightTable
    from dispatcher.dispatch.options import Options
    from dispatcher.dispatch.queue_access import QueueAccess
    from dispatcher.ports import AttemptResult

MAX_ATTEMPTS_AT_SERVER = 2
"""Number of failed attempts after which a request may go to any server."""
_VALID_TOKEN = re.compile(r"[!-~]{1,2048}")
"""Tokens that can be sent back unchanged in a header."""


class TurnChecker:
    """Checks turns in one process. `complete` takes completions; `remove_lease` removes a lease that the
    queue has taken back."""

    def __init__(
        self,
        access: QueueAccess,
        in_flight: InFlightTable,
        options: Options,
        complete: Callable[[Completion], None],
        remove_lease: Callable[[str], object],
    ) -> None:
        self.turn_counts: dict[str, int] = dict.fromkeys(("granted", "waits", "rejected"), 0)
        """Number of decisions of the queue, by kind."""
        self.server_counts: dict[str, int] = dict.fromkeys(("same", "other", "none"), 0)
        """Number of answers to requests with a sticky token, by server: the same, another one, or (`none`)
        not named."""
        self.conversation_counts: dict[str, int] = dict.fromkeys(("continued", "refused"), 0)
        """Number of requests that were to be sent with their conversation."""
        self.parsed_requests = ParsedRequestCache()
        self._access = access
        self._in_flight = in_flight
        self._options = options.sequences
        self._complete = complete
        self._remove_lease = remove_lease
        self._granted: dict[str, TurnGranted] = {}
        """Granted turns of requests in flight, by the token of the lease."""

    def reconfigure(self, options: Options) -> None:
        self._options = options.sequences

    def look_up(self, requests: list[ClaimedRequest]) -> Awaitable[None] | None:
        """Return the call to the queue that these requests need. `None` if they need none."""
        unknown = []
        for claimed in requests:
            if claimed.request.sequence is not None:
                # Turns that came with a flush are granted already.
                if claimed.turn is None:
                    unknown.append(claimed)
                else:
                    self.turn_counts["granted"] += 1
        return self._claim_turns(unknown) if unknown else None

    async def _claim_turns(self, requests: list[ClaimedRequest]) -> None:
        access = self._access
        asked_at = access.clock()
        turns = [
            (claimed.entry.lease, turn)
            for claimed in requests
            if (turn := claimed.request.sequence) is not None
        ]
        call = access.queue.claim_turns(turns, self._options.terms)
        reply = await access.call_queue("claim-turns", call)
        if reply is None:
            return
        access.record_sign_of_life(asked_at)
        access.update_from_reply(reply)
        for claimed, decision in zip(requests, reply.decisions, strict=True):
            claimed.turn = decision
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
        return [
            claimed for claimed in requests if claimed.request.sequence is None or self._apply_turn(claimed)
        ]

    def _apply_turn(self, claimed: ClaimedRequest) -> bool:
        """Apply the decision about the turn. Return True if the request continues."""
        entry, request = claimed.entry, claimed.request
        match claimed.turn:
            case TurnGranted() as granted:
                prepared = self._prepare_request(entry, request, granted)
                if isinstance(prepared, CannotContinue):
                    self._complete(
                        completions.build_error(entry.lease, request, ErrorCode.INVALID_REQUEST, prepared.why)
                    )
                    return False
                self._granted[entry.lease.token] = granted
                claimed.request = prepared
                self._in_flight.set_request(entry, prepared)
                return True
            case TurnWaits():
                claimed.waits = True
                self.parsed_requests.store_request(entry.lease, request)
                # The queue has ended the lease with its decision; there is nothing to report.
                self._remove_lease(entry.lease.token)
            case TurnRejected(code, why):
                self._complete(completions.build_turn_rejection(entry.lease, request, code, why))
            case None:  # the queue could not be asked
                self._complete(completions.build_return(entry.lease))
        return False

    def forget_lease(self, token: str) -> None:
        """Forget a lease that has ended."""
        self._granted.pop(token, None)

    def _prepare_request(
        self, entry: InFlightLease, request: Request, granted: TurnGranted
    ) -> Request | CannotContinue:
        """Return the request as it is sent: with headers of the sequence and with its conversation."""
        turn, options = request.sequence, self._options
        assert turn is not None  # noqa: S101 -- its turn is granted
        headers = {options.id_header.lower(): turn.id} if options.id_header else {}
        # After failures, the server of the token may be the cause.
        if (
            options.token_header
            and granted.sticky_token
            and entry.lease.failed_attempts < MAX_ATTEMPTS_AT_SERVER
        ):
            headers[options.token_header.lower()] = granted.sticky_token
        payload = request.payload
        if self._carries_conversation(turn):
            body = build_payload(payload, granted.conversation, options.max_carry_bytes)
            self.conversation_counts["refused" if isinstance(body, CannotContinue) else "continued"] += 1
            if isinstance(body, CannotContinue):
                return body
            payload = body
        session = Session(
            headers, options.token_header.lower(), turn.id, is_first=granted.is_first, is_last=turn.last
        )
        return prepare_request(request, payload, session)

    def _carries_conversation(self, turn: Turn) -> bool:
        return (turn.carry or self._options.carry) is CarryMode.MESSAGES

    def add_turn_end(self, entry: InFlightLease, completion: Completion, result: AttemptResult) -> Completion:
        """Return the completion with what the request leaves to its sequence."""
        if not self._granted:  # no request in flight belongs to a sequence
            return completion
        granted, request = self._granted.get(entry.lease.token), entry.request
        if (
            granted is None
            or request is None
            or not isinstance(completion, Settlement)
            or completion.turn_end is None
        ):
            return completion
        end, carry = completion.turn_end, None
        token = self._choose_token(granted, request, result)
        if (
            self._carries_conversation(end.turn)
            and not end.has_failed
            and isinstance(result.outcome, Delivered)
        ):
            carry = encode_conversation(request.payload, result.outcome.body, self._options.max_carry_bytes)
        if token is None and carry is None:  # avoid the copy, which is most of the cost here
            return completion
        return completion.copy_with(turn_end=TurnEnd(end.turn, end.has_failed, end.cause, token, carry))

    def _choose_token(self, granted: TurnGranted, request: Request, result: AttemptResult) -> str | None:
        """Return the sticky token to store. `None` to keep the stored one, empty to delete it."""
        # The header comes from a server and is sent back later: accept only what is safe in a header.
        new_token = result.sticky_token if _VALID_TOKEN.fullmatch(result.sticky_token) else ""
        if not granted.sticky_token:
            return new_token or None
        if new_token:
            self.server_counts["same" if new_token == granted.sticky_token else "other"] += 1
            return None if new_token == granted.sticky_token else new_token
        session = request.session
        # A token was sent but none came back: the stored one stays valid. Delete it only if it was left out
        # on purpose.
        if session is None or session.token_header in session.headers:
            return None
        self.server_counts["none"] += 1
        return ""
