"""One queue on one server: its scripts, its keys, and the clock of the server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis.crc import key_slot

from dispatcher.queue.keys import QueueNames
from dispatcher.queue.lua_files import ALL_FEATURES
from dispatcher.queue.redis.clock import ServerClock
from dispatcher.queue.redis.lua_scripts import NO_NAMES, Argument, load_script
from dispatcher.queue.redis.scripts import Client, Reply, ScriptRunner


class Backend:
    """Everything that a call needs to know about a queue and its server. Raises QueueUnavailableError like
    `ScriptRunner`.

    Its methods translate times between the clock of the event loop and Redis TIME.
    """

    def __init__(
        self,
        client: Client,
        names: QueueNames,
        *,
        attempt_timeout_s: float = 3.0,
        features: Sequence[str] = ALL_FEATURES,
    ) -> None:
        self.names = names
        self.scripts = ScriptRunner(client, attempt_timeout_s=attempt_timeout_s, features=features)
        self.clock = ServerClock()
        self._key_groups: Mapping[str, Sequence[str]] = {
            "queue": names.list_script_keys(features),
            **{name: names.list_pool_keys(name) for name in features},
            "": (),
        }
        self._slot = key_slot(names.queue.encode())

    async def aclose(self) -> None:
        """Close the connections."""
        with suppress(Exception):  # closing a broken connection fails, which is of no interest any more
            await self.scripts.client.aclose()

    async def run_script(
        self,
        script_name: str,
        arguments: Mapping[str, Any] = NO_NAMES,
        *,
        keys: Mapping[str, Argument] = NO_NAMES,
        size_bytes: int = 0,
    ) -> Reply:
        """Run a script on the keys of the queue, or on the pool keys of a feature, and on `keys`. See
        `ScriptRunner.run`."""
        group = self._key_groups[load_script(script_name, self.scripts.features).key_group]
        return await self.scripts.run(
            script_name, arguments, keys=keys, key_group=group, size_bytes=size_bytes
        )

    def create_reply_key(self) -> str:
        """Return a new key for the reply to one call."""
        return self.names.reply_key(secrets.token_hex(8))

    @property
    def can_reach_foreign_markers(self) -> bool:
        """True if scripts of the queue can reach the markers of llm-d's producers."""
        return not self.scripts.is_cluster

    def is_in_other_slot(self, name: bytes) -> bool:
        """Return whether a list is in another slot of a Cluster than the queue. Scripts of the queue cannot
        reach it there."""
        return self.scripts.is_cluster and key_slot(name) != self._slot

    def observe_clock(self, reply: Reply, server_time: bytes) -> None:
        """Adjust the clock by the server time in a reply."""
        self.clock.observe_reply(reply.sent_at, reply.received_at, float(server_time))

    def to_server_time(self, at: float) -> str:
        """Return a loop time as the argument of a script."""
        return f"{at + self.clock.get_offset(asyncio.get_running_loop().time()):.6f}"

    def to_loop_time(self, server_time: bytes) -> float:
        """Return a time in a reply as a loop time."""
        return self.clock.to_loop_time(float(server_time), asyncio.get_running_loop().time())
