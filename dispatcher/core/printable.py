"""Text of others, as it may be printed. Pure.

Ids, reasons, error messages and labels come from producers, gateways and metrics endpoints. Printed as they
are, they could colour, move and retitle an operator's terminal, or forge a line of their own.
"""

from __future__ import annotations


def plain(text: str, keep: str = "") -> str:
    """The text with whatever is no printable character (controls, line ends, marks of direction, halves of
    surrogates) as its escape: `\\x1b`. `keep`: such characters that may stay.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escape(char) for char in text)


def shortened(text: str, most: int) -> str:
    """So many characters of it at the most, the last an ellipsis where something is left out."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
