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

MAX_PATTERN_CHARS = 500
MAX_OPEN_PLACES = 2
"""Largest number of repeats and choices that are left open. With a name of 256 bytes, matching then takes
milliseconds."""

_NON_ASCII = 128
"""Code that stands for all characters beyond ASCII."""
_ALL_CHARACTERS = frozenset(range(_NON_ASCII + 1))
_LOOK_ALIKE_LETTERS = {*map(ord, "ksi")}
"""Letters that a character beyond ASCII equals if case is ignored, such as `ſ` for `s`."""
_parser: Any = getattr(re, "_parser")  # noqa: B009 -- it is of no stub, and has no public name since 3.11


class _UnsafePatternError(Exception):
    """The pattern cannot be used. The message is the end of a sentence that says why."""


def pattern_fault(pattern: str) -> str | None:
    """Return why a pattern cannot be used for names, as the end of a sentence, or `None` if it can be used.
    Never raises."""
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"is longer than {MAX_PATTERN_CHARS} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            matches_empty = re.compile(pattern).fullmatch("") is not None
            tree = _parser.parse(pattern)
        if matches_empty:
            return "matches the empty name: say what must stand in it"
        check = _PatternCheck()
        check.check_sequence(tree, frozenset())
    except re.error as error:
        where = "" if error.pos is None else f", at character {error.pos + 1}"
        return f"is no regular expression: {error.msg}{where}"
    except (OverflowError, RecursionError):
        return "is no regular expression that can be read: it repeats too often, or nests too deep"
    except Warning as error:
        return f"is doubtful: {error}; put a backslash before [, -, &, ~ and | in a set"
    except _UnsafePatternError as refused:
        return str(refused)
    if check.open_count > MAX_OPEN_PLACES:
        return (
            f"leaves open where {check.open_count} of its repeats and choices end, {MAX_OPEN_PLACES} at "
            "most: let each be followed by what it cannot match itself, as - ends [^-]+"
        )
    return None


@dataclass(frozen=True, slots=True)
class _FirstCharacters:
    """Characters with which a match of a part of a pattern may begin."""

    characters: frozenset[int]
    can_be_empty: bool
    """True if the part may match nothing."""


class _PatternCheck:
    """Walk through a parsed pattern that counts the places which the next character does not decide."""

    def __init__(self) -> None:
        self.open_count = 0
        self._repeat_depth = 0
        """Number of repeats around the current place."""
        self._is_lookahead = False
        """True while only the first characters of a part are computed, and nothing is counted."""

    def check_sequence(self, parts: Sequence[Any], follow: frozenset[int]) -> _FirstCharacters:
        """Check a sequence of parts. `follow` are the characters that may come after it."""
        # Backwards, because what may follow a part depends on the parts after it.
        ahead = _FirstCharacters(frozenset(), True)
        behind = follow
        for operation, argument in reversed(list(parts)):
            part = self._check_part(str(operation), argument, behind)
            first = part.characters | (ahead.characters if part.can_be_empty else frozenset())
            ahead = _FirstCharacters(first, part.can_be_empty and ahead.can_be_empty)
            behind = ahead.characters | (follow if ahead.can_be_empty else frozenset())
        return ahead

    def _check_part(self, operation: str, argument: Any, follow: frozenset[int]) -> _FirstCharacters:
        match operation:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return _FirstCharacters(_possible_characters(operation, argument), False)
            case "SUBPATTERN":
                return self.check_sequence(argument[3], follow)
            case "ATOMIC_GROUP":
                return self.check_sequence(argument, follow)
            case "BRANCH":
                return self._check_choice(argument[1], follow)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                minimum, maximum, repeated = argument
                return self._check_repeat(minimum, maximum, repeated, follow)
            case "AT":
                return _FirstCharacters(frozenset(), True)
            case "ASSERT" | "ASSERT_NOT":
                # A look-around ends before any character, and consumes none itself.
                self.check_sequence(argument[1], _ALL_CHARACTERS)
                return _FirstCharacters(frozenset(), True)
        raise _UnsafePatternError(
            "refers to what a group matched before, which can take very long: leave it out"
        )

    def _check_choice(self, alternatives: Sequence[Any], follow: frozenset[int]) -> _FirstCharacters:
        first_characters = [self.check_sequence(way, follow) for way in alternatives]
        taken: frozenset[int] = frozenset()
        # Two alternatives that begin with the same character cannot be told apart by the next one.
        for way in first_characters:
            first = way.characters | (follow if way.can_be_empty else frozenset())
            if first & taken:
                self._count_open("a choice between alternatives that begin alike")
            taken |= first
        return _FirstCharacters(
            frozenset().union(*(way.characters for way in first_characters)),
            any(way.can_be_empty for way in first_characters),
        )

    def _check_repeat(
        self, minimum: int, maximum: Any, repeated: Sequence[Any], follow: frozenset[int]
    ) -> _FirstCharacters:
        is_repeated = maximum == _parser.MAXREPEAT or maximum > 1
        outer_depth, self._repeat_depth = self._repeat_depth, self._repeat_depth + is_repeated
        # A turn of the repeat is followed by the next turn, or by what follows the whole repeat.
        if is_repeated and not self._is_lookahead:
            self._is_lookahead = True
            turn_follow = follow | self.check_sequence(repeated, _ALL_CHARACTERS).characters
            self._is_lookahead = False
        else:
            turn_follow = follow
        turn = self.check_sequence(repeated, turn_follow)
        self._repeat_depth = outer_depth
        if is_repeated and turn.can_be_empty:
            raise _UnsafePatternError("repeats what may match nothing, which can take exponential time")
        # With a fixed count, the end of the repeat needs no decision.
        if minimum != maximum and turn.characters & follow:
            self._count_open("a repeat")
        return _FirstCharacters(turn.characters, turn.can_be_empty or minimum == 0)

    def _count_open(self, description: str) -> None:
        if self._is_lookahead:
            return
        if self._repeat_depth:
            raise _UnsafePatternError(
                f"has {description} inside a repeat, as (a+)+ has, which can take exponential time: let "
                "each part end where the next begins, as in (?:[.][0-9]+)*"
            )
        self.open_count += 1


