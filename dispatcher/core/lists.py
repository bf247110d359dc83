"""Which lists a producer may have its result put into: patterns, `*` stands for any characters. Pure."""

from __future__ import annotations

from collections.abc import Iterable

OURS = "batch-results:*"
"""The lists of our own client, one for each."""


def usual(queue: str, results: str) -> tuple[str, ...]:
    """What is allowed where the operator says nothing: the lists of our client; those that begin with the
    default list's name (each processor of llm-d's batch gateway has one); names with the queue's hash tag."""
    head, brace, rest = queue.partition("{")
    tag = rest.partition("}")[0] if brace else head
    return OURS, f"{results}:*", f"*{{{tag}}}*"


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
