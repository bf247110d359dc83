"""The markers by which requests are cancelled. Producers write them, so each read has a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeVar

from redis import exceptions as errors

from dispatcher.queue.keys import (
    FOREIGN_ACTIVE_PREFIX,
    FOREIGN_CANCEL_PREFIX,
    MAX_TOKEN_BYTES,
    encode_key,
)
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import PermissionDeniedError, ScriptRunner, split_batches
from dispatcher.requests.submission import QueueUnavailableError

T = TypeVar("T")

_MAX_REQUESTS_PER_CALL = 1000
"""Largest number of requests that one call asks about."""
MIN_NODE_REST_S, NODE_REST_FACTOR = 1.0, 10.0
"""Time for which a failed node of a Cluster is not asked: at least so many seconds, and so many times as long
as the failed call took. With a factor of 10, calls wait for such a node in a tenth of the time at most."""
ForeignMode = Literal["", "must", "may"]
"""Mode in which a script treats the markers of llm-d's producers. lua/check_cancelled.lua explains the
values."""


async def check_cancelled(
    backend: Backend, requests: Sequence[tuple[str, str]], *, foreign: ForeignMode
) -> list[bool]:
    """Return for each (request id, token) whether a marker of the id holds the token.

    Each marker is compared once, inside the server, because a producer may have written one of any size.
    """
    encoded = {pair: (encode_key(pair[0]), encode_key(pair[1])) for pair in requests if pair[1]}
    marked: set[tuple[str, str]] = set()
    for batch in split_batches(
        [*encoded.items()], lambda item: sum(map(len, item[1])), _MAX_REQUESTS_PER_CALL
    ):
        rows = [
            {"id": request_id, "token": token, "may_have_marker": len(token) <= MAX_TOKEN_BYTES}
            for _, (request_id, token) in batch
        ]
        flags = (await backend.run_script("check_cancelled", {"foreign": foreign, "requests": rows})).value
        marked |= {pair for (pair, _), found in zip(batch, flags, strict=True) if found}
    return [pair in marked for pair in requests]


class ForeignMarkers:
    """Markers of llm-d's producers on a Cluster, where they may be in any slot, and so on any node.

    A node that fails is not asked again for a while, so that it does not delay every call. Until then its
    last error is the answer.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._scripts = backend.scripts
        self._failed_nodes: dict[str, tuple[QueueUnavailableError, float]] = {}
        """Last error of each node that failed, and the loop time of the next attempt, by name of the node."""

    async def check_cancelled(
        self, requests: Sequence[tuple[str, str]]
    ) -> list[bool | QueueUnavailableError]:
        """Return for each (request id, token) whether the marker of the id holds the token, or why that
        cannot be read."""
        sizes: dict[bytes, int] = {}
        for request_id, token in requests:
            if token:
                key = encode_key(FOREIGN_CANCEL_PREFIX + request_id)
                sizes[key] = max(sizes.get(key, 0), len(encode_key(token)))
        keys_by_node: dict[str, list[bytes]] = {}
        for key in sizes:
            keys_by_node.setdefault(self._find_node(key), []).append(key)
        markers: dict[bytes, bytes | Exception] = {}
        for found in await asyncio.gather(
            *(self._read_from_node(node, keys, sizes) for node, keys in keys_by_node.items())
        ):
            markers.update(found)
        return [
            token != "" and _compare(markers[encode_key(FOREIGN_CANCEL_PREFIX + request_id)], token)
            for request_id, token in requests
        ]

    async def delete(self, requests: Sequence[tuple[str, str]]) -> None:
        """Delete the markers of each (request id, token) that hold this token. Those on a node that is down
        are left to expire."""
        await asyncio.gather(
            *(
                self._delete_marker(encode_key(prefix + request_id), encode_key(token))
                for request_id, token in requests
                for prefix in (FOREIGN_ACTIVE_PREFIX, FOREIGN_CANCEL_PREFIX)
            )
        )

    async def _delete_marker(self, key: bytes, token: bytes) -> None:
        await self._call_node(
            self._find_node(key),
            lambda: self._backend.run_script("delete_marker", {"token": token}, keys={"MARKER": key}),
        )

    async def _read_from_node(
        self, node: str, keys: Sequence[bytes], sizes: Mapping[bytes, int]
    ) -> Mapping[bytes, bytes | Exception]:
        has_failed = node in self._failed_nodes

        async def read_markers() -> list[bytes | Exception]:
            if has_failed:
                # A pipeline that cannot connect does not look for the node that stores the keys now.
                await self._scripts.client.exists(keys[0])
            pipe = self._scripts.client.pipeline(transaction=False)
            for key in keys:
                pipe.getrange(key, 0, sizes[key])  # one byte more than the token, to recognise a longer value
            found: list[bytes | Exception] = await pipe.execute(raise_on_error=False)
            for each in found:
                if isinstance(each, Exception) and not _is_wrong_type(each):
                    raise each
            return found

        found = await self._call_node(node, lambda: self._scripts.call_with_retries(read_markers))
        if isinstance(found, QueueUnavailableError):
            return dict.fromkeys(keys, found)
        return dict(zip(keys, found, strict=True))

    def _find_node(self, key: bytes) -> str:
        """Return the name of the node that stores a key. Empty if the client knows of none."""
        try:
            return str(self._scripts.client.get_node_from_key(key).name)
        except errors.RedisClusterException:
            return ""

    async def _call_node(self, node: str, call: Callable[[], Awaitable[T]]) -> T | QueueUnavailableError:
        """Return the result of a call, or why the node is down."""
        clock = asyncio.get_running_loop().time
        started_at = clock()
        if node in self._failed_nodes:
            error, retry_at = self._failed_nodes[node]
            if started_at < retry_at:
                return error
        try:
            result = await call()
        except PermissionDeniedError:  # the configuration is wrong for all nodes
            raise
        except QueueUnavailableError as error:
            rest_s = max(MIN_NODE_REST_S, NODE_REST_FACTOR * (clock() - started_at))
            self._failed_nodes[node] = error, clock() + rest_s
            return error
        self._failed_nodes.pop(node, None)
        return result


def _compare(marker: bytes | Exception, token: str) -> bool | QueueUnavailableError:
    return marker if isinstance(marker, QueueUnavailableError) else marker == encode_key(token)


async def read_foreign_active_token(scripts: ScriptRunner, request_id: str) -> bytes:
    """Return the token that a producer of llm-d has left under the id. Empty if there is none, or it is too
    long."""

    async def read_token() -> bytes:
        try:
            found: bytes = await scripts.client.getrange(
                FOREIGN_ACTIVE_PREFIX + request_id, 0, MAX_TOKEN_BYTES
            )
        except errors.ResponseError as error:
            if _is_wrong_type(error):
                return b""
            raise
        return found

    found = await scripts.call_with_retries(read_token)
    return found if len(found) <= MAX_TOKEN_BYTES else b""


def _is_wrong_type(error: Exception) -> bool:
    return isinstance(error, errors.ResponseError) and str(error).startswith("WRONGTYPE")
