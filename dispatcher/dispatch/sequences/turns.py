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
from dispatcher.core.sequences.conversation import NotCarried, equipped, left, spoken
from dispatcher.core.sequences.decisions import Barred, Goes, TurnEnd, Waits
from dispatcher.core.sequences.turns import Carry, Session
from dispatcher.dispatch import completions
from dispatcher.ports import Settlement

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.core.sequences.turns import Turn
    from dispatcher.dispatch.admission import Case
    from dispatcher.dispatch.completions import Ending
    from dispatcher.dispatch.in_flight import HeldLease
    from dispatcher.dispatch.options import Options
    from dispatcher.dispatch.queue_access import QueueAccess
    from dispatcher.ports import Forwarded, Lease

TRIES_AT_ONE_SERVER = 2
"""Number of failed attempts after which a request may go to any server."""
READ_BYTES = 16 << 20
"""Maximum size of the members in `ParsedRequestCache`."""
_TOKEN = re.compile(r"[!-~]{1,2048}")
"""Tokens that can be sent back unchanged in a header."""


class ReadBefore:
    """Parsed requests that wait for their turn, so that they need not be parsed again. The oldest are dropped
    when their members exceed `max_bytes`."""

    def __init__(self, most: int = READ_BYTES) -> None:
        self._most = most
        self.bytes = 0
        """Size of the members."""
        self._by_entry: dict[int, tuple[bytes, Request]] = {}

    def keep(self, lease: Lease, request: Request) -> None:
        if not lease.member:  # the member was dropped, see LARGE_MEMBER_BYTES
            return
        # Drop an older entry, so that the size is counted once and the order is by age.
        self.taken(lease, 0)
        self._by_entry[lease.entry] = lease.member, request
        self.bytes += len(lease.member)
        while self.bytes > self._most:
            member, _ = self._by_entry.pop(next(iter(self._by_entry)))
            self.bytes -= len(member)

    def taken(self, lease: Lease, max_payload_bytes: int) -> Request | None:
        """Remove and return the parsed request of this lease. `None` if it is not known, has another member,
        or is too long by now."""
        kept = self._by_entry.pop(lease.entry, None)
        if kept is None:
            return None
        member, request = kept
        self.bytes -= len(member)
        return request if member == lease.member and len(request.payload) <= max_payload_bytes else None


