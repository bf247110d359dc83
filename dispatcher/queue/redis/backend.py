"""One queue on one server: its scripts, its keys, and the clock of the server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress

from redis.crc import key_slot

from dispatcher.queue.keys import Names
from dispatcher.queue.redis.clock import ServerClock
from dispatcher.queue.redis.scripts import Argument, Client, Reply, Scripts


class Backend:
    """Everything that a call needs to know about a queue and its server. Raises QueueUnavailableError like
    `ScriptRunner`.

    Its methods translate times between the clock of the event loop and Redis TIME.
    """

    def __init__(self, client: Client, names: Names, *, try_s: float = 3.0) -> None:
        self.names = names
        self.scripts = Scripts(client, try_s=try_s)
        self.clock = ServerClock()
        self._keys = names.keys
        self._slot = key_slot(names.queue.encode())

    async def aclose(self) -> None:
        """Close the connections."""
        with suppress(Exception):  # closing a broken connection fails, which is of no interest any more
            await self.scripts.client.aclose()

    async def run(
        self, script: str, args: Sequence[Argument], keys: Sequence[Argument] = (), *, size: int = 0
    ) -> Reply:
        """Run a script on the queue's own keys, followed by `keys`. `size_bytes`: see
        `ScriptRunner.call_with_retries`."""
        return await self.scripts.run(script, [*self._keys, *keys], args, size=size)

    def new_reply(self) -> str:
        """Return a new key for the reply to one call."""
        return self.names.reply(secrets.token_hex(8))

    def elsewhere(self, name: bytes) -> bool:
        """Return whether a list is in another slot of a Cluster than the queue. Scripts of the queue cannot
        reach it there."""
        return self.scripts.is_cluster and key_slot(name) != self._slot

    def saw(self, reply: Reply, server_time: bytes) -> None:
        """Adjust the clock by the server time in a reply."""
        self.clock.observe(reply.sent_at, reply.received_at, float(server_time))

    def server_time(self, at: float) -> str:
        """Return a loop time as the argument of a script."""
        return f"{at + self.clock.offset(asyncio.get_running_loop().time()):.6f}"

    def loop_time(self, server_time: bytes) -> float:
        """Return a time in a reply as a loop time."""
        return self.clock.loop(float(server_time), asyncio.get_running_loop().time())
