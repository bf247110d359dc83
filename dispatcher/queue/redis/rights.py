"""Permissions that the user of `queue.url` needs, and the check which of them a server refuses.

docs/security.md describes them for people. The scripts check their own permissions before they write
(lua/require_commands.lua), so that nothing is left half done. Here all are checked at once, for
`batch-dispatcher check`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dispatcher.queue.keys import ACTIVE, CANCEL, Names
from dispatcher.queue.redis.script_calls import permits
from dispatcher.queue.redis.scripts import Scripts

_COMMANDS = (
    *("type", "exists", "get", "getrange", "set", "del", "expire", "lpush"),
    *("hget", "hmget", "hset", "hdel", "hexists", "hkeys", "hincrby", "hstrlen"),
    *("zadd", "zrem", "zcard", "zcount", "zscore", "zrange", "zrangebyscore", "zrevrange"),
    *("zremrangebyrank", "zpopmin"),
)
"""All commands that take a key. Each is checked with the key of the queue, whatever key it is used with."""
_SUBSCRIBE = "subscribe"


@dataclass(frozen=True, slots=True)
class Right:
    """Permission to run one command on one key, or without a key."""

    command: str
    key: str = ""
    """Key pattern as in ACL SETUSER: a prefix ends with an asterisk."""

    def words(self) -> tuple[str, ...]:
        """Return a call that needs the permission, with a word at every position where some version looks for
        a key."""
        key = self.key.replace("*", "any")
        if self.command == "eval":
            return self.command, "return 1", "1", key, key
        return (self.command, key, key, key) if key else (self.command, *(["0"] * 3))


@dataclass(frozen=True, slots=True)
class Missing:
    """Missing permissions, in the form of ACL SETUSER."""

    rights: tuple[str, ...] = ()
    """Rules without which nothing can be sent."""
    wakes: bool = True
    """True if this user may subscribe to wake-ups."""
    known: bool = True
    """False if the server cannot be asked."""


def needed(names: Names) -> list[Right]:
    """Return all permissions that a dispatcher of this queue needs."""
    own = [
        Right("eval", key)
        for key in (
            *names.keys,
            *names.board,
            names.reply("*"),
            names.active("*"),
            f"{names.prefix}:cancel:*",
        )
    ]
    results = [Right(command, names.results) for command in ("type", "lpush", "expire")]
    active = [Right(command, f"{ACTIVE}*") for command in ("getrange", "del")]
    cancel = [Right(command, f"{CANCEL}*") for command in ("getrange", "del")]
    return [
        *own,
        *(Right(command, names.queue) for command in _COMMANDS),
        *results,
        *active,
        *cancel,
        *(Right(command) for command in ("time", "evalsha", "ping")),
    ]


async def missing(scripts: Scripts, names: Names) -> Missing:
    """Check all permissions. Raises QueueUnavailableError if even the check (EVAL) is not permitted."""
    # Subscribing comes last and is not required: without it, the dispatcher polls.
    rights = [*needed(names), Right(_SUBSCRIBE, names.wake)]
    told = await permits(scripts, [right.words() for right in rights])
    if not told:
        return Missing(known=False)
    refused = {right for right, granted in zip(rights, told, strict=True) if not granted}
    wakes = rights.pop() not in refused
    return Missing(tuple(_summed(rights, refused & set(rights))), wakes)


def _summed(asked: Iterable[Right], refused: set[Right]) -> list[str]:
    """Summarize the refused permissions: keys on which nothing is permitted, commands that are permitted on
    no other key, and the rest."""
    if not refused:
        return []
    asked = list(asked)
    granted = {right.command for right in asked if right not in refused} | {"eval"}
    by_key = {right.key: {each for each in asked if each.key == right.key} for right in asked if right.key}
    keys = [
        key
        for key, rights in by_key.items()
        if rights <= refused and any(each.command in granted for each in rights)
    ]
    rest = [right for right in asked if right in refused and right.key not in keys]
    commands = [
        command
        for command in dict.fromkeys(right.command for right in rest)
        if all(each in refused for each in asked if each.command == command and each.key not in keys)
    ]
    left = [f"+{right.command} on {right.key}" for right in rest if right.command not in commands]
    return [*(f"+{command}" for command in commands), *(f"~{key}" for key in keys), *left]
