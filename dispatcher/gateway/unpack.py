"""Undo the content codings of an answer, in steps between which other tasks run.

The dispatcher asks for no coding (`accept-encoding: identity`). A server that sends one nevertheless may
send a compression bomb, or any number of gzip members and layers. Therefore all of them are bounded, and the
work is linear in the bytes read and written. No thread does the work: a thread would go on after its attempt
has ended, and could delay the end of the process.
"""

from __future__ import annotations

import asyncio
import zlib

MAX_CODINGS = 2
"""Largest number of codings, one over the other."""
MAX_MEMBERS = 16
"""Largest number of members in one gzip body."""
STEP_INPUT_BYTES = 65_536
"""Input of one step."""
STEP_OUTPUT_BYTES = 262_144
"""Largest output of one step. A step takes one or two milliseconds."""


async def decode_content(body: bytes, content_encoding: str, limit_bytes: int) -> bytes | None:
    """Return the body without its codings. `None` if it is larger than the limit.

    Raises OSError if the codings cannot be undone.
    """
    names = [name.strip() for name in content_encoding.lower().split(",")]
    codings = [name for name in names if name not in ("identity", "")]
    if len(codings) > MAX_CODINGS:
        raise OSError(f"content-encoding: {len(codings)} codings, one over the other")
    for coding in reversed(codings):
        decoded = await _undo_coding(body, coding, limit_bytes)
        if decoded is None:
            return None
        body = decoded
    return body


async def _undo_coding(body: bytes, coding: str, limit_bytes: int) -> bytes | None:
    if not body:
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise OSError(f"content-encoding {coding[:40]!r}, which we did not ask for")
    # "deflate" means the zlib format (RFC 9110), but some servers send raw deflate. The low four bits of
    # the first byte tell the two apart: they are 8 in a zlib header. 47 is 32 + 15: gzip or zlib by header.
    wbits = -15 if coding == "deflate" and body[0] & 0x0F != 8 else 47
    packed, position = memoryview(body), 0
    parts: list[bytes] = []
    size = members = 0
    inflate = None
    while inflate is not None or position < len(packed):
        if inflate is None:
            members += 1
            if members > MAX_MEMBERS:
                raise OSError(f"content-encoding {coding}: more than {MAX_MEMBERS} members")
            inflate = zlib.decompressobj(wbits)
        step = packed[position : position + STEP_INPUT_BYTES]
        try:
            part = inflate.decompress(step, STEP_OUTPUT_BYTES)
        except zlib.error as error:
            raise OSError(f"content-encoding {coding}: {error}") from error
        # The rest is input beyond the output bound, or the beginning of the next gzip member.
        position += len(step) - len(inflate.unconsumed_tail) - len(inflate.unused_data)
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
