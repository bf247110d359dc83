"""Send one GET request without an HTTP library.

Importing an HTTP library takes longer than most CLI commands take altogether.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RawResponse:
    """Answer to a GET request. The body may be incomplete."""

    status: int
    headers: Mapping[str, str]
    """Header values by name in lower case."""
    body: bytes


async def send_get(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    path: str,
    headers: Mapping[str, str],
    *,
    body_max_bytes: int,
    requires_whole_body: bool = True,
) -> RawResponse:
    """Send one GET request on a connection that cannot be used again. The caller sets the time limit.

    `body_max_bytes` bounds the body. If `requires_whole_body` is true, a longer body is an error; otherwise
    the first bytes of the body are enough. Raises OSError, and ValueError if the answer is too long or not
    HTTP.
    """
    # A server must not answer an HTTP/1.0 request with a chunked body, which this module cannot decode.
    version = "1.0" if requires_whole_body else "1.1"
    lines = [f"GET {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode("latin-1"))
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the connection was closed") from error
    except asyncio.LimitOverrunError as error:
        raise ValueError("its head does not end") from error
    match = re.match(r"HTTP/1\.[01] (\d{3})\b", head)
    if match is None:
        raise ValueError("its first line is none of HTTP/1")
    pairs = (line.partition(":") for line in head.split("\r\n")[1:])
    response_headers = {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}
    length = response_headers.get("content-length", "")
    size = int(length) if length.isdecimal() and len(length) < 10 else None
    if requires_whole_body:
        body = await _read_whole_body(reader, body_max_bytes, size)
    else:
        body = await reader.read(body_max_bytes if size is None else min(size, body_max_bytes))
    # The last chunk of an empty chunked body must not be taken for content.
    chunks_end = size is None and body.startswith(b"0\r\n")
    return RawResponse(int(match[1]), response_headers, b"" if chunks_end else body)


async def _read_whole_body(reader: asyncio.StreamReader, max_bytes: int, size: int | None) -> bytes:
    try:
        # One byte more than allowed is read, so that a body that is too long shows.
        body = await reader.readexactly(max_bytes + 1 if size is None else min(size, max_bytes + 1))
    except asyncio.IncompleteReadError as error:
        if size is not None:
            raise ValueError("it ended before its length was reached") from error
        body = error.partial
    if len(body) > max_bytes:
        raise ValueError("it is too long")
    return body
