"""Escaped surrogates in JSON: `\\ud800` alone is allowed by its grammar, and refused by most decoders."""

from __future__ import annotations

import re

_SURROGATE = re.compile(rb"(?<!\\)((?:\\\\)*)\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""After a whole number of escaped backslashes, so that it is an escape and no text."""


def without_surrogates(text: bytes) -> bytes:
    """With each, in a pair or not, replaced by an escape of the same length: what stands where stays."""
    return _SURROGATE.sub(rb"\1\\ufffd", text)
