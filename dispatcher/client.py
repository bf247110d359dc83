"""What producers use: submit a request, await its result. Speaks the queue contract, nothing else."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec
from redis import exceptions as errors

from dispatcher.core.request import Result, decode_result, encode_member
from dispatcher.core.score import score_of
from dispatcher.ports import QueueUnavailableError, Submission
from dispatcher.queue.keys import Names
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.desk import RedisDesk
from dispatcher.queue.redis.scripts import Client as RedisClient
from dispatcher.telemetry.tracing import sending

SUBMIT_AT_ONCE = 16
"""More submissions at a time would each want a connection of their own."""
WAIT_S = 5.0
"""One blocking pop takes at most this long; then another one follows."""


class NoResultError(Exception):
    """No result came in time. The request may still be under way."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Ticket:
    """A request that was submitted: what it takes to await or cancel it. The token is a secret."""

    id: str
    token: str
    deadline: int
    results: str


class Client:
    """A producer of one queue. Each client has a result list of its own."""

    def __init__(self, redis: RedisClient, names: Names) -> None:
        self._redis = redis
        self._desk = RedisDesk(redis, names)
        self._names = names
        self._results = f"batch-results:{secrets.token_hex(8)}"
        self._tickets: WeakValueDictionary[str, Ticket] = WeakValueDictionary()
        """By token: those that somebody may still await."""
        self._arrived: WeakKeyDictionary[Ticket, Result] = WeakKeyDictionary()
        self.passed_over = 0
        """Elements of its list that were no result of a request whose ticket somebody holds."""
        self._submitting = asyncio.Semaphore(SUBMIT_AT_ONCE)

    async def submit(
        self,
        payload: bytes,
        *,
        deadline_s: float = 3600.0,
        id: str = "",  # noqa: A002 - it is the contract's word
        priority: int | None = None,
        endpoint: str = "",
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        results: str | None = None,
    ) -> Ticket:
        """Put one request into the queue. `payload`: a JSON object, sent byte for byte.

        `deadline_s`: from now; it is answered by then, if only with DEADLINE_EXCEEDED. `results`: the list
        the result goes to; None: this client's own, empty: the queue's default. Where the program traces with
        OpenTelemetry, the trace goes on in the dispatcher and the gateway. Raises ValueError for what
        no dispatcher would take, QueueUnavailableError where the queue cannot be reached.
        """
        try:
            msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            raise ValueError(f"the payload is no JSON object: {error}") from error
        now = time.time()
        deadline = int(now + max(1.0, deadline_s))
        ticket = Ticket(
            id=id or f"r-{secrets.token_hex(8)}",
            token=secrets.token_hex(16),
            deadline=deadline,
            results=self._results if results is None else results,
        )
        score = score_of(deadline, priority)
        with sending(self._names.queue, ticket.id, metadata or {}) as carried:
            member = encode_member(
                ticket.id,
                payload,
                deadline,
                created=int(now),
                token=ticket.token,
                results=ticket.results,
                endpoint=endpoint,
                headers=headers or {},
                metadata=carried,
            )
            async with self._submitting:
                await self._desk.submit([Submission(member, score, ticket.id, ticket.token, deadline)])
        self._tickets[ticket.token] = ticket
        return ticket

    async def result(self, ticket: Ticket, *, timeout_s: float | None = None) -> Result:
        """Await the result of a request of this client. Raises NoResultError after `timeout_s`; None: some
        seconds past its deadline, by when the dispatcher has answered if there is one.

        Others may write this client's list: what does not bear the ticket's token is not its result. Results
        that came for other tickets are kept for as long as somebody holds those.
        """
        within = ticket.deadline - time.time() + 10.0 if timeout_s is None else timeout_s
        ends = asyncio.get_running_loop().time() + within
        self._tickets[ticket.token] = ticket
        while ticket not in self._arrived:
            left = ends - asyncio.get_running_loop().time()
            if left <= 0:
                raise NoResultError(f"no result for {ticket.id} within {within:.0f} s")
            popped = await self._pop(max(0.05, min(WAIT_S, left)))
            if popped is not None:
                self._came(popped)
        return self._arrived.pop(ticket)

    def _came(self, popped: bytes) -> None:
        try:
            result = decode_result(popped)
        except ValueError:
            self.passed_over += 1
            return
        ticket = self._tickets.get(result.request_token or "")
        if ticket is None or ticket.id != result.id:
            self.passed_over += 1
        else:
            self._arrived[ticket] = result

    async def cancel(self, ticket: Ticket) -> bool:
        """Ask for it to be cancelled; False where it has ended."""
        return await self._desk.cancel(ticket.id, ticket.token)

    async def waiting(self) -> int:
        """How many requests wait for their first or next delivery."""
        return (await self._desk.counts()).pending

    async def results(self) -> list[bytes]:
        """What lies in the queue's default result list, oldest first; nothing is taken."""
        found: list[bytes] = await self._reached(self._redis.lrange(self._names.results, 0, -1))
        return found[::-1]

    async def aclose(self) -> None:
        await self._desk.aclose()

    async def _pop(self, within_s: float) -> bytes | None:
        popped = await self._reached(self._redis.brpop([self._results], timeout=within_s))
        return None if popped is None else popped[1]

    async def _reached(self, command: Any) -> Any:
        try:
            return await command
        except (errors.ConnectionError, errors.TimeoutError, OSError, RuntimeError) as error:
            raise QueueUnavailableError(f"the queue cannot be reached: {error}") from error
        except errors.NoPermissionError as error:
            told = f"Redis does not permit this user to read results (docs/security.md): {error}"
            raise QueueUnavailableError(told) from error


@asynccontextmanager
async def open_client(url: str, names: Names) -> AsyncIterator[Client]:
    """A client of the queue behind a URL, for the length of the block."""
    client = Client(connect(url, answer_s=WAIT_S + 3.0), names)
    try:
        yield client
    finally:
        await client.aclose()
