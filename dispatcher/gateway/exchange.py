"""Perform one HTTP exchange: send a request, read and decode the answer, and classify it as an Outcome.

A kept-alive connection that breaks before an answer only shows that the server had closed it meanwhile.
Such a request is sent once more on a new connection.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence

import aiohttp

from dispatcher.common.network_errors import describe_error_with_address, is_connection_reset
from dispatcher.gateway.transport import AttemptProgress, PreparedRequest, Transport
from dispatcher.gateway.unpack import decode_content
from dispatcher.requests.headers import QUEUE_DURATION
from dispatcher.requests.outcomes.outcome import (
    GATEWAY_NAME,
    Failed,
    FailureKind,
    Outcome,
    TooLarge,
    Unreachable,
    Unsent,
    classify_answer,
    classify_cut_answer,
)
from dispatcher.requests.outcomes.server_overload import MAX_INSPECTED_BYTES

NETWORK_ERRORS = (aiohttp.ClientError, OSError)
"""Exceptions that a failing network or server can cause."""
_MAX_QUEUED_S = 86_400.0
_CLOSED_BY_PEER = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


async def send_and_read(
    transport: Transport,
    request: PreparedRequest,
    progress: AttemptProgress,
    limit_bytes: int,
    *,
    peer: str = GATEWAY_NAME,
) -> Outcome:
    """Send the request and read the answer. The caller sets the time limit.

    `peer` describes the server in messages.
    """
    while True:
        try:
            response = await transport.send(request, progress)
            break
        except NETWORK_ERRORS as error:
            if progress.is_unsent:
                return Unsent()
            if progress.is_reused and isinstance(error, _CLOSED_BY_PEER):
                # The server may close an idle connection at the moment when the request is written. The
                # second try is on a new connection, so that this loop runs twice at most.
                progress.needs_new_connection, progress.is_reused, progress.connected_at = True, False, None
                continue
            if progress.connected_at is None:
                # The server takes no new connection, so the idle ones lead to a server that is gone.
                transport.connector.close_idle(0)
            # A TLS 1.3 server rejects a client certificate only after the connection is established. That is
            # no failure of the request.
            if progress.connected_at is None or _is_tls_error(error):
                return Unreachable(f"no connection: {describe_error_with_address(error)}")
            kind = FailureKind.CONNECTION_RESET if is_connection_reset(error) else FailureKind.NO_ANSWER
            return Failed(f"no answer: {describe_error_with_address(error)}", kind=kind)
    headers = _join_headers(response.raw_headers)
    if QUEUE_DURATION in headers:
        progress.queued_s = _parse_milliseconds(headers[QUEUE_DURATION])
    if progress.token_header:
        progress.token = headers.get(progress.token_header, "")
    chunks = [] if progress.received is None else progress.received
    try:
        async with response:
            body = await read_body(headers, response.content.iter_any(), limit_bytes, chunks, progress)
    except NETWORK_ERRORS as error:
        # The part that arrived may say why the answer was cut: an evicted stream, for example.
        outcome = classify_cut_answer(response.status, headers, _join_tail(chunks))
        return outcome or Failed(
            f"the answer ({response.status}) broke off: {describe_error_with_address(error)}",
            kind=FailureKind.BROKEN_OFF,
        )
    if body is None:
        return TooLarge(response.status, limit_bytes)
    return classify_answer(response.status, headers, body, time.time(), answered_by=peer)


def _join_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by name in lower case. Values of a repeated header are joined with a comma."""
    plain: dict[str, str] = {}
    for raw_name, raw_value in headers:
        name, value = raw_name.lower().decode("latin-1"), raw_value.decode("latin-1")
        plain[name] = f"{plain[name]}, {value}" if name in plain else value
    return plain


async def read_body(
    headers: Mapping[str, str],
    stream: AsyncIterable[bytes],
    limit_bytes: int,
    chunks: list[bytes],
    progress: AttemptProgress,
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
        await progress.make_room(int(length))
    size = 0
    async for chunk in stream:
        size += len(chunk)
        if size > limit_bytes:
            return None
        chunks.append(chunk)
        await progress.make_room(size)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if content_encoding := headers.get("content-encoding"):
        await progress.make_room(limit_bytes)  # the decoded size is not known in advance
        unpacked_body = await decode_content(body, content_encoding, limit_bytes)
        if progress.buffer is not None and unpacked_body is not None:
            progress.buffer.shrink_to(len(unpacked_body))
        return unpacked_body
    return body


def _parse_milliseconds(milliseconds: str) -> float | None:
    """Return the time in seconds. `None` if the text is no number, or no time that a request can wait."""
    try:
        seconds = float(milliseconds) / 1000
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _MAX_QUEUED_S else None


def _join_tail(chunks: Sequence[bytes]) -> bytes:
    """Return the last bytes of a body that broke off, about as many as are searched for an error."""
    end: list[bytes] = []
    size = 0
    for chunk in reversed(chunks):
        end.append(chunk)
        size += len(chunk)
        if size >= MAX_INSPECTED_BYTES:
            break
    return b"".join(reversed(end))


def _is_tls_error(error: BaseException | None) -> bool:
    """Return True if a TLS error caused this error, such as a rejected client certificate in TLS 1.3."""
    depth = 0
    while error is not None and depth < 5:  # a chain of causes may be circular
        if isinstance(error, ssl.SSLError):
            return True
        error, depth = error.__cause__ or error.__context__, depth + 1
    return False
