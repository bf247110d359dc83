"""Requests of sequences: whose turn it is, what takes them to the same server, what each leaves to the next.

    line up    of what was claimed and read, those of sequences ask the queue for their turn: one that goes is
               sent as ever, one that waits is no longer held, one that is barred ends with its error
    goes       with the sequence's id, the token of the server that has answered it before, and, where it is
               carried on, the conversation so far. After two failed tries it goes without the token, to
               whatever server there is
    leaves     the token that came with its answer, and the conversation for the next one

The queue keeps both, so that any replica goes on. Without a request of a sequence nothing is asked.
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
"""So many failed there before a request goes wherever it may."""
READ_BYTES = 16 << 20
"""Members of requests that wait, of which it is kept what was read: so many at the most."""
_TOKEN = re.compile(r"[!-~]{1,2048}")
"""What can go back as it came."""


class ReadBefore:
    """Requests that wait for their turn, as they were read: whoever is handed one need not read it again. The
    oldest go first where their members come to more than `most` bytes."""

    def __init__(self, most: int = READ_BYTES) -> None:
        self._most = most
        self.bytes = 0
        """Of the members."""
        self._by_entry: dict[int, tuple[bytes, Request]] = {}

    def keep(self, lease: Lease, request: Request) -> None:
        if not lease.member:  # too large to be kept beside its request
            return
        self.taken(lease, 0)
        self._by_entry[lease.entry] = lease.member, request
        self.bytes += len(lease.member)
        while self.bytes > self._most:
            member, _ = self._by_entry.pop(next(iter(self._by_entry)))
            self.bytes -= len(member)

    def taken(self, lease: Lease, max_payload_bytes: int) -> Request | None:
        """What is known of this very member, which is forgotten; None: nothing, or it is too long by now."""
        kept = self._by_entry.pop(lease.entry, None)
        if kept is None:
            return None
        member, request = kept
        self.bytes -= len(member)
        return request if member == lease.member and len(request.payload) <= max_payload_bytes else None


class LineUp:
    """Of one process. `finish`: how a lease ends; `drop`: the queue has taken it back."""

    def __init__(
        self,
        access: QueueAccess,
        options: Options,
        finish: Callable[[Ending], None],
        drop: Callable[[str], object],
    ) -> None:
        self.options = options
        self.turns: dict[str, int] = dict.fromkeys(("goes", "waits", "barred"), 0)
        """What the queue said, by what it was."""
        self.servers: dict[str, int] = dict.fromkeys(("same", "other", "lost"), 0)
        """Answers to requests with a token, by the server that they came from; `lost`: none was told."""
        self.carried: dict[str, int] = dict.fromkeys(("carried", "refused"), 0)
        """Requests that were to be sent with their conversation."""
        self.read_before = ReadBefore()
        self._access = access
        self._finish = finish
        self._drop = drop

    async def lined_up(self, read: list[tuple[HeldLease, Case]]) -> tuple[list[tuple[HeldLease, Case]], bool]:
        """Those that may go, in their order; what becomes of the others is seen to. And whether some wait."""
        turns = [(held, turn) for held, case in read if (turn := case.request.sequence) is not None]
        if not turns:
            return read, False
        waited = self.turns["waits"]
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
        """The tokens of those that do not go."""
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
                    if held.request is not None and not held.version:  # that may be another one then
                        self.read_before.keep(held.lease, held.request)
                    self._drop(held.lease.token)
                case Barred(code, why):
                    self.turns["barred"] += 1
                    if held.request is not None:
                        self._finish(completions.barred(held.lease, held.request, code, why))
            gone.add(held.lease.token)
        return gone

    def _equipped(self, held: HeldLease, request: Request, goes: Goes) -> Request | NotCarried:
        """As it is sent."""
        turn, options = request.sequence, self.options.sequences
        assert turn is not None  # noqa: S101 -- it goes
        headers = {options.id_header.lower(): turn.id} if options.id_header else {}
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
        """How its try ends it, with what that leaves to its sequence."""
        goes, request = held.goes, held.request
        if goes is None or request is None or not isinstance(ending, Settlement) or ending.turn is None:
            return ending
        end, carry = ending.turn, None
        token = self._token(goes, request, forwarded)
        if self._carries(end.turn) and not end.failed and isinstance(forwarded.outcome, Delivered):
            carry = left(request.payload, forwarded.outcome.body, self.options.sequences.max_carry_bytes)
        if token is None and carry is None:  # a copy costs more than all the rest of this
            return ending
        return ending.but(turn=TurnEnd(end.turn, end.failed, end.cause, token, carry))

    def _token(self, goes: Goes, request: Request, forwarded: Forwarded) -> str | None:
        """None: as before."""
        came = forwarded.session if _TOKEN.fullmatch(forwarded.session) else ""
        if not goes.token:
            return came or None
        if came:
            self.servers["same" if came == goes.token else "other"] += 1
            return None if came == goes.token else came
        session = request.session
        if session is None or session.token_header in session.headers:
            return None
        self.servers["lost"] += 1
        return ""