def _possible_characters(operation: str, argument: Any) -> frozenset[int]:
    """Return the characters that a part may match, in both cases, because the pattern may ignore case."""
    match operation:
        case "LITERAL":
            characters = _both_cases(argument)
        case "NOT_LITERAL":
            # Keeps the other case, because the pattern may be case-sensitive.
            characters = _ALL_CHARACTERS - {argument}
        case "RANGE":
            low, high = argument
            within = range(low, min(high, _NON_ASCII - 1) + 1)
            characters = frozenset().union(
                *map(_both_cases, within), {_NON_ASCII} if high >= _NON_ASCII else set()
            )
        case "IN":
            characters = frozenset().union(*(_possible_characters(str(each), of) for each, of in argument))
            if str(argument[0][0]) == "NEGATE":
                plain = [(str(each), of) for each, of in argument[1:]]
                characters = _ALL_CHARACTERS - {
                    of for each, of in plain if each == "LITERAL" and of < _NON_ASCII
                }
                for each, of in plain:
                    if each == "RANGE":
                        characters -= {*range(of[0], min(of[1], _NON_ASCII - 1) + 1)}
                    elif each == "CATEGORY":
                        characters -= _category_characters(str(of)) - {_NON_ASCII}
        case "CATEGORY":
            characters = _category_characters(str(argument))
        case _:  # ANY, NEGATE
            characters = frozenset() if operation == "NEGATE" else _ALL_CHARACTERS
    return characters


def _both_cases(code: int) -> frozenset[int]:
    if code >= _NON_ASCII:
        return frozenset({_NON_ASCII})
    letter = chr(code)
    cases = {ord(letter.lower()), ord(letter.upper())}
    return frozenset(cases | ({_NON_ASCII} if cases & _LOOK_ALIKE_LETTERS else set()))


_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


def _category_characters(name: str) -> frozenset[int]:
    """Return the characters of a category, such as CATEGORY_DIGIT or CATEGORY_NOT_DIGIT."""
    negated = "_NOT_" in name
    known = re.compile(_CATEGORIES[name.rpartition("_")[2]])
    characters = {code for code in range(_NON_ASCII) if (known.match(chr(code)) is None) == negated}
    return frozenset({*characters, _NON_ASCII})
