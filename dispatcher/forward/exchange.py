"""Perform one HTTP exchange: send a request, read and decode the answer, and classify it as an Outcome.

A kept-alive connection that breaks before an answer only shows that the server had closed it meanwhile.
Such a request is sent once more on a new connection.
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
"""Exceptions that a failing network or server can cause."""
_LONGEST_S = 86_400.0
_CLOSED_BY_PEER = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


async def exchange(
    wire: Wire, request: Prepared, current: Progress, limit_bytes: int, *, who: str = GATEWAY
) -> Outcome:
    """Send the request and read the answer. The caller sets the time limit.

    `peer` describes the server in messages.
    """
    while True:
        try:
            response = await wire.send(request)
            break
        except ERRORS as error:
            if current.unsent:
                return Unsent()
            if current.reused and isinstance(error, _CLOSED_BY_PEER):
                # The server may close an idle connection at the moment when the request is written. The
                # second try is on a new connection, so that this loop runs twice at most.
                current.fresh, current.reused, current.connected_at = True, False, None
                continue
            if current.connected_at is None:
                # The server takes no new connection, so the idle ones lead to a server that is gone.
                wire.connector.close_idle(0)
            # A TLS 1.3 server rejects a client certificate only after the connection is established. That is
            # no failure of the request.
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
        # The part that arrived may say why the answer was cut: an evicted stream, for example.
        said = cut_answer(response.status_code, headers, _end_of(chunks))
        return said or Failed(f"the answer ({response.status_code}) broke off: {addressed(error)}")
    finally:
        await stream.aclose()
    if body is None:
        return TooLarge(response.status_code, limit_bytes)
    return classify(response.status_code, headers, body, time.time(), who=who)


def _plain(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by name in lower case. Values of a repeated header are joined with a comma."""
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
    """Return the decoded body. `None` if the body is larger than the limit.

    The bytes are appended to `chunks` as they arrive, so that the caller has the beginning of a body that
    breaks off. `progress` reserves the memory for them.
    """
    length = headers.get("content-length", "")
    if length.isdecimal():
        # A body that is announced as too large is rejected before its first byte is read.
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
    """Return the time in seconds. `None` if the text is no number, or no time that a request can wait."""
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
    """Return True if a TLS error caused this error, such as a rejected client certificate in TLS 1.3."""
    seen = 0
    while error is not None and seen < 5:  # a chain of causes may be circular
        if isinstance(error, ssl.SSLError):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False
