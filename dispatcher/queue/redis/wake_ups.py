"""Wait for new work: a subscription to the wake-ups of producers, and a poll for producers that publish
none."""

from __future__ import annotations

import asyncio
import contextlib

from redis.asyncio.client import PubSub

from dispatcher.queue.keys import Names
from dispatcher.queue.redis.scripts import Scripts, cancellable
from dispatcher.telemetry.events import Event, emit

_RETRY_S = 1.0


class WakeUps:
    """Listens to wake-ups with one subscription per process. A wake-up between two calls ends the second one.

    Whenever the subscription was established, the queue is checked before the next message is awaited,
    because a wake-up may have been published in between. If the server permits no subscription, the queue is
    only polled.
    """

    def __init__(self, scripts: Scripts, names: Names, poll_s: float) -> None:
        self._scripts = scripts
        self._names = names
        self._poll_s = poll_s
        self._heard: PubSub | None = None
        self._again_at = 0.0
        self._gone = False

    async def wait(self) -> None:
        """Return after a wake-up, or when `poll_s` has passed and there is work."""
        while True:
            # With a new subscription, check the queue first: a wake-up may have been published before it.
            fresh = await self._subscribe()
            if not fresh and await self._listen():
                return
            if await self._any():
                return

    async def aclose(self) -> None:
        heard, self._heard = self._heard, None
        if heard is not None:
            with contextlib.suppress(Exception):
                await heard.aclose()  # type: ignore[no-untyped-call]

    async def _subscribe(self) -> bool:
        """Subscribe if needed. Return True if there is a new subscription."""
        now = asyncio.get_running_loop().time()
        if self._heard is not None or now < self._again_at:
            return False
        try:
            self._heard = await cancellable(self._open)
        except Exception as error:  # whatever the cause is, polling is enough
            self._again_at = now + _RETRY_S
            if not self._gone:
                emit(Event.WAKE_UPS_GONE, why=str(error) or type(error).__name__, poll_s=self._poll_s)
            self._gone = True
            return False
        if self._gone:
            emit(Event.WAKE_UPS_BACK)
        self._gone = False
        return True

    async def _open(self) -> PubSub:
        if self._scripts.is_cluster:  # a message published at one node reaches subscribers at all nodes
            await self._scripts.attempt(self._scripts.client.initialize)
        heard: PubSub = self._scripts.client.pubsub()
        try:
            async with asyncio.timeout(_RETRY_S * 2):
                await heard.subscribe(self._names.wake)
                confirmed = None
                while confirmed is None or confirmed["type"] != "subscribe":
                    confirmed = await heard.get_message(timeout=_RETRY_S)
        except BaseException:
            with contextlib.suppress(Exception):
                await heard.aclose()  # type: ignore[no-untyped-call]
            raise
        return heard

    async def _listen(self) -> bool:
        """Wait for a wake-up. Return True if one came within `poll_s`. All that came with it count as one."""
        heard = self._heard
        if heard is None:
            await asyncio.sleep(self._poll_s)
            return False
        try:
            woken = await cancellable(lambda: _message(heard, self._poll_s))
            # Drain the messages that came with it, so that they cause no further rounds.
            while woken and await cancellable(lambda: _message(heard, 0.0)):
                pass
        except Exception:  # the connection is broken: the next call subscribes again
            await self.aclose()
            return False
        return woken

    async def _any(self) -> bool:
        async def look() -> int:
            found: int = await self._scripts.client.exists(*self._names.waiting)
            return found

        return await self._scripts.attempt(look) > 0


async def _message(heard: PubSub, timeout_s: float) -> bool:
    message = await heard.get_message(ignore_subscribe_messages=True, timeout=timeout_s)
    return message is not None and message["type"] == "message"
