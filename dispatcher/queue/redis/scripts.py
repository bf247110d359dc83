"""Runner of Lua scripts on one server. Scripts are run by SHA, loaded again if the server forgot them, and
bounded in time.

All errors of Redis are translated here, and no others come out of here: unexpected replies and defects of the
client library become a QueueUnavailableError with a sentence, too. The header of each Lua file declares its
keys and arguments (lua_scripts.py), and says what the script guarantees.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis import exceptions as errors
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.sentinel import MasterNotFoundError

from dispatcher.common.network_errors import describe_error
from dispatcher.common.printable import truncate_text
from dispatcher.queue.lua_files import ALL_FEATURES
from dispatcher.queue.redis.lua_scripts import Argument, load_script
from dispatcher.requests.submission import CallRefusedError, QueueFullError, QueueUnavailableError

Client = Redis | RedisCluster
T = TypeVar("T")

MAX_SCRIPT_BYTES = 2**20
MAX_SCRIPT_ITEMS = 256
"""Largest number of items that one script gets."""
_RETRY_PAUSES_S = (0.05, 0.2)
"""Pauses before the second and the third attempt. Callers handle longer outages themselves."""

_ERROR_MEANINGS = {
    "READONLY": "is a replica that takes no writes",
    "OOM": "is out of memory (maxmemory)",
    "LOADING": "is loading its data",
    "MISCONF": "cannot write to its disk and refuses to go on",
    "NOREPLICAS": "has fewer replicas in sync than min-replicas-to-write",
    "MASTERDOWN": "is a replica without its primary",
    "CLUSTERDOWN": "belongs to a cluster that is down",
    "TRYAGAIN": "is moving the slot to another node",
    "UNBLOCKED": "has become a replica, and ended a call that waited",
    "NOAUTH": "wants a password",
    "WRONGPASS": "does not accept this user and password",
    "NOPERM": "does not permit this user what the queue needs (docs/explanation/security.md, "
    "`batch-dispatcher check`)",
    "BUSY": "is busy with a script that does not end",
    "QUEUEFULL": "has a queue that takes no more requests now",
    "EXCEEDED": "was asked to store more than is allowed",
    "WRONGKEY": "holds something else under one of the queue's keys",
    "NOFEATURE": "has a queue with requests of a feature that this program does not have",
}
_ERROR_CODES: dict[type[Exception], str] = {
    errors.ReadOnlyError: "READONLY",
    errors.OutOfMemoryError: "OOM",
    errors.AuthenticationError: "WRONGPASS",
    errors.BusyLoadingError: "LOADING",
    errors.MasterDownError: "MASTERDOWN",
    errors.ClusterDownError: "CLUSTERDOWN",
    errors.TryAgainError: "TRYAGAIN",
    errors.ClusterError: "TRYAGAIN",  # the client of a Cluster gives up after some redirections and TRYAGAINs
}
"""Codes of the errors for which redis-py has a class and removes the code from the message. The first class
that fits counts, so a subclass comes before its base."""
_CONNECTION_ERRORS = (errors.ConnectionError, errors.RedisClusterException, OSError, RuntimeError)
"""Errors of a connection. RuntimeError is raised by a transport that closes during a write."""
_MAX_REPLY_CHARS = 300
"""Largest number of characters of an error in a message, because it may repeat large arguments."""
MIN_BYTES_PER_S = 1_000_000
"""Rate in bytes per second of the slowest connection over which large values can be moved."""
_ADDRESS_IN_ERROR = re.compile(r"connecting to (\S+?)\.(?:\s|$)")
"""Address in an error of the client library."""
_DENIED_IN_SCRIPT = re.compile(
    r"^(?:Error running script .*: )?The user executing the script can't|^ACL failure in script"
)
"""Errors for a missing permission inside a script, where there is no NOPERM, of Redis 6.2, Redis 7 and
Valkey."""
_SCRIPT_LOCATION = re.compile(r"^Error running script .*: (?=The user)| script: (?:[0-9a-f]+, )?on @.*$")
"""Location in a script, which is of no use to an operator."""


class CallFailedError(QueueUnavailableError):
    """This call was interrupted, not answered in time, or refused unexpectedly. The server may be reachable
    all the same, and take other calls."""


class UnexpectedReplyError(CallFailedError, CallRefusedError):
    """The reply was unexpected."""


class WrongKeyError(QueueUnavailableError):
    """Another program has stored a value of another type under one of the queue's keys. A retry does not
    help."""


class MissingFeatureError(QueueUnavailableError):
    """The queue has requests of a feature that this program does not have, and would run them wrongly. A
    retry does not help."""


_ERRORS: Mapping[str, type[QueueUnavailableError]] = {
    "WRONGKEY": WrongKeyError,
    "NOFEATURE": MissingFeatureError,
    "QUEUEFULL": QueueFullError,
    "EXCEEDED": CallRefusedError,
}


class PermissionDeniedError(CallRefusedError):
    """This user has no permission for the call."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a script, and the loop times between which the script ran."""

    value: Any
    sent_at: float
    received_at: float


