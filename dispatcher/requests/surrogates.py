"""Escaped surrogates in JSON. The grammar allows `\\ud800` alone, but most decoders reject it."""

from __future__ import annotations

import re

_SURROGATE = re.compile(rb"(?<!\\)((?:\\\\)*)\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""An escape of a surrogate. The even number of backslashes before it ensures that it is an escape and not
text."""


def replace_surrogates(text: bytes) -> bytes:
    """Return the text with each surrogate, in a pair or not, replaced by an escape of the same length, so
    that positions stay the same."""
    return _SURROGATE.sub(rb"\1\\ufffd", text)
