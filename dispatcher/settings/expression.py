"""Check of regular expressions in the settings, which rejects patterns that could take very long to match.

Model servers choose the names that are matched, and Python's matcher backtracks over all alternatives. So the
end of each repeat and the branch of each choice must be decided by the next character. At most two places in
a pattern may be left open, and none inside a repeat, where each turn would double the number of alternatives.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CHARS_MOST = 500
OPEN_MOST = 2
"""Largest number of repeats and choices that are left open. With a name of 256 bytes, matching then takes
milliseconds."""

_OTHER = 128
"""Code that stands for all characters beyond ASCII."""
_ALL = frozenset(range(_OTHER + 1))
_LOOK_ALIKE = {*map(ord, "ksi")}
"""Letters that a character beyond ASCII equals if case is ignored, such as `ſ` for `s`."""
_parser: Any = getattr(re, "_parser")  # noqa: B009 -- it is of no stub, and has no public name since 3.11


class _UnboundedError(Exception):
    """The pattern cannot be used. The message is the end of a sentence that says why."""


def fault_of(pattern: str) -> str | None:
    """Return why a pattern cannot be used for names, as the end of a sentence, or `None` if it can be used.
    Never raises."""
    if len(pattern) > CHARS_MOST:
        return f"is longer than {CHARS_MOST} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            empty = re.compile(pattern).fullmatch("") is not None
            tree = _parser.parse(pattern)
        if empty:
            return "matches the empty name: say what must stand in it"
        judge = _Judge()
        judge.sequence(tree, frozenset())
    except re.error as error:
        where = "" if error.pos is None else f", at character {error.pos + 1}"
        return f"is no regular expression: {error.msg}{where}"
    except (OverflowError, RecursionError):
        return "is no regular expression that can be read: it repeats too often, or nests too deep"
    except Warning as error:
        return f"is doubtful: {error}; put a backslash before [, -, &, ~ and | in a set"
    except _UnboundedError as refused:
        return str(refused)
    if judge.open > OPEN_MOST:
        return (
            f"leaves open where {judge.open} of its repeats and choices end, {OPEN_MOST} at most: let "
            "each be followed by what it cannot match itself, as - ends [^-]+"
        )
    return None


@dataclass(frozen=True, slots=True)
class _Begins:
    """Characters with which a match of a part of a pattern may begin."""

    first: frozenset[int]
    empty: bool
    """True if the part may match nothing."""


class _Judge:
    """Walk through a parsed pattern that counts the places which the next character does not decide."""

    def __init__(self) -> None:
        self.open = 0
        self._repeats = 0
        """Number of repeats around the current place."""
        self._ahead = False
        """True while only the first characters of a part are computed, and nothing is counted."""

    def sequence(self, parts: Sequence[Any], follow: frozenset[int]) -> _Begins:
        """Check a sequence of parts. `follow` are the characters that may come after it."""
        # Backwards, because what may follow a part depends on the parts after it.
        ahead = _Begins(frozenset(), True)
        behind = follow
        for operation, argument in reversed(list(parts)):
            part = self._part(str(operation), argument, behind)
            first = part.first | (ahead.first if part.empty else frozenset())
            ahead = _Begins(first, part.empty and ahead.empty)
            behind = ahead.first | (follow if ahead.empty else frozenset())
        return ahead

    def _part(self, operation: str, argument: Any, follow: frozenset[int]) -> _Begins:
        match operation:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return _Begins(_characters(operation, argument), False)
            case "SUBPATTERN":
                return self.sequence(argument[3], follow)
            case "ATOMIC_GROUP":
                return self.sequence(argument, follow)
            case "BRANCH":
                return self._choice(argument[1], follow)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, what = argument
                return self._repeat(least, most, what, follow)
            case "AT":
                return _Begins(frozenset(), True)
            case "ASSERT" | "ASSERT_NOT":
                # A look-around ends before any character, and consumes none itself.
                self.sequence(argument[1], _ALL)
                return _Begins(frozenset(), True)
        raise _UnboundedError("refers to what a group matched before, which can take very long: leave it out")

    def _choice(self, ways: Sequence[Any], follow: frozenset[int]) -> _Begins:
        found = [self.sequence(way, follow) for way in ways]
        seen: frozenset[int] = frozenset()
        # Two alternatives that begin with the same character cannot be told apart by the next one.
        for way in found:
            first = way.first | (follow if way.empty else frozenset())
            if first & seen:
                self._left_open("a choice between alternatives that begin alike")
            seen |= first
        return _Begins(frozenset().union(*(way.first for way in found)), any(way.empty for way in found))

    def _repeat(self, least: int, most: Any, what: Sequence[Any], follow: frozenset[int]) -> _Begins:
        many = most == _parser.MAXREPEAT or most > 1
        around, self._repeats = self._repeats, self._repeats + many
        # A turn of the repeat is followed by the next turn, or by what follows the whole repeat.
        if many and not self._ahead:
            self._ahead = True
            follow_of_one = follow | self.sequence(what, _ALL).first
            self._ahead = False
        else:
            follow_of_one = follow
        one = self.sequence(what, follow_of_one)
        self._repeats = around
        if many and one.empty:
            raise _UnboundedError("repeats what may match nothing, which can take exponential time")
        # With a fixed count, the end of the repeat needs no decision.
        if least != most and one.first & follow:
            self._left_open("a repeat")
        return _Begins(one.first, one.empty or least == 0)

    def _left_open(self, what: str) -> None:
        if self._ahead:
            return
        if self._repeats:
            raise _UnboundedError(
                f"has {what} inside a repeat, as (a+)+ has, which can take exponential time: let each part "
                "end where the next begins, as in (?:[.][0-9]+)*"
            )
        self.open += 1


def _characters(operation: str, argument: Any) -> frozenset[int]:
    """Return the characters that a part may match, in both cases, because the pattern may ignore case."""
    match operation:
        case "LITERAL":
            found = _either_case(argument)
        case "NOT_LITERAL":
            # Keeps the other case, because the pattern may be case-sensitive.
            found = _ALL - {argument}
        case "RANGE":
            low, high = argument
            within = range(low, min(high, _OTHER - 1) + 1)
            found = frozenset().union(*map(_either_case, within), {_OTHER} if high >= _OTHER else set())
        case "IN":
            found = frozenset().union(*(_characters(str(each), of) for each, of in argument))
            if str(argument[0][0]) == "NEGATE":
                plain = [(str(each), of) for each, of in argument[1:]]
                found = _ALL - {of for each, of in plain if each == "LITERAL" and of < _OTHER}
                for each, of in plain:
                    if each == "RANGE":
                        found -= {*range(of[0], min(of[1], _OTHER - 1) + 1)}
                    elif each == "CATEGORY":
                        found -= _of_category(str(of)) - {_OTHER}
        case "CATEGORY":
            found = _of_category(str(argument))
        case _:  # ANY, NEGATE
            found = frozenset() if operation == "NEGATE" else _ALL
    return found


def _either_case(code: int) -> frozenset[int]:
    if code >= _OTHER:
        return frozenset({_OTHER})
    letter = chr(code)
    cases = {ord(letter.lower()), ord(letter.upper())}
    return frozenset(cases | ({_OTHER} if cases & _LOOK_ALIKE else set()))


_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


def _of_category(name: str) -> frozenset[int]:
    """Return the characters of a category, such as CATEGORY_DIGIT or CATEGORY_NOT_DIGIT."""
    negated = "_NOT_" in name
    known = re.compile(_CATEGORIES[name.rpartition("_")[2]])
    found = {code for code in range(_OTHER) if (known.match(chr(code)) is None) == negated}
    return frozenset({*found, _OTHER})
