"""What a client asks of the queue for its sequences: the secret by which they are its own, and their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from dispatcher.client.item import Item, Tokens, seconds_from
from dispatcher.core.turns import Turn
from dispatcher.queue.constants import CANCEL_TTL_S

if TYPE_CHECKING:
    from dispatcher.queue.redis.desk import RedisDesk


class SequenceCalls:
    """Calls of one client. Each goes on trying while Redis is away, as `call` does."""

    def __init__(
        self, call: Callable[..., Awaitable[Any]], desk: Callable[[], RedisDesk], tokens: Tokens
    ) -> None:
        """`call`: make a call to the queue, perhaps until a time of the monotonic clock."""
        self._call, self._desk, self._tokens = call, desk, tokens
        self._secret = ""
        self._lock = asyncio.Lock()

    async def with_secret(self, item: Item) -> Item:
        """The item with the secret that programs with our client share, where it is of a sequence and has no
        secret of its own."""
        turn = Turn(item.sequence) if isinstance(item.sequence, str) else item.sequence
        if turn is None or turn.secret:
            return item
        if not self._secret:
            until = time.monotonic() + seconds_from(item.deadline, time.time())
            async with self._lock:  # the calls go on in their order
                if not self._secret:
                    self._secret = await self._call(lambda: self._desk().sequence_secret(), until)
        return replace(item, sequence=structs.replace(turn, secret=self._secret))

    async def cancel(self, sequence_id: str, for_s: float = CANCEL_TTL_S) -> bool:
        """Cancel all of a sequence that was submitted until now. `for_s`: how long some of it may wait to be
        claimed. False: nothing of it was alive, as far as dispatchers know."""
        at = self._tokens.now()  # by the clock that stamps the requests of this client
        done: bool = await self._call(lambda: self._desk().cancel_sequence(sequence_id, at, for_s))
        return done