class LineUp:
    """Checks turns in one process. `complete` takes completions; `remove_lease` removes a lease that the
    queue has taken back."""

    def __init__(
        self,
        access: QueueAccess,
        options: Options,
        finish: Callable[[Ending], None],
        drop: Callable[[str], object],
    ) -> None:
        self.options = options
        self.turns: dict[str, int] = dict.fromkeys(("goes", "waits", "barred"), 0)
        """Number of decisions of the queue, by kind."""
        self.servers: dict[str, int] = dict.fromkeys(("same", "other", "lost"), 0)
        """Number of answers to requests with a sticky token, by server: the same, another one, or (`lost`)
        not named."""
        self.carried: dict[str, int] = dict.fromkeys(("carried", "refused"), 0)
        """Number of requests that were to be sent with their conversation."""
        self.read_before = ReadBefore()
        self._access = access
        self._finish = finish
        self._drop = drop

    async def lined_up(self, read: list[tuple[HeldLease, Case]]) -> tuple[list[tuple[HeldLease, Case]], bool]:
        """Return the requests whose turn is granted, in order, and True if some wait for their turn. All
        others are removed or completed."""
        turns = [(held, turn) for held, case in read if (turn := case.request.sequence) is not None]
        if not turns:
            return read, False
        waited = self.turns["waits"]
        # Turns that came with a flush are granted already.
        asked = [each for each in turns if each[0].goes is None]
        self.turns["goes"] += len(turns) - len(asked)
        gone = await self._asked(asked) if asked else set()
        going = []
        for held, case in read:
            if held.lease.token in gone:
                continue
            if held.goes is not None:
                request = self._equipped(held, case.request, held.goes)
                if isinstance(request, NotCarried):
                    self._finish(
                        completions.error(held.lease, case.request, ErrorCode.INVALID_REQUEST, request.why)
                    )
                    continue
                held.request = case.request = request
            going.append((held, case))
        return going, self.turns["waits"] > waited

    async def _asked(self, turns: list[tuple[HeldLease, Turn]]) -> set[str]:
        """Ask the queue for turns. Return the tokens of the leases whose turn is not granted."""
        access = self._access
        asked_at, gone = access.clock(), set()
        call = access.queue.line_up(
            [(held.lease, turn) for held, turn in turns], self.options.sequences.terms
        )
        told = await access.ask("line_up", call)
        if told is None:
            for held, _ in turns:
                self._finish(completions.returned(held.lease))
            return {held.lease.token for held, _ in turns}
        access.heard(asked_at)
        access.learn(told)
        for (held, _), verdict in zip(turns, told.verdicts, strict=True):
            match verdict:
                case Goes():
                    held.goes = verdict
                    self.turns["goes"] += 1
                    continue
                case Waits():
                    self.turns["waits"] += 1
                    if held.request is not None and not held.version:  # it may be another version then
                        self.read_before.keep(held.lease, held.request)
                    # The queue has ended the lease with its decision; there is nothing to report.
                    self._drop(held.lease.token)
                case Barred(code, why):
                    self.turns["barred"] += 1
                    if held.request is not None:
                        self._finish(completions.barred(held.lease, held.request, code, why))
            gone.add(held.lease.token)
        return gone

    def _equipped(self, held: HeldLease, request: Request, goes: Goes) -> Request | NotCarried:
        """Return the request as it is sent: with headers of the sequence and with its conversation."""
        turn, options = request.sequence, self.options.sequences
        assert turn is not None  # noqa: S101 -- its turn is granted
        headers = {options.id_header.lower(): turn.id} if options.id_header else {}
        # After failures, the server of the token may be the cause.
        if options.header and goes.token and held.lease.attempts < TRIES_AT_ONE_SERVER:
            headers[options.header.lower()] = goes.token
        payload = request.payload
        if self._carries(turn):
            body = spoken(payload, goes.carry, options.max_carry_bytes)
            self.carried["refused" if isinstance(body, NotCarried) else "carried"] += 1
            if isinstance(body, NotCarried):
                return body
            payload = body
        return equipped(request, payload, Session(headers, options.header.lower()))

    def _carries(self, turn: Turn) -> bool:
        return (turn.carry or self.options.sequences.carry) is Carry.MESSAGES

    def leaves(self, held: HeldLease, ending: Ending, forwarded: Forwarded) -> Ending:
        """Return the completion with what the request leaves to its sequence."""
        goes, request = held.goes, held.request
        if goes is None or request is None or not isinstance(ending, Settlement) or ending.turn is None:
            return ending
        end, carry = ending.turn, None
        token = self._token(goes, request, forwarded)
        if self._carries(end.turn) and not end.failed and isinstance(forwarded.outcome, Delivered):
            carry = left(request.payload, forwarded.outcome.body, self.options.sequences.max_carry_bytes)
        if token is None and carry is None:  # avoid the copy, which is most of the cost here
            return ending
        return ending.but(turn=TurnEnd(end.turn, end.failed, end.cause, token, carry))

    def _token(self, goes: Goes, request: Request, forwarded: Forwarded) -> str | None:
        """Return the sticky token to store. `None` to keep the stored one, empty to delete it."""
        # The header comes from a server and is sent back later: accept only what is safe in a header.
        came = forwarded.session if _TOKEN.fullmatch(forwarded.session) else ""
        if not goes.token:
            return came or None
        if came:
            self.servers["same" if came == goes.token else "other"] += 1
            return None if came == goes.token else came
        session = request.session
        # A token was sent but none came back: the stored one stays valid. Delete it only if it was left out
        # on purpose.
        if session is None or session.token_header in session.headers:
            return None
        self.servers["lost"] += 1
        return ""
