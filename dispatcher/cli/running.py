"""The dispatcher that runs on this machine, asked at its admin port."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from dispatcher.settings import AdminSettings
from dispatcher.settings.files import TokenFileError, read_token

WAIT_S = 2.0
LONGEST = 1 << 20
"""Bytes of an answer."""


async def running(admin: AdminSettings) -> tuple[dict[str, Any] | None, str | None]:
    """/status of the dispatcher that runs by a configuration on this machine; or why it is not known."""
    token = ""
    if admin.token_file:
        try:
            token = read_token(admin.token_file)
        except TokenFileError as error:
            return None, f"admin.token_file: {error}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)  # noqa: S104 - what is listened on
    try:
        async with asyncio.timeout(WAIT_S):
            status, body = await _get(host, admin.port, token)
        found = json.loads(body) if status == 200 else None
    except OSError:
        return None, f"nobody on admin.port {admin.port} of this machine"
    except ValueError:
        status, found = 0, None
    if status == 401:
        other = "another token than admin.token_file has"
        wanted = other if admin.token_file else "a token; admin.token_file names none"
        return None, f"admin.port {admin.port} wants {wanted}"
    if isinstance(found, dict) and "explanation" in found:
        return found, None
    return None, f"what answers on admin.port {admin.port} is no dispatcher"


async def _get(host: str, port: int, token: str) -> tuple[int, bytes]:
    """One exchange without an HTTP library: they take longer to import than `check` takes for all it does."""
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST)
    try:
        lines = ["GET /status HTTP/1.0", f"Host: {host}"]
        lines += [f"Authorization: Bearer {token}"] if token else []
        writer.write("\r\n".join([*lines, "", ""]).encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), await _rest(reader)
    except (EOFError, IndexError, asyncio.LimitOverrunError) as error:
        raise ValueError(str(error)) from error
    finally:
        writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        await reader.readexactly(LONGEST)
    except asyncio.IncompleteReadError as whole:
        return whole.partial
    raise ValueError("an answer without end")
