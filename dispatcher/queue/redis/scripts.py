"""Runner of Lua scripts on one server. Scripts are run by SHA, loaded again if the server forgot them, and
bounded in time.

All errors of Redis are translated here, and no others come out of here: unexpected replies and defects of the
client library become a QueueUnavailableError with a sentence, too. The header of each Lua file says what the
script guarantees.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from redis import exceptions as errors
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.sentinel import MasterNotFoundError

from dispatcher.core.printable import shortened
from dispatcher.core.requests.submission import CallRefusedError, QueueFullError, QueueUnavailableError
from dispatcher.ports.network_errors import words
from dispatcher.queue import constants
from dispatcher.queue.keys import BOARD_KEYS, KEYS, MODEL_KEYS, SEQUENCE_KEYS

Client = Redis | RedisCluster
Argument = str | bytes | int | float
T = TypeVar("T")

SCRIPT_BYTES = 2**20
SCRIPT_ITEMS = 256
"""Largest number of items that one script gets."""
_DESK = ("need", "time", "common")
_STEP = ("need", "rights", "time", "common")
_BOARD = ("need", "time", "versions")
_FRAGMENTS = {
    "claim": (*_STEP, "line"),
    "settle": (*_STEP, "line", "markers", "keep", "results", "sequences", "hand_over"),
    "expire": (*_STEP, "markers", "keep", "results", "sequences", "models"),
    "release": (*_STEP, "models"),
    "recall": (*_STEP, "models"),
    "renew": _STEP,
    "weigh": _STEP,
    "sweep": (*_STEP, "markers", "sequences", "models"),
    "line_up": (*_STEP, "sequences"),
    "sequence": (*_DESK, "sequences"),
    "submit": (*_DESK, "markers", "room"),
    "enlist": (*_DESK, "markers", "room", "streams"),
    "stream": (*_DESK, "markers", "streams"),
    "consume": ("need", "streams"),
    "requeue": (*_DESK, "markers"),
    "cancel": (*_DESK, "markers"),
    "cancelled": (*_DESK, "markers"),
    "peek": (*_DESK, "line"),
    "look": (*_DESK, "markers"),
    "ahead": _DESK,
    "restore": (*_DESK, "markers"),
    "marks": _BOARD,
    "warm": _BOARD,
    "pin": _BOARD,
    "decide": _BOARD,
    "collect": ("need",),
    "push": ("need", "keep"),
    "forget": (),
    "posted": (),
    "permits": (),
    "unfit": (),
}
_CAPITALS = re.compile(r"\b[A-Z][A-Z_]+\b")
_COMMENT = re.compile(r"--.*")
_PAUSES_S = (0.05, 0.2)
"""Pauses before the second and the third attempt. Callers handle longer outages themselves."""

_REFUSALS = {
    "READONLY": "is a replica that takes no writes",
    "OOM": "is out of memory (maxmemory)",
    "LOADING": "is loading its data",
    "MISCONF": "cannot write to its disk and refuses to go on",
    "NOREPLICAS": "has fewer replicas in sync than min-replicas-to-write",
    "MASTERDOWN": "is a replica without its primary",
    "CLUSTERDOWN": "belongs to a cluster that is down",
    "TRYAGAIN": "is moving the slot to another node",
    "NOAUTH": "wants a password",
    "WRONGPASS": "does not accept this user and password",
    "NOPERM": "does not permit this user what the queue needs (docs/security.md, `batch-dispatcher check`)",
    "BUSY": "is busy with a script that does not end",
    "QUEUEFULL": "has a queue that takes no more requests now",
    "STREAMFULL": "has a stream that takes no more requests",
    "WRONGKEY": "holds something else under one of the queue's keys",
}
_KINDS: dict[type[Exception], str] = {
    errors.ReadOnlyError: "READONLY",
    errors.OutOfMemoryError: "OOM",
    errors.AuthenticationError: "WRONGPASS",
    errors.BusyLoadingError: "LOADING",
}
"""Codes of the errors for which redis-py has a class and removes the code from the message."""
_CONNECTION = (errors.ConnectionError, errors.RedisClusterException, OSError, RuntimeError)
"""Errors of a connection. RuntimeError is raised by a transport that closes during a write."""
_MOST_CHARS = 300
"""Largest number of characters of an error in a message, because it may repeat large arguments."""
SLOWEST_BYTES_PER_S = 1_000_000
"""Rate in bytes per second of the slowest connection over which large values can be moved."""
_CONNECTING = re.compile(r"connecting to (\S+?)\.(?:\s|$)")
"""Address in an error of the client library."""
_FORBIDDEN = re.compile(
    r"^(?:Error running script .*: )?The user executing the script can't|^ACL failure in script"
)
"""Errors for a missing permission inside a script, where there is no NOPERM, of Redis 6.2, Redis 7 and
Valkey."""
_PLACE = re.compile(r"^Error running script .*: (?=The user)| script: (?:[0-9a-f]+, )?on @.*$")
"""Location in a script, which is of no use to an operator."""


_FOLDER = files("dispatcher.queue") / "lua"
_LUA = {
    file.name.removesuffix(".lua"): file.read_text(encoding="utf-8")
    for file in _FOLDER.iterdir()
    if file.name.endswith(".lua")
}
"""Text of all Lua files. They are read at import, because the process may lack file descriptors later, and
the files may be replaced by those of another version."""


def _prelude(text: str, all_keys: Mapping[str, tuple[str, str]]) -> str:
    """Return the definitions that Python and a script share, as Lua locals: keys and constants. Only those
    that the script uses, because a script may have 200 locals."""
    named = set(_CAPITALS.findall(_COMMENT.sub("", text)))
    keys = [f"local {name} = KEYS[{number}]" for number, name in enumerate(all_keys, 1) if name in named]
    types = ", ".join(f"'{kind}'" for _, kind in all_keys.values())
    numbers = [f"local {name} = {value}" for name, value in constants.LUA.items() if name in named]
    of_models = len(KEYS) - len(MODEL_KEYS)
    counts = [f"local OWN, OF_MODELS, OFTEN = {len(KEYS)}, {of_models}, {of_models - len(SEQUENCE_KEYS)}"]
    counts += [f"local TYPES = {{{types}}}"]
    return "\n".join([*keys, *numbers, *counts, ""])


@cache
def source(name: str) -> tuple[str, str]:
    """Return the text of a script with its fragments, and its SHA.

    The script itself becomes a function after its fragments, so each of the two may have 200 locals. The text
    is built on first use, because a client runs few of the scripts.
    """
    parts = (*_FRAGMENTS.get(name, _DESK), name)
    # The order of the parts matters: each uses the local functions of those before it.
    *below, script = (_LUA[part] for part in parts)
    text = "\n".join([*below, f"return (function()\n{script}\nend)()"])
    if "time" in parts:
        text = f"{_prelude(text, BOARD_KEYS if 'versions' in parts else KEYS)}\n{text}"
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class BrokenCallError(QueueUnavailableError):
    """This call was interrupted, not answered in time, or refused unexpectedly. The server may be reachable
    all the same, and take other calls."""


class OddReplyError(BrokenCallError, CallRefusedError):
    """The reply was unexpected."""


class WrongKeyError(QueueUnavailableError):
    """Another program has stored a value of another type under one of the queue's keys. A retry does not
    help."""


_ERRORS: Mapping[str, type[QueueUnavailableError]] = {
    "WRONGKEY": WrongKeyError,
    "QUEUEFULL": QueueFullError,
    "STREAMFULL": CallRefusedError,
}


class ForbiddenError(CallRefusedError):
    """This user has no permission for the call."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a script, and the loop times between which the script ran."""

    value: Any
    sent_at: float
    received_at: float


