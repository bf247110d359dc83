"""Permissions that the user of `queue.url` needs, and the check which of them a server refuses.

docs/explanation/security.md describes them for people. The scripts check their own permissions before they
write (lua/require_commands.lua), so that nothing is left half done. Here all are checked at once, for
`batch-dispatcher check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dispatcher.queue.keys import FOREIGN_ACTIVE_PREFIX, FOREIGN_CANCEL_PREFIX, QueueNames
from dispatcher.queue.redis.lua_scripts import load_script
from dispatcher.queue.redis.scripts import ScriptRunner

_COMMANDS = (
    *("type", "exists", "get", "getrange", "set", "del", "expire", "lpush"),
    *("hget", "hmget", "hset", "hdel", "hexists", "hkeys", "hincrby", "hstrlen"),
    *("zadd", "zrem", "zcard", "zcount", "zscore", "zrange", "zrangebyscore", "zrevrange"),
    *("zremrangebyrank", "zpopmin"),
)
"""All commands that take a key. Each is checked with the key of the queue, whatever key it is used with."""
_SUBSCRIBE = "subscribe"


@dataclass(frozen=True, slots=True)
class Permission:
    """Permission to run one command on one key, or without a key."""

    command: str
    key: str = ""
    """Key pattern as in ACL SETUSER: a prefix ends with an asterisk."""

    def to_acl_args(self) -> tuple[str, ...]:
        """Return a call that needs the permission, with a word at every position where some server looks for
        a key."""
        key = self.key.replace("*", "any")
        if self.command == "eval":
            return self.command, "return 1", "1", key, key
        return (self.command, key, key, key) if key else (self.command, *(["0"] * 3))


@dataclass(frozen=True, slots=True)
class MissingPermissions:
    """Missing permissions, in the form of ACL SETUSER."""

    acl_rules: tuple[str, ...] = ()
    """Rules without which nothing can be sent."""
    can_subscribe: bool = True
    """True if this user may subscribe to wake-ups."""
    is_known: bool = True
    """False if the server cannot be asked."""


def list_required_permissions(names: QueueNames) -> list[Permission]:
    """Return all permissions that a dispatcher of this queue needs."""
    own = [
        Permission("eval", key)
        for key in (
            *names.script_keys,
            *names.feature_pool_keys,
            names.reply_key("*"),
            names.active_key("*"),
            f"{names.queue_prefix}:cancel:*",
        )
    ]
    results = [Permission(command, names.result_list) for command in ("type", "lpush", "expire")]
    active = [Permission(command, f"{FOREIGN_ACTIVE_PREFIX}*") for command in ("getrange", "del")]
    cancel = [Permission(command, f"{FOREIGN_CANCEL_PREFIX}*") for command in ("getrange", "del")]
    return [
        *own,
        *(Permission(command, names.queue) for command in _COMMANDS),
        *results,
        *active,
        *cancel,
        *(Permission(command) for command in ("time", "evalsha", "ping")),
    ]


async def find_missing_permissions(scripts: ScriptRunner, names: QueueNames) -> MissingPermissions:
    """Check all permissions. Raises QueueUnavailableError if even the check (EVAL) is not permitted."""
    # Subscribing comes last and is not required: without it, the dispatcher polls.
    permissions = [*list_required_permissions(names), Permission(_SUBSCRIBE, names.wake_channel)]
    flags = await _check_permissions(scripts, [right.to_acl_args() for right in permissions])
    if not flags:
        return MissingPermissions(is_known=False)
    refused = {right for right, granted in zip(permissions, flags, strict=True) if not granted}
    can_subscribe = permissions.pop() not in refused
    return MissingPermissions(
        tuple(_summarize_refused(permissions, refused & set(permissions))), can_subscribe
    )


async def _check_permissions(scripts: ScriptRunner, calls: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each call whether this user may make it. Empty if the server cannot be asked."""
    words = [{"call": number, "text": word} for number, call in enumerate(calls, 1) for word in call]
    script = load_script("check_permissions")
    arguments = script.encode_arguments({"words": words})

    # By EVAL, because EVALSHA is among the permissions in question.
    flags = await scripts.call_with_retries(
        lambda: scripts.client.execute_command("EVAL", script.text, 0, *arguments)
    )
    return [bool(granted) for granted in flags]


def _summarize_refused(asked: Iterable[Permission], refused: set[Permission]) -> list[str]:
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