class ScriptRunner:
    """Runs scripts on one server or cluster. Raises QueueUnavailableError for every failure there.

    `attempt_timeout_s` is the timeout of one attempt, in addition to the time that large values take to
    transfer. `features` are those for which the scripts are built.
    """

    def __init__(
        self,
        client: Client,
        *,
        attempt_timeout_s: float = 3.0,
        features: Sequence[str] = ALL_FEATURES,
    ) -> None:
        self.features = tuple(features)
        self.client: Any = client
        """Client for single commands inside `call_with_retries`. It is Any, because redis-py types replies
        for every protocol at once."""
        self.is_cluster = isinstance(client, RedisCluster)
        self._attempt_timeout_s = attempt_timeout_s

    async def run(
        self,
        script_name: str,
        arguments: Mapping[str, Any],
        *,
        keys: Mapping[str, Argument],
        key_group: Sequence[Argument] = (),
        size_bytes: int = 0,
    ) -> Reply:
        """Run a script with the keys and arguments that its header declares. It may run twice if a reply is
        lost, which every script supports.

        `key_group`: the keys of the queue, or the pool keys of a feature, if the script takes them.
        `size_bytes`: see `call_with_retries`.
        """
        script = load_script(script_name, self.features)
        all_keys = script.encode_keys(key_group, keys)
        parameters = (len(all_keys), *all_keys, *script.encode_arguments(arguments))

        async def run_loaded() -> Reply | None:
            try:
                return await self._execute("EVALSHA", script.sha, *parameters)
            except errors.NoScriptError:
                return None

        reply = await self.call_with_retries(run_loaded, size_bytes=size_bytes)
        if reply is not None:
            return reply
        # The server was flushed, restarted or failed over. EVAL runs the script and loads it again. This is a
        # call of its own, because it moves large values a second time.
        return await self.call_with_retries(
            lambda: self._execute("EVAL", script.text, *parameters), size_bytes=size_bytes
        )

    async def _execute(self, *command: Argument) -> Reply:
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        return Reply(await self.client.execute_command(*command), sent_at, clock())

    async def call_with_retries(self, act: Callable[[], Awaitable[T]], *, size_bytes: int = 0) -> T:
        """Call a function that can be repeated, with retries and a timeout. `size_bytes` is the number of
        bytes that it moves, if they are many."""
        for number in range(len(_RETRY_PAUSES_S) + 1):
            if number:
                await asyncio.sleep(_RETRY_PAUSES_S[number - 1])
            try:
                async with asyncio.timeout(self._attempt_timeout_s + size_bytes / MIN_BYTES_PER_S):
                    return await run_cancellable(act)
            except Exception as error:  # also RuntimeErrors of a transport that has just closed
                # No retry after a timeout: the attempt has taken all of its time.
                late = isinstance(error, TimeoutError | errors.TimeoutError)
                if late or _is_permission_denied(error) or number == len(_RETRY_PAUSES_S):
                    raise _translate_error(error) from error
        raise AssertionError("unreachable")

    async def is_responding(self, key: str) -> bool:
        """Return whether the server answers a small call. Used after a larger call failed."""
        try:
            await self.call_with_retries(lambda: self.client.exists(key))
        except QueueUnavailableError:
            return False
        return True


async def run_cancellable(act: Callable[[], Awaitable[T]]) -> T:
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


def _is_permission_denied(error: Exception) -> bool:
    return isinstance(error, errors.NoPermissionError) or _DENIED_IN_SCRIPT.search(str(error)) is not None


def _translate_error(error: Exception) -> QueueUnavailableError:
    """Translate an error into one with a sentence for an operator."""
    if isinstance(error, TimeoutError | errors.TimeoutError):
        return CallFailedError("Redis did not answer in time")
    if isinstance(error, UnicodeEncodeError):
        return UnexpectedReplyError(
            "Redis was not asked: a name holds a lone surrogate, or bytes that are no UTF-8"
        )
    message = _SCRIPT_LOCATION.sub("", str(error))
    if _is_permission_denied(error):
        return PermissionDeniedError(f"Redis {_ERROR_MEANINGS['NOPERM']}: {message}")
    # The code comes first in an error of a command, and within the text of an error of a script.
    for code, meaning in _ERROR_MEANINGS.items():
        if message.startswith(code) or f"{code} " in message:
            return _ERRORS.get(code, QueueUnavailableError)(f"Redis {meaning}: {message}")
    for kind, code in _ERROR_CODES.items():
        if isinstance(error, kind):
            return QueueUnavailableError(f"Redis {_ERROR_MEANINGS[code]}: {message}")
    if isinstance(error, errors.ResponseError):
        return UnexpectedReplyError(
            f"Redis rejected a call with an unexpected error: {truncate_text(message, _MAX_REPLY_CHARS)}"
        )
    if isinstance(error, MasterNotFoundError):  # after " : " come internals of the client
        why = message.partition(" : ")[0]
        return CallFailedError(
            f"Redis cannot be reached: no sentinel names a primary: {truncate_text(why, _MAX_REPLY_CHARS)}"
        )
    if isinstance(error, _CONNECTION_ERRORS):
        # The message of the client has error numbers of the system, so only its address is used.
        place = _ADDRESS_IN_ERROR.search(message)
        return CallFailedError(
            f"Redis cannot be reached: {f'{place[1]}: ' if place else ''}{describe_error(error)}"
        )
    return UnexpectedReplyError(
        f"the reply of Redis could not be understood: {truncate_text(repr(error), _MAX_REPLY_CHARS)}"
    )


def split_batches(
    items: Sequence[T], size_of: Callable[[T], int], max_items: int = MAX_SCRIPT_ITEMS
) -> list[list[T]]:
    """Split items into batches of at most a megabyte and `max_items` items, so that no script blocks Redis
    for long."""
    batches: list[list[T]] = []
    size = 0
    for item in items:
        size += size_of(item)
        # An item that is larger than a batch gets a batch of its own.
        if not batches or size > MAX_SCRIPT_BYTES or len(batches[-1]) == max_items:
            batches.append([])
            size = size_of(item)
        batches[-1].append(item)
    return batches


def split_for_owner(items: Sequence[T]) -> list[Sequence[T]]:
    """Split the items of an owner into those of each call. There is at least one call, because it is also the
    heartbeat of the owner."""
    starts = range(0, max(1, len(items)), MAX_SCRIPT_ITEMS)
    return [items[at : at + MAX_SCRIPT_ITEMS] for at in starts]
