"""Run of a request whose text is generated: its events in time, and what remains of it in a prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from dispatcher.lab.standin.generation_api import Event, GeneratedAnswer
from dispatcher.lab.standin.http import encode_chunk
from dispatcher.lab.standin.prefixes import TokenCache


class GenerationRun:
    """Generated answer of a request that waits or runs in the pool.

    `cache` is the one of its server, or `None` if the server keeps nothing.
    """

    def __init__(self, answer: GeneratedAnswer, cache: TokenCache | None) -> None:
        self.answer = answer
        self.cache = cache
        self.stream: EventStream | None = None
        """`None` if the answer is sent as a whole."""
        self._started_at: float | None = None
        self._seconds = 0.0

    def start(self, seconds: float) -> None:
        """Begin to generate. All tokens are there after so many seconds."""
        self._started_at, self._seconds = asyncio.get_running_loop().time(), seconds
        if self.stream is not None:
            self.stream.start(seconds)

    def stop(self) -> int:
        """Stop generating, and return the number of tokens that are there. The cache keeps them."""
        if self.stream is not None:
            self.stream.stop()
        if self._started_at is None:
            return 0
        passed_s = asyncio.get_running_loop().time() - self._started_at
        count = self.answer.count_tokens(min(1.0, passed_s / self._seconds) if self._seconds > 0 else 1.0)
        if self.stream is not None:
            count = self.stream.limit_tokens(count)
        self._record_tokens(count)
        return count

    def finish(self) -> None:
        """Record that all tokens were generated."""
        self._record_tokens(self.answer.token_count)

    def _record_tokens(self, count: int) -> None:
        if self.cache is not None:
            self.cache.record_tokens(self.answer.request.model, self.answer.list_tokens(count))


class EventStream:
    """Server-sent events of an answer, and the timer that sends each when its tokens are generated.

    `send` sends bytes of the answer. With `pauses` only the first half of the events is sent in time, and
    then `on_pause` is called.
    """

    def __init__(
        self,
        answer: GeneratedAnswer,
        events: Sequence[Event],
        head: bytes,
        *,
        send: Callable[[bytes], None],
        pauses: bool,
        on_pause: Callable[[], None],
    ) -> None:
        self.has_begun = False
        """True if the head of the answer was sent."""
        self._answer = answer
        self._events = events
        self._head = head
        self._send = send
        self._pause_at = len(events) // 2 if pauses else None
        self._on_pause = on_pause
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._started_at = 0.0
        self._seconds = 0.0

    def limit_tokens(self, count: int) -> int:
        """Return the number of generated tokens that is nearest to `count` and agrees with the events that
        were sent, because timers may be early or late."""
        events, sent = self._events, self._sent
        least = events[sent - 1].tokens if sent else 0
        most = events[sent].tokens - 1 if sent < len(events) else self._answer.token_count
        return max(least, min(count, most))

    def start(self, seconds: float) -> None:
        """Send the head, and then each event within these seconds."""
        self._started_at, self._seconds = asyncio.get_running_loop().time(), seconds
        self.has_begun = True
        self._send(self._head)
        self._schedule_next()

    def stop(self) -> None:
        """Send no further event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take_first_half(self) -> bytes:
        """Return the events of the first half that were not sent yet."""
        self.stop()
        return self._encode_events(len(self._events) // 2)

    def take_rest(self) -> bytes:
        """Return all events that were not sent yet, and the end of the answer."""
        self.stop()
        return self._encode_events(len(self._events)) + encode_chunk(b"")

    def _schedule_next(self) -> None:
        tokens = self._events[self._sent].tokens
        # The last events are sent when the pool says that the request has ended.
        if tokens < self._answer.token_count:
            at = self._started_at + self._answer.compute_share(tokens) * self._seconds
            self._timer = asyncio.get_running_loop().call_at(at, self._send_next)

    def _send_next(self) -> None:
        self._timer = None
        tokens = self._events[self._sent].tokens
        end = next(at for at, event in enumerate(self._events) if event.tokens > tokens)
        if self._pause_at is not None and end >= self._pause_at:
            self._send(self._encode_events(self._pause_at))
            self._on_pause()
        else:
            self._send(self._encode_events(end))
            self._schedule_next()

    def _encode_events(self, end: int) -> bytes:
        """Return the events up to this one that were not sent yet, and count them as sent."""
        parts = [encode_chunk(b"data: " + event.data + b"\n\n") for event in self._events[self._sent : end]]
        self._sent = max(self._sent, end)
        return b"".join(parts)
