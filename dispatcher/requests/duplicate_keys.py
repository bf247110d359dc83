"""Scan the keys of the two outer levels of a member, also of a malformed one, to find keys that occur
twice."""

from __future__ import annotations

import re

import msgspec

_MAX_TOKENS = 50_000
_PAYLOAD = (2, "data", "payload")

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},:"]', re.DOTALL)
"""A string, or one structural character. A lone quote is a string that never ends."""


def collect_outer_keys(text: bytes, payload: bytes) -> dict[tuple[str, str], list[str | None]]:
    """Return each key of the two outer levels of an object, by (section, name), with its string values.

    A value that is not a string is `None`. If `payload` is not empty, the scan skips it. The scan reads as
    far as the text makes sense, at most 50,000 tokens and without recursion, so that it also works on
    malformed members.
    """
    values_by_key: dict[tuple[str, str], list[str | None]] = {}
    depth, section, name, is_value, keyed = 0, "", "", False, True
    at = 0
    for _ in range(_MAX_TOKENS):
        match = _TOKEN.search(text, at)
        if match is None or (token := match[0]) == b'"':
            break
        at = match.end()
        if token in b"[{":
            # The payload can be megabytes, and none of its keys are in the two outer levels.
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
            values_by_key.setdefault((section, name), [None])[-1] = _decode_string(token)
        else:
            name = _decode_string(token) or ""
            # The value is not known yet: the string that may follow replaces this `None`.
            values_by_key.setdefault((section, name), []).append(None)
    return values_by_key


def _decode_string(token: bytes) -> str | None:
    try:
        return msgspec.json.decode(token, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