class Scripts:
    """Runs scripts on one server or cluster. Raises QueueUnavailableError for every failure there.

    `attempt_timeout_s` is the timeout of one attempt, in addition to the time that large values take to
    transfer.
    """

    def __init__(self, client: Client, *, try_s: float = 3.0) -> None:
        self.client: Any = client
        """Client for single commands inside `call_with_retries`. It is Any, because redis-py types replies
        for every protocol at once."""
        self.is_cluster = isinstance(client, RedisCluster)
        self._try_s = try_s

    async def run(
        self, name: str, keys: Sequence[Argument], args: Sequence[Argument], *, size: int = 0
    ) -> Reply:
        """Run a script. It may run twice if a reply is lost, which every script supports. `size_bytes`: see
        `call_with_retries`."""
        text, sha = source(name)
        parameters = (len(keys), *keys, *args)

        async def once() -> Reply:
            clock = asyncio.get_running_loop().time
            sent_at = clock()
            try:
                value = await self.client.execute_command("EVALSHA", sha, *parameters)
            except errors.NoScriptError:
                # The server was flushed, restarted or failed over. EVAL runs the script and loads it again.
                sent_at = clock()
                value = await self.client.execute_command("EVAL", text, *parameters)
            return Reply(value, sent_at, clock())

        return await self.attempt(once, size=size)

    async def attempt(self, act: Callable[[], Awaitable[T]], *, size: int = 0) -> T:
        """Call a function that can be repeated, with retries and a timeout. `size_bytes` is the number of
        bytes that it moves, if they are many."""
        for number in range(len(_PAUSES_S) + 1):
            if number:
                await asyncio.sleep(_PAUSES_S[number - 1])
            try:
                async with asyncio.timeout(self._try_s + size / SLOWEST_BYTES_PER_S):
                    return await cancellable(act)
            except Exception as error:  # also RuntimeErrors of a transport that has just closed
                # No retry after a timeout: the attempt has taken all of its time.
                late = isinstance(error, TimeoutError | errors.TimeoutError)
                if late or _is_forbidden(error) or number == len(_PAUSES_S):
                    raise _told(error) from error
        raise AssertionError("unreachable")

    async def answers(self, key: str) -> bool:
        """Return whether the server answers a small call. Used after a larger call failed."""
        try:
            await self.attempt(lambda: self.client.exists(key))
        except QueueUnavailableError:
            return False
        return True


