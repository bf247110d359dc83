"""Wait for new work: a subscription to the wake-ups of producers, and a poll for producers that publish
none."""

from __future__ import annotations

import asyncio
import contextlib

from redis.asyncio.client import PubSub

from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.scripts import ScriptRunner, run_cancellable
from dispatcher.telemetry.events import Event, emit

_RETRY_S = 1.0


class WakeUpListener:
    """Listens to wake-ups with one subscription per process. A wake-up between two calls ends the second one.

    Whenever the subscription was established, the queue is checked before the next message is awaited,
    because a wake-up may have been published in between. If the server permits no subscription, the queue is
    only polled.
    """

    def __init__(self, scripts: ScriptRunner, names: QueueNames, poll_s: float) -> None:
        self._scripts = scripts
        self._names = names
        self._poll_s = poll_s
        self._subscription: PubSub | None = None
        self._retry_at = 0.0
        self._is_unavailable = False

    async def wait_for_wake_up(self) -> None:
        """Return after a wake-up, or when `poll_s` has passed and there is work."""
        while True:
            # With a new subscription, check the queue first: a wake-up may have been published before it.
            fresh = await self._ensure_subscribed()
            if not fresh and await self._wait_for_message():
                return
            if await self._has_claimable():
                return

    async def aclose(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(Exception):
                await subscription.aclose()  # type: ignore[no-untyped-call]

    async def _ensure_subscribed(self) -> bool:
        """Subscribe if needed. Return True if there is a new subscription."""
        now = asyncio.get_running_loop().time()
        if self._subscription is not None or now < self._retry_at:
            return False
        try:
            self._subscription = await run_cancellable(self._open_subscription)
        except Exception as error:  # whatever the cause is, polling is enough
            self._retry_at = now + _RETRY_S
            if not self._is_unavailable:
                emit(Event.WAKE_UPS_UNAVAILABLE, why=str(error) or type(error).__name__, poll_s=self._poll_s)
            self._is_unavailable = True
            return False
        if self._is_unavailable:
            emit(Event.WAKE_UPS_AVAILABLE)
        self._is_unavailable = False
        return True

    async def _open_subscription(self) -> PubSub:
        if self._scripts.is_cluster:  # a message published at one node reaches subscribers at all nodes
            await self._scripts.call_with_retries(self._scripts.client.initialize)
        subscription: PubSub = self._scripts.client.pubsub()
        try:
            async with asyncio.timeout(_RETRY_S * 2):
                await subscription.subscribe(self._names.wake_channel)
                confirmed = None
                while confirmed is None or confirmed["type"] != "subscribe":
                    confirmed = await subscription.get_message(timeout=_RETRY_S)
        except BaseException:
            with contextlib.suppress(Exception):
                await subscription.aclose()  # type: ignore[no-untyped-call]
            raise
        return subscription

    async def _wait_for_message(self) -> bool:
        """Wait for a wake-up. Return True if one came within `poll_s`. All that came with it count as one."""
        subscription = self._subscription
        if subscription is None:
            await asyncio.sleep(self._poll_s)
            return False
        try:
            woken = await run_cancellable(lambda: _receive_message(subscription, self._poll_s))
            # Drain the messages that came with it, so that they cause no further rounds.
            while woken and await run_cancellable(lambda: _receive_message(subscription, 0.0)):
                pass
        except Exception:  # the connection is broken: the next call subscribes again
            await self.aclose()
            return False
        return woken

    async def _has_claimable(self) -> bool:
        async def count_keys() -> int:
            found: int = await self._scripts.client.exists(*self._names.claimable_keys)
            return found

        return await self._scripts.call_with_retries(count_keys) > 0


async def _receive_message(subscription: PubSub, timeout_s: float) -> bool:
    message = await subscription.get_message(ignore_subscribe_messages=True, timeout=timeout_s)
    return message is not None and message["type"] == "message"
