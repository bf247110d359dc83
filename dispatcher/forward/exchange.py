"""One exchange: a request sent, its answer read and unpacked, and what came of it, HTTP's errors included.

A kept-alive connection that breaks before an answer says nothing but that the server had closed it, and such
a request goes out once more on a new one.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence

import aiohttp

from dispatcher.core.gateway.outcome import (
    GATEWAY,
    Failed,
    Outcome,
    TooLarge,
    Unreachable,
    Unsent,
    classify,
    cut_answer,
)
from dispatcher.core.gateway.server_overload import LOOKED_AT_BYTES
from dispatcher.core.requests.headers import QUEUE_DURATION
from dispatcher.forward.transport import Prepared, Progress, Wire
from dispatcher.forward.unpack import unpacked
from dispatcher.ports.network_errors import addressed

ERRORS = (aiohttp.ClientError, OSError)
"""All that a network or a server can do to us."""
_LONGEST_S = 86_400.0
_CLOSED_BY_PEER = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


async def exchange(
    wire: Wire, request: Prepared, current: Progress, limit_bytes: int, *, who: str = GATEWAY
) -> Outcome:
    """Send and read the answer. The time limit is the caller's. `who` answers, in words."""
    while True:
        try:
            response = await wire.send(request)
            break
        except ERRORS as error:
            if current.unsent:
                return Unsent()
            if current.reused and isinstance(error, _CLOSED_BY_PEER):
                current.fresh, current.reused, current.connected_at = True, False, None
                continue
            if current.connected_at is None:
                wire.connector.close_idle(0)  # they lead to what is not there any more
            if current.connected_at is None or _is_tls(error):
                return Unreachable(f"no connection: {addressed(error)}")
            return Failed(f"no answer: {addressed(error)}")
    stream, headers = response.body, _plain(response.raw_headers)
    if QUEUE_DURATION in headers:
        current.queued_s = _seconds_of(headers[QUEUE_DURATION])
    if current.token_header:
        current.token = headers.get(current.token_header, "")
    chunks: list[bytes] = []
    try:
        body = await read(headers, stream, limit_bytes, chunks, current)
    except ERRORS as error:
        said = cut_answer(response.status_code, headers, _end_of(chunks))
        return said or Failed(f"the answer ({response.status_code}) broke off: {addressed(error)}")
    finally:
        await stream.aclose()
    if body is None:
        return TooLarge(response.status_code, limit_bytes)
    return classify(response.status_code, headers, body, time.time(), who=who)


def _plain(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by name in lower case. Repeated ones are joined."""
    plain: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.lower().decode("latin-1"), raw_value.decode("latin-1")
        plain[name] = f"{plain[name]}, {value}" if name in plain else value
    return plain


async def read(
    headers: Mapping[str, str],
    stream: AsyncIterable[bytes],
    limit_bytes: int,
    chunks: list[bytes],
    current: Progress,
) -> bytes | None:
    """Return the body, decoded. `None` if it is larger than the limit.

    The bytes are appended to `chunks` as they arrive, so that the beginning of a body that breaks off is
    known. `current` makes room for them.
    """
    length = headers.get("content-length", "")
    if length.isdecimal():
        if int(length) > limit_bytes:
            return None
        await current.make_room(int(length))
    size = 0
    async for chunk in stream:
        size += len(chunk)
        if size > limit_bytes:
            return None
        chunks.append(chunk)
        await current.make_room(size)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if content_encoding := headers.get("content-encoding"):
        await current.make_room(limit_bytes)  # the decoded size is not known in advance
        unpacked_body = await unpacked(body, content_encoding, limit_bytes)
        if current.hold is not None and unpacked_body is not None:
            current.hold.shrink(len(unpacked_body))
        return unpacked_body
    return body


def _seconds_of(milliseconds: str) -> float | None:
    """Return the time in seconds. `None` if it is no number, or no time that a request can have waited."""
    try:
        seconds = float(milliseconds) / 1000
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _LONGEST_S else None


def _end_of(chunks: Sequence[bytes]) -> bytes:
    """Return the last bytes of a body that broke off, about as many as are searched for an error."""
    end: list[bytes] = []
    size = 0
    for chunk in reversed(chunks):
        end.append(chunk)
        size += len(chunk)
        if size >= LOOKED_AT_BYTES:
            break
    return b"".join(reversed(end))


def _is_tls(error: BaseException | None) -> bool:
    """A refusal by TLS that comes after the connection, as TLS 1.3 has it for client certificates."""
    seen = 0
    while error is not None and seen < 5:
        if isinstance(error, ssl.SSLError):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False
