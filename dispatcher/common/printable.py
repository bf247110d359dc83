"""Text from other parties in a form that is safe to print.

Ids, reasons, error messages and labels come from producers, gateways and metrics endpoints. Printed
unchanged, they could colour, move and retitle an operator's terminal, or forge a line of the log.
"""

from __future__ import annotations


def escape_unprintable(text: str, keep: str = "") -> str:
    """Return the text with every unprintable character (controls, line ends, direction marks, lone
    surrogates) as its escape such as `\\x1b`. Characters in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escape_char(char) for char in text)


def truncate_text(text: str, max_chars: int) -> str:
    """Return at most this many characters of the text. The last one is an ellipsis if something was cut."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _escape_char(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
