"""The keys of a member's two outer levels, of broken members too: which stand there twice. Pure."""

from __future__ import annotations

import re

import msgspec

_MAX_TOKENS = 50_000
_PAYLOAD = (2, "data", "payload")

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},:"]', re.DOTALL)
"""A string, or one structural character; a lone quote is a string that never ends."""


def scan(text: bytes, payload: bytes) -> dict[tuple[str, str], list[str | None]]:
    """Every key of the two outer levels of an object, by (section, name), with its string values.

    A value that is no string is None. `payload`: passed over where it stands. Reads as far as the text makes
    sense, at most 50,000 tokens and without recursion, so that it serves for broken members too.
    """
    found: dict[tuple[str, str], list[str | None]] = {}
    depth, section, name, is_value, keyed = 0, "", "", False, True
    at = 0
    for _ in range(_MAX_TOKENS):
        match = _TOKEN.search(text, at)
        if match is None or (token := match[0]) == b'"':
            break
        at = match.end()
        if token in b"[{":
            if payload and (depth, section, name) == _PAYLOAD and text.startswith(payload, match.start()):
                at = match.start() + len(payload)
                continue
            depth += 1
            if depth <= 2:
                section, keyed, is_value = name, token == b"{", False
        elif token in b"]}":
            depth -= 1
            if depth == 1:
                section, keyed = "", True
            elif depth <= 0:
                break
        elif depth > 2 or not keyed:
            continue
        elif token in b":,":
            is_value = token == b":"
        elif is_value:
            found.setdefault((section, name), [None])[-1] = _string(token)
        else:
            name = _string(token) or ""
            found.setdefault((section, name), []).append(None)
    return found


def _string(token: bytes) -> str | None:
    try:
        return msgspec.json.decode(token, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
