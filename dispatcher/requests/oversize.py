"""Members that are too long: limits of their parts, and the part that is kept of a member that is not
moved."""

from __future__ import annotations

import re

MAX_ENVELOPE_BYTES = 65_536
"""Largest size of a member without its payload. Decoded it takes about 25 times as much memory, and time."""
KEPT_BYTES = 16_384
"""Number of bytes that are kept of a member that is too long to be moved. If its id is among them, it can be
answered. lua/common.lua cuts in the same way."""

_CUT_MARK = re.compile(rb"\x00cut:(\d{1,20})$")
_CUT_MARK_BYTES = 32


def cut_member(member: bytes) -> bytes:
    """Return what is kept of a member: its first bytes, and its length."""
    return member[:KEPT_BYTES] + b"\0cut:%d" % len(member)


def parse_cut_size(member: bytes) -> int | None:
    """Return the length of the original member. `None` if the member was not cut."""
    if member.endswith(b"}"):  # fast path: most members that were not cut end like this
        return None
    # JSON cannot end like the mark, so a valid member is never mistaken for a cut one.
    match = _CUT_MARK.search(member, max(0, len(member) - _CUT_MARK_BYTES))
    return None if match is None else int(match[1])
