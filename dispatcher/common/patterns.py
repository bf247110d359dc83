"""Patterns of names in the settings. `*` stands for any characters; every other character stands for
itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

MAX_PATHS = 256
"""Number of paths whose rule a `RuleFinder` remembers. Paths come from producers."""


class _RuleForPaths(Protocol):
    @property
    def paths(self) -> tuple[str, ...]: ...


R = TypeVar("R", bound=_RuleForPaths)


class RuleFinder(Generic[R]):
    """Finds the first rule with a pattern for a path, and remembers the rules of some paths."""

    def __init__(self, rules: Sequence[R]) -> None:
        self._rules = rules
        self._rule_by_path: dict[str, R | None] = {}

    def __len__(self) -> int:
        """Return the number of remembered paths."""
        return len(self._rule_by_path)

    def find_rule(self, path: str) -> R | None:
        """Return the first rule that applies to a path."""
        try:
            return self._rule_by_path[path]
        except KeyError:
            pass
        if len(self._rule_by_path) >= MAX_PATHS:
            self._rule_by_path.clear()
        found = next((rule for rule in self._rules if matches_any(rule.paths, path)), None)
        self._rule_by_path[path] = found
        return found


def matches_any(patterns: Iterable[str], name: str) -> bool:
    return any(matches_pattern(pattern, name) for pattern in patterns)


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern. The time grows with the length of the name only, regardless of
    the number of asterisks."""
    head, *parts = pattern.split("*")
    if not parts:
        return name == head
    *between, tail = parts
    if not name.startswith(head):
        return False
    at = len(head)
    for part in between:
        # The leftmost match suffices: it leaves the most characters for the parts that follow.
        position = name.find(part, at)
        if position < 0:
            return False
        at = position + len(part)
    return len(name) - len(tail) >= at and name.endswith(tail)


def patterns_overlap(pattern: str, other_pattern: str) -> bool:
    """Return whether some name matches both patterns."""
    visited: set[tuple[int, int]] = set()
    left = [(0, 0)]
    while left:
        at = left.pop()
        # A state is a pair of positions. Each is visited once, so the search ends despite the asterisks.
        if at in visited:
            continue
        visited.add(at)
        here, there = at
        mine, theirs = pattern[here : here + 1], other_pattern[there : there + 1]
        if not mine and not theirs:
            return True
        if mine == "*":  # it matches nothing more, or the next character of the other pattern
            left += [(here + 1, there), *([(here, there + 1)] if theirs else [])]
        elif theirs == "*":
            left += [(here, there + 1), *([(here + 1, there)] if mine else [])]
        elif mine == theirs:
            left.append((here + 1, there + 1))
    return False
