"""Text from other parties in a form that is safe to print.

Ids, reasons, error messages and labels come from producers, gateways and metrics endpoints. Printed
unchanged, they could colour, move and retitle an operator's terminal, or forge a line of the log.
"""

from __future__ import annotations


def plain(text: str, keep: str = "") -> str:
    """Return the text with every unprintable character (controls, line ends, direction marks, lone
    surrogates) as its escape such as `\\x1b`. Characters in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escape(char) for char in text)


def shortened(text: str, most: int) -> str:
    """Return at most this many characters of the text. The last one is an ellipsis if something was cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
