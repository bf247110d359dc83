"""Reads of the markers by which requests are cancelled. Producers write them, so each read has a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from redis import exceptions as errors

from dispatcher.queue.keys import FOREIGN_ACTIVE_PREFIX, FOREIGN_CANCEL_PREFIX, MAX_TOKEN_BYTES
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.lua_scripts import Row
from dispatcher.queue.redis.script_calls import encode_key
from dispatcher.queue.redis.scripts import ScriptRunner, split_batches

_MAX_REQUESTS_PER_CALL = 1000
"""Largest number of requests that one call asks about."""
ForeignMarkers = Literal["", "must", "may"]
"""Mode in which a script treats the markers of llm-d's producers. lua/check_cancelled.lua explains the
values."""


class _RequestRow(Row):
    id: bytes
    token: bytes
    may_have_marker: bool


async def check_cancelled(
    backend: Backend, requests: Sequence[tuple[str, str]], *, foreign: ForeignMarkers
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
            _RequestRow(id=request_id, token=token, may_have_marker=len(token) <= MAX_TOKEN_BYTES)
            for _, (request_id, token) in batch
        ]
        flags = (await backend.run_script("check_cancelled", {"foreign": foreign, "requests": rows})).value
        marked |= {pair for (pair, _), found in zip(batch, flags, strict=True) if found}
    return [pair in marked for pair in requests]


async def check_foreign_cancelled(scripts: ScriptRunner, requests: Sequence[tuple[str, str]]) -> list[bool]:
    """Return the same by the markers of llm-d's producers alone, which may be in any slot of a Cluster."""
    longest: dict[bytes, int] = {}
    for request_id, token in requests:
        if token:
            key = encode_key(FOREIGN_CANCEL_PREFIX + request_id)
            longest[key] = max(longest.get(key, 0), len(encode_key(token)))
    if not longest:
        return [False] * len(requests)

    async def read_markers() -> list[bytes | Exception]:
        pipe = scripts.client.pipeline(transaction=False)
        for key, size in longest.items():
            pipe.getrange(key, 0, size)  # one byte more than the token, to recognise a longer value
        found: list[bytes | Exception] = await pipe.execute(raise_on_error=False)
        for each in found:
            if isinstance(each, Exception) and not _is_wrong_type(each):
                raise each
        return found

    markers = dict(zip(longest, await scripts.call_with_retries(read_markers), strict=True))
    return [
        token != "" and markers[encode_key(FOREIGN_CANCEL_PREFIX + request_id)] == encode_key(token)
        for request_id, token in requests
    ]


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
