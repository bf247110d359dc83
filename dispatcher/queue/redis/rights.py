"""What the user of queue.url must be permitted, and which of it a server refuses.

docs/security.md has it for people. The steps ask for their own rights before they write (lua/need.lua), so
that nothing is left half done; here all is asked at once, for `batch-dispatcher check`.
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
"""All that take a key: each is asked for with the queue's own, whatever it is run on."""
_SUBSCRIBE = "subscribe"


@dataclass(frozen=True, slots=True)
class Right:
    """To run one command on one key, or on none."""

    command: str
    key: str = ""
    """As a person would grant it: a prefix ends with an asterisk."""

    def words(self) -> tuple[str, ...]:
        """A call that needs it, with a word wherever some version looks for a key."""
        key = self.key.replace("*", "any")
        if self.command == "eval":
            return self.command, "return 1", "1", key, key
        return (self.command, key, key, key) if key else (self.command, *(["0"] * 3))


@dataclass(frozen=True, slots=True)
class Missing:
    """What is not permitted, in the words of ACL SETUSER."""

    rights: tuple[str, ...] = ()
    """Without these nothing is sent."""
    wakes: bool = True
    """Whether new work may be heard of."""
    known: bool = True
    """False: the server cannot be asked."""


def needed(names: Names) -> list[Right]:
    """All that a dispatcher of this queue does."""
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
    """Ask for all of them. Raises QueueUnavailableError where even asking (EVAL) is not permitted."""
    rights = [*needed(names), Right(_SUBSCRIBE, names.wake)]
    told = await permits(scripts, [right.words() for right in rights])
    if not told:
        return Missing(known=False)
    refused = {right for right, granted in zip(rights, told, strict=True) if not granted}
    wakes = rights.pop() not in refused
    return Missing(tuple(_summed(rights, refused & set(rights))), wakes)


def _summed(asked: Iterable[Right], refused: set[Right]) -> list[str]:
    """Keys on which nothing is permitted, commands that are permitted nowhere else, then what is left."""
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
