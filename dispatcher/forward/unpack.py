"""Undo an answer's content codings, in steps between which others get their turn.

We ask for no coding; who sends one nevertheless may send a bomb, or members and layers without end. So there
are bounds on all of them, the work is linear in what comes in and goes out, and it ends with its try: there
is no thread that would go on without it, or hold up the end of the process.
"""

from __future__ import annotations

import asyncio
import zlib

CODINGS_MOST = 2
MEMBERS_MOST = 16
"""Of one gzip body."""
IN_BYTES = 65_536
OUT_BYTES = 262_144
"""Taken and made in one step: a millisecond or two."""


async def unpacked(body: bytes, content_encoding: str, limit_bytes: int) -> bytes | None:
    """The body without its codings; None when it is larger than the limit. Raises OSError when they cannot
    be undone."""
    names = [name.strip() for name in content_encoding.lower().split(",")]
    codings = [name for name in names if name not in ("identity", "")]
    if len(codings) > CODINGS_MOST:
        raise OSError(f"content-encoding: {len(codings)} codings, one over the other")
    for coding in reversed(codings):
        undone = await _undone(body, coding, limit_bytes)
        if undone is None:
            return None
        body = undone
    return body


async def _undone(body: bytes, coding: str, limit_bytes: int) -> bytes | None:
    if not body:
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise OSError(f"content-encoding {coding[:40]!r}, which we did not ask for")
    # "deflate" means zlib's format, but some send the bare one.
    wbits = -15 if coding == "deflate" and body[0] & 0x0F != 8 else 47
    packed, at = memoryview(body), 0
    parts: list[bytes] = []
    size = members = 0
    inflate = None
    while inflate is not None or at < len(packed):
        if inflate is None:
            members += 1
            if members > MEMBERS_MOST:
                raise OSError(f"content-encoding {coding}: more than {MEMBERS_MOST} members")
            inflate = zlib.decompressobj(wbits)
        step = packed[at : at + IN_BYTES]
        try:
            part = inflate.decompress(step, OUT_BYTES)
        except zlib.error as error:
            raise OSError(f"content-encoding {coding}: {error}") from error
        at += len(step) - len(inflate.unconsumed_tail) - len(inflate.unused_data)
        parts.append(part)
        size += len(part)
        if size > limit_bytes:
            return None
        if inflate.eof:
            inflate = None
        elif not step and not part:
            raise OSError(f"content-encoding {coding}: cut short")
        await asyncio.sleep(0)
    return b"".join(parts)
