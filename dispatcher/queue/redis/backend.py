"""One queue on one server: its scripts, its keys, and the server's clock."""

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
    """What every step needs of a connection to a queue. Raises QueueUnavailableError like `Scripts`.

    Times cross it from the loop's clock to Redis TIME and back.
    """

    def __init__(self, client: Client, names: Names, *, try_s: float = 3.0) -> None:
        self.names = names
        self.scripts = Scripts(client, try_s=try_s)
        self.clock = ServerClock()
        self._keys = names.keys
        self._slot = key_slot(names.queue.encode())

    async def aclose(self) -> None:
        """Close the connections."""
        with suppress(Exception):  # those that broke already say so, and nobody needs to know
            await self.scripts.client.aclose()

    async def run(
        self, script: str, args: Sequence[Argument], keys: Sequence[Argument] = (), *, size: int = 0
    ) -> Reply:
        """Run a script on the queue's own keys, and `keys` after them. `size`: as in `Scripts.attempt`."""
        return await self.scripts.run(script, [*self._keys, *keys], args, size=size)

    def new_reply(self) -> str:
        """Where the reply to a call of its own is kept."""
        return self.names.reply(secrets.token_hex(8))

    def elsewhere(self, name: bytes) -> bool:
        """Whether a list lies in another slot of a Cluster than the queue, out of reach of its scripts."""
        return self.scripts.is_cluster and key_slot(name) != self._slot

    def saw(self, reply: Reply, server_time: bytes) -> None:
        """The reply says when it was given."""
        self.clock.observe(reply.sent_at, reply.received_at, float(server_time))

    def server_time(self, at: float) -> str:
        """Loop time as an argument of a script."""
        return f"{at + self.clock.offset(asyncio.get_running_loop().time()):.6f}"

    def loop_time(self, server_time: bytes) -> float:
        """A time in a reply as loop time."""
        return self.clock.loop(float(server_time), asyncio.get_running_loop().time())