async def cancellable(act: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a call, and raise CancelledError if the task was cancelled meanwhile.

    redis-py loses some cancellations while it connects, and then a cancelled task would go on for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await act()
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


def _is_forbidden(error: Exception) -> bool:
    return isinstance(error, errors.NoPermissionError) or _FORBIDDEN.search(str(error)) is not None


def _told(error: Exception) -> QueueUnavailableError:
    """Translate an error into one with a sentence for an operator."""
    if isinstance(error, TimeoutError | errors.TimeoutError):
        return BrokenCallError("Redis did not answer in time")
    if isinstance(error, UnicodeEncodeError):
        return OddReplyError("Redis was not asked: a name holds a lone surrogate, or bytes that are no UTF-8")
    message = _PLACE.sub("", str(error))
    if _is_forbidden(error):
        return ForbiddenError(f"Redis {_REFUSALS['NOPERM']}: {message}")
    # The code comes first in an error of a command, and within the text of an error of a script.
    for code, meaning in _REFUSALS.items():
        if message.startswith(code) or f"{code} " in message:
            return _ERRORS.get(code, QueueUnavailableError)(f"Redis {meaning}: {message}")
    for kind, code in _KINDS.items():
        if isinstance(error, kind):
            return QueueUnavailableError(f"Redis {_REFUSALS[code]}: {message}")
    if isinstance(error, errors.ResponseError):
        return OddReplyError(
            f"Redis refused a call in a way that was not foreseen: {shortened(message, _MOST_CHARS)}"
        )
    if isinstance(error, MasterNotFoundError):  # after " : " come internals of the client
        why = message.partition(" : ")[0]
        return BrokenCallError(
            f"Redis cannot be reached: no sentinel names a primary: {shortened(why, _MOST_CHARS)}"
        )
    if isinstance(error, _CONNECTION):
        # The message of the client has error numbers of the system, so only its address is used.
        place = _CONNECTING.search(message)
        return BrokenCallError(f"Redis cannot be reached: {f'{place[1]}: ' if place else ''}{words(error)}")
    return OddReplyError(f"the answer of Redis was not understood: {shortened(repr(error), _MOST_CHARS)}")


def in_steps(items: Sequence[T], size_of: Callable[[T], int], most: int = SCRIPT_ITEMS) -> list[list[T]]:
    """Split items into batches of at most a megabyte and `max_items` items, so that no script blocks Redis
    for long."""
    steps: list[list[T]] = []
    size = 0
    for item in items:
        size += size_of(item)
        # An item that is larger than a batch gets a batch of its own.
        if not steps or size > SCRIPT_BYTES or len(steps[-1]) == most:
            steps.append([])
            size = size_of(item)
        steps[-1].append(item)
    return steps
