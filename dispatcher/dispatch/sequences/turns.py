"""Requests of sequences: checks their turn, sends them to the same server, and stores what the next one
needs.

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
from collections.abc import Callable
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
from dispatcher.ports import Settlement

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.core.sequences.turns import Turn
    from dispatcher.dispatch.admission import AdmissionCase
    from dispatcher.dispatch.completions import Completion
    from dispatcher.dispatch.in_flight import InFlightLease
    from dispatcher.dispatch.options import Options
    from dispatcher.dispatch.queue_access import QueueAccess
    from dispatcher.ports import AttemptResult, Lease

MAX_ATTEMPTS_AT_SERVER = 2
"""Number of failed attempts after which a request may go to any server."""
MAX_PARSED_BYTES = 16 << 20
"""Maximum size of the members in `ParsedRequestCache`."""
_VALID_TOKEN = re.compile(r"[!-~]{1,2048}")
"""Tokens that can be sent back unchanged in a header."""


class ParsedRequestCache:
    """Parsed requests that wait for their turn, so that they need not be parsed again. The oldest are dropped
    when their members exceed `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_PARSED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.size_bytes = 0
        """Size of the members."""
        self._by_entry: dict[int, tuple[bytes, Request]] = {}

    def store_request(self, lease: Lease, request: Request) -> None:
        if not lease.member:  # the member was dropped, see LARGE_MEMBER_BYTES
            return
        # Drop an older entry, so that the size is counted once and the order is by age.
        self.take_request(lease, 0)
        self._by_entry[lease.entry_id] = lease.member, request
        self.size_bytes += len(lease.member)
        while self.size_bytes > self._max_bytes:
            member, _ = self._by_entry.pop(next(iter(self._by_entry)))
            self.size_bytes -= len(member)

    def take_request(self, lease: Lease, max_payload_bytes: int) -> Request | None:
        """Remove and return the parsed request of this lease. `None` if it is not known, has another member,
        or is too long by now."""
        kept = self._by_entry.pop(lease.entry_id, None)
        if kept is None:
            return None
        member, request = kept
        self.size_bytes -= len(member)
        return request if member == lease.member and len(request.payload) <= max_payload_bytes else None


class TurnChecker:
    """Checks turns in one process. `complete` takes completions; `remove_lease` removes a lease that the
    queue has taken back."""

    def __init__(
        self,
        access: QueueAccess,
        options: Options,
        complete: Callable[[Completion], None],
        remove_lease: Callable[[str], object],
    ) -> None:
        self.options = options
        self.turn_counts: dict[str, int] = dict.fromkeys(("granted", "waits", "rejected"), 0)
        """Number of decisions of the queue, by kind."""
        self.server_counts: dict[str, int] = dict.fromkeys(("same", "other", "none"), 0)
        """Number of answers to requests with a sticky token, by server: the same, another one, or (`none`)
        not named."""
        self.conversation_counts: dict[str, int] = dict.fromkeys(("continued", "refused"), 0)
        """Number of requests that were to be sent with their conversation."""
        self.parsed_requests = ParsedRequestCache()
        self._access = access
        self._complete = complete
        self._remove_lease = remove_lease

    async def check_turns(
        self, cases: list[tuple[InFlightLease, AdmissionCase]]
    ) -> tuple[list[tuple[InFlightLease, AdmissionCase]], bool]:
        """Return the requests whose turn is granted, in order, and True if some wait for their turn. All
        others are removed or completed."""
        turns = [(entry, turn) for entry, case in cases if (turn := case.request.sequence) is not None]
        if not turns:
            return cases, False
        waiting_before = self.turn_counts["waits"]
        # Turns that came with a flush are granted already.
        unknown = [each for each in turns if each[0].granted_turn is None]
        self.turn_counts["granted"] += len(turns) - len(unknown)
        removed = await self._claim_turns(unknown) if unknown else set()
        granted = []
        for entry, case in cases:
            if entry.lease.token in removed:
                continue
            if entry.granted_turn is not None:
                request = self._prepare_request(entry, case.request, entry.granted_turn)
                if isinstance(request, CannotContinue):
                    self._complete(
                        completions.build_error(
                            entry.lease, case.request, ErrorCode.INVALID_REQUEST, request.why
                        )
                    )
                    continue
                entry.request = case.request = request
            granted.append((entry, case))
        return granted, self.turn_counts["waits"] > waiting_before

    async def _claim_turns(self, turns: list[tuple[InFlightLease, Turn]]) -> set[str]:
        """Ask the queue for turns. Return the tokens of the leases whose turn is not granted."""
        access = self._access
        asked_at, removed = access.clock(), set()
        call = access.queue.claim_turns(
            [(entry.lease, turn) for entry, turn in turns], self.options.sequences.terms
        )
        reply = await access.call_queue("claim-turns", call)
        if reply is None:
            for entry, _ in turns:
                self._complete(completions.build_return(entry.lease))
            return {entry.lease.token for entry, _ in turns}
        access.record_sign_of_life(asked_at)
        access.update_from_reply(reply)
        for (entry, _), decision in zip(turns, reply.decisions, strict=True):
            match decision:
                case TurnGranted():
                    entry.granted_turn = decision
                    self.turn_counts["granted"] += 1
                    continue
                case TurnWaits():
                    self.turn_counts["waits"] += 1
                    if entry.request is not None and not entry.version:  # it may be another version then
                        self.parsed_requests.store_request(entry.lease, entry.request)
                    # The queue has ended the lease with its decision; there is nothing to report.
                    self._remove_lease(entry.lease.token)
                case TurnRejected(code, why):
                    self.turn_counts["rejected"] += 1
                    if entry.request is not None:
                        self._complete(
                            completions.build_turn_rejection(entry.lease, entry.request, code, why)
                        )
            removed.add(entry.lease.token)
        return removed

    def _prepare_request(
        self, entry: InFlightLease, request: Request, granted: TurnGranted
    ) -> Request | CannotContinue:
        """Return the request as it is sent: with headers of the sequence and with its conversation."""
        turn, options = request.sequence, self.options.sequences
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
        return prepare_request(request, payload, Session(headers, options.token_header.lower()))

    def _carries_conversation(self, turn: Turn) -> bool:
        return (turn.carry or self.options.sequences.carry) is CarryMode.MESSAGES

    def add_turn_end(self, entry: InFlightLease, completion: Completion, result: AttemptResult) -> Completion:
        """Return the completion with what the request leaves to its sequence."""
        granted, request = entry.granted_turn, entry.request
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
            carry = encode_conversation(
                request.payload, result.outcome.body, self.options.sequences.max_carry_bytes
            )
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
