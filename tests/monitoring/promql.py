"""A small PromQL parser that finds the series, matchers and labels that an expression names.

promtool checks whether an expression is valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`)
      | (?P<window>\[[^\]]*\])
      | (?P<number>0x[0-9a-f]+|\d+(?:\.\d*)?(?:e[+-]?\d+|[a-z]+\b)?(?:\d+[a-z]+)*|\.\d+)
      | (?P<word>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<mark>=~|!~|!=|==|<=|>=|[-+*/%^(){},=<>@])""",
    re.VERBOSE | re.IGNORECASE,
)
_KEYWORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan", "start", "end"}
_LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}


@dataclass(frozen=True, slots=True)
class Matcher:
    label: str
    operator: str
    """`=`, `!=`, `=~` or `!~`."""
    value: str


@dataclass(frozen=True, slots=True)
class Selector:
    """A series as an expression names it."""

    name: str
    matchers: tuple[Matcher, ...] = ()


@dataclass(frozen=True, slots=True)
class ParsedExpression:
    """Series, labels and time windows that an expression names."""

    selectors: tuple[Selector, ...]
    labels: frozenset[str]
    """Labels in `by`, `on` and similar clauses."""
    windows: tuple[str, ...]


def parse_expression(expression: str) -> ParsedExpression:
    """Return what an expression names. Raises ValueError at text that is no token."""
    tokens = list(_tokens(expression))
    selectors, labels, windows = [], set[str](), []
    position = 0
    while position < len(tokens):
        kind, text = tokens[position]
        next_text = tokens[position + 1][1] if position + 1 < len(tokens) else ""
        position += 1
        if kind == "window":
            windows.append(text)
        elif kind == "word" and text in _LABEL_LISTS:
            if next_text == "(":
                closing = tokens.index(("mark", ")"), position)
                labels.update(word for kind, word in tokens[position:closing] if kind == "word")
                position = closing + 1
        elif kind == "word" and text not in _KEYWORDS and next_text != "(" and not _is_aggregation(next_text):
            matchers: list[Matcher] = []
            if next_text == "{":
                closing = tokens.index(("mark", "}"), position)
                matchers = list(_matchers(tokens[position + 1 : closing]))
                position = closing + 1
            selectors.append(Selector(text, tuple(matchers)))
        elif (kind, text) == ("mark", "{"):
            raise ValueError(f"a selector without a name: {expression}")
    return ParsedExpression(tuple(selectors), frozenset(labels), tuple(windows))


def _is_aggregation(next_text: str) -> bool:
    """Return whether the word before is an aggregation, as in `sum by (…) (…)`."""
    return next_text in ("by", "without")


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(expression):
        found = _TOKEN.match(expression, position)
        if found is None:
            raise ValueError(f"at {expression[position : position + 20]!r} of {expression}")
        position = found.end()
        if found.lastgroup != "space":
            yield str(found.lastgroup), found.group()


def _matchers(tokens: list[tuple[str, str]]) -> Iterator[Matcher]:
    words = [text for _, text in tokens if text != ","]
    for label, operator, value in zip(words[::3], words[1::3], words[2::3], strict=True):
        yield Matcher(label, operator, value[1:-1])
