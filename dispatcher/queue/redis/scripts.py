"""One server, seen through its scripts: run by SHA, loaded again when forgotten, bounded in time.

The only place where Redis errors are translated, and nothing else comes out of here: what is not foreseen,
be it a reply or a defect of the client library, is a sentence too. Each script's promise stands at the head
of its file.
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
"""No script is given more at once."""
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
"""Before the second and the third try. A longer outage is the caller's to wait for."""

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
"""redis-py keeps the code to itself where it knows it."""
_CONNECTION = (errors.ConnectionError, errors.RedisClusterException, OSError, RuntimeError)
"""RuntimeError: a transport that closed while something was written to it."""
_MOST_CHARS = 300
"""Of a reply in a sentence: it may repeat what was sent to it."""
SLOWEST_BYTES_PER_S = 1_000_000
"""Of a way to Redis that large values can be moved over."""
_CONNECTING = re.compile(r"connecting to (\S+?)\.(?:\s|$)")
"""Where to, in an error of the client library."""
_FORBIDDEN = re.compile(
    r"^(?:Error running script .*: )?The user executing the script can't|^ACL failure in script"
)
"""How a right is refused inside a script, where there is no NOPERM: by Redis 6.2, by 7, by Valkey."""
_PLACE = re.compile(r"^Error running script .*: (?=The user)| script: (?:[0-9a-f]+, )?on @.*$")
"""Where in a script, which tells an operator nothing."""


_FOLDER = files("dispatcher.queue") / "lua"
_LUA = {
    file.name.removesuffix(".lua"): file.read_text(encoding="utf-8")
    for file in _FOLDER.iterdir()
    if file.name.endswith(".lua")
}
"""Read at the start: later the process may be short of descriptors, or the files be another version's."""


def _prelude(text: str, all_keys: Mapping[str, tuple[str, str]]) -> str:
    """What Python and a script both name, as locals: the keys, and the numbers they agree about. Those that
    it names only: a script may have 200 locals."""
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
    """The text of a script with the fragments it stands on, and its SHA.

    The script itself is a function in what it stands on: each of the two may have 200 locals. Put together
    when it is first asked for, for a client runs few of them.
    """
    parts = (*_FRAGMENTS.get(name, _DESK), name)
    *below, script = (_LUA[part] for part in parts)
    text = "\n".join([*below, f"return (function()\n{script}\nend)()"])
    if "time" in parts:
        text = f"{_prelude(text, BOARD_KEYS if 'versions' in parts else KEYS)}\n{text}"
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class BrokenCallError(QueueUnavailableError):
    """This call was broken off, not answered in time, or refused in a way that nobody foresaw. The server may
    be there all the same, and take others."""


class OddReplyError(BrokenCallError, CallRefusedError):
    """Nobody foresaw what came in reply."""


class WrongKeyError(QueueUnavailableError):
    """A key of another program is in the place of one of ours. Retrying does not help."""


_ERRORS: Mapping[str, type[QueueUnavailableError]] = {
    "WRONGKEY": WrongKeyError,
    "QUEUEFULL": QueueFullError,
    "STREAMFULL": CallRefusedError,
}


class ForbiddenError(CallRefusedError):
    """This user may not do that."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a script returned, and between which loop times it ran."""

    value: Any
    sent_at: float
    received_at: float


class Scripts:
    """Calls to one server or cluster. Raises QueueUnavailableError for all that can go wrong there.

    `try_s`: how long one try may take, beside what large values take to transfer.
    """

    def __init__(self, client: Client, *, try_s: float = 3.0) -> None:
        self.client: Any = client
        """For single commands, inside `attempt`. Any: redis-py types replies for every protocol at once."""
        self.is_cluster = isinstance(client, RedisCluster)
        self._try_s = try_s

    async def run(
        self, name: str, keys: Sequence[Argument], args: Sequence[Argument], *, size: int = 0
    ) -> Reply:
        """Run a script. It may run twice when a reply is lost: each bears that. `size`: see `attempt`."""
        text, sha = source(name)
        parameters = (len(keys), *keys, *args)

        async def once() -> Reply:
            clock = asyncio.get_running_loop().time
            sent_at = clock()
            try:
                value = await self.client.execute_command("EVALSHA", sha, *parameters)
            except errors.NoScriptError:  # flushed, restarted or failed over: EVAL loads it again
                sent_at = clock()
                value = await self.client.execute_command("EVAL", text, *parameters)
            return Reply(value, sent_at, clock())

        return await self.attempt(once, size=size)

    async def attempt(self, act: Callable[[], Awaitable[T]], *, size: int = 0) -> T:
        """Do what can be repeated, within the time and the tries there are. `size`: how many bytes it moves,
        where they are many."""
        for number in range(len(_PAUSES_S) + 1):
            if number:
                await asyncio.sleep(_PAUSES_S[number - 1])
            try:
                async with asyncio.timeout(self._try_s + size / SLOWEST_BYTES_PER_S):
                    return await cancellable(act)
            except Exception as error:  # RuntimeErrors of a transport that has just closed are among them
                late = isinstance(error, TimeoutError | errors.TimeoutError)
                if late or _is_forbidden(error) or number == len(_PAUSES_S):
                    raise _told(error) from error
        raise AssertionError("unreachable")

    async def answers(self, key: str) -> bool:
        """Whether the server answers a small call, after a larger one did not get through."""
        try:
            await self.attempt(lambda: self.client.exists(key))
        except QueueUnavailableError:
            return False
        return True


async def cancellable(act: Callable[[], Awaitable[T]]) -> T:
    """The act's result, unless the task was cancelled meanwhile.

    redis-py loses some cancellations on its way through connecting, and a task that was told to end would
    then go on for ever.
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
    """The error as a sentence for an operator."""
    if isinstance(error, TimeoutError | errors.TimeoutError):
        return BrokenCallError("Redis did not answer in time")
    if isinstance(error, UnicodeEncodeError):
        return OddReplyError("Redis was not asked: a name holds a lone surrogate, or bytes that are no UTF-8")
    message = _PLACE.sub("", str(error))
    if _is_forbidden(error):
        return ForbiddenError(f"Redis {_REFUSALS['NOPERM']}: {message}")
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
    if isinstance(error, MasterNotFoundError):  # what follows its first words are the client's innards
        why = message.partition(" : ")[0]
        return BrokenCallError(
            f"Redis cannot be reached: no sentinel names a primary: {shortened(why, _MOST_CHARS)}"
        )
    if isinstance(error, _CONNECTION):
        # The client's own words hold numbers of the system, and the address in brackets.
        place = _CONNECTING.search(message)
        return BrokenCallError(f"Redis cannot be reached: {f'{place[1]}: ' if place else ''}{words(error)}")
    return OddReplyError(f"the answer of Redis was not understood: {shortened(repr(error), _MOST_CHARS)}")


def in_steps(items: Sequence[T], size_of: Callable[[T], int], most: int = SCRIPT_ITEMS) -> list[list[T]]:
    """Steps of at most a megabyte and `most` items, so that no script blocks Redis for long."""
    steps: list[list[T]] = []
    size = 0
    for item in items:
        size += size_of(item)
        if not steps or size > SCRIPT_BYTES or len(steps[-1]) == most:
            steps.append([])
            size = size_of(item)
        steps[-1].append(item)
    return steps
