"""Names by patterns of the settings: `*` stands for any characters, all else for itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def any_fits(patterns: Iterable[str], name: str) -> bool:
    return any(fits(pattern, name) for pattern in patterns)


def fits(pattern: str, name: str) -> bool:
    """In time that grows with the name, however many asterisks there are."""
    head, *parts = pattern.split("*")
    if not parts:
        return name == head
    *between, tail = parts
    if not name.startswith(head):
        return False
    at = len(head)
    for part in between:
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(name) - len(tail) >= at and name.endswith(tail)
