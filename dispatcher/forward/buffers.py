"""A bound on the bytes of answers that all tries together hold.

An answer is held from the first byte that is read until its result is written to the queue. A few hundred
large ones at once would take more memory than the pod has, so reading pauses while the bound is reached, and
the gateway feels that at its socket.

    room      the bytes that answers may take, but for as many as the largest answer may have
    beyond    while there is no room, the first that waits is read to its end all the same, and takes what was
              set aside for that; the next one may when that is written. So some answer always gets on,
              whatever the others hold, and the bound is kept.

Who waits is served in the order of asking. Each connection has read up to 128 KB ahead beside that (300 KB
over TLS), which is not counted; neither are the parts of merged answers while single calls are made to
compare them.
"""

from __future__ import annotations

import asyncio
from collections import deque


class AnswerBuffers:
    """What the answers of one gateway hold. `largest_bytes`: no answer has more."""

    def __init__(self, limit_bytes: int, largest_bytes: int) -> None:
        self._used = 0
        """Of all answers but the one that is `_beyond`."""
        self._beyond: AnswerHold | None = None
        self._waiting: deque[tuple[AnswerHold, int, asyncio.Future[None]]] = deque()
        self.resize(limit_bytes, largest_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes that all answers hold now."""
        return self._used + (self._beyond.size if self._beyond is not None else 0)

    def resize(self, limit_bytes: int, largest_bytes: int) -> None:
        """Keep another bound from now on; answers that hold more than it allows are read to their end."""
        self._room = max(0, limit_bytes - largest_bytes)
        self._wake()

    def take(self, hold: AnswerHold, more: int) -> bool:
        """Let an answer have more bytes; False: there is no room for them now."""
        if hold is not self._beyond:
            if self._used + more <= self._room:
                self._used += more
            elif self._beyond is None:
                self._used -= hold.size
                self._beyond = hold
            else:
                return False
        hold.size += more
        return True

    async def wait_for(self, hold: AnswerHold, more: int) -> None:
        """Take the bytes when there is room for them."""
        may = not self._waiting or hold is self._beyond  # else it would overtake who has waited longer
        if may and self.take(hold, more):
            return
        granted = asyncio.get_running_loop().create_future()
        turn = hold, more, granted
        self._waiting.append(turn)
        try:
            await granted
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._wake()
            raise

    def give_back(self, hold: AnswerHold, size: int) -> None:
        """An answer needs so many bytes fewer."""
        hold.size -= size
        if hold is not self._beyond:
            self._used -= size
        elif not hold.size:
            self._beyond = None
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            hold, more, granted = self._waiting[0]
            if not granted.done() and not self.take(hold, more):
                return
            self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)


class AnswerHold:
    """The bytes of one answer."""

    __slots__ = ("_buffers", "_shares", "size")

    def __init__(self, buffers: AnswerBuffers) -> None:
        self.size = 0
        self._buffers = buffers
        self._shares = 1

    async def grow(self, size: int) -> None:
        """Wait until the answer may have `size` bytes in all."""
        if size > self.size:
            await self._buffers.wait_for(self, size - self.size)

    def shrink(self, size: int) -> None:
        """The answer has come, and has no more than `size` bytes."""
        if size < self.size:
            self._buffers.give_back(self, self.size - size)

    def share(self, shares: int) -> None:
        """Have the bytes given back when `free` was called so many times; 0: now."""
        self._shares = shares
        if not shares:
            self._shares = 1
            self.free()

    def free(self) -> None:
        """One of those who share the answer needs it no longer. More often than it is shared: no effect."""
        self._shares -= 1
        if self._shares == 0:
            self._buffers.give_back(self, self.size)
