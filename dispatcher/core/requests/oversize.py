"""Members that are too long: how much of one may be what, and what is kept of one that is not moved."""

from __future__ import annotations

import re

ENVELOPE_BYTES = 65_536
"""All of a member but its payload may have so many: decoded they take some 25 times as much, and time."""
HEAD_BYTES = 16_384
"""So much is kept of a member that is too long to be moved: where its id stands in it, it can be answered.
lua/common.lua cuts in the same way."""

_CUT = re.compile(rb"\x00cut:(\d{1,20})$")
_CUT_BYTES = 32


def cut(member: bytes) -> bytes:
    """What is kept: the head, and how long the whole was."""
    return member[:HEAD_BYTES] + b"\0cut:%d" % len(member)


def bytes_before_cut(member: bytes) -> int | None:
    """How long it was; None for one that is whole. (No whole one ends like that and is JSON.)"""
    if member.endswith(b"}"):  # as whole ones do, mostly
        return None
    found = _CUT.search(member, max(0, len(member) - _CUT_BYTES))
    return None if found is None else int(found[1])
