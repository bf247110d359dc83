"""As much of PromQL as it takes to see what an expression names: series, matchers, labels.

Whether it is valid is for promtool to say.
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
    set_label: str
    how: str
    """`=`, `!=`, `=~` or `!~`."""
    value: str


@dataclass(frozen=True, slots=True)
class Selector:
    """A series as an expression names it."""

    name: str
    matchers: tuple[Matcher, ...] = ()


@dataclass(frozen=True, slots=True)
class Named:
    """What an expression names."""

    selectors: tuple[Selector, ...]
    labels: frozenset[str]
    """In `by`, `on` and their like."""
    windows: tuple[str, ...]


def named(expression: str) -> Named:
    """Raises ValueError at what no token begins with."""
    tokens = list(_tokens(expression))
    selectors, labels, windows = [], set[str](), []
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        follows = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind == "window":
            windows.append(text)
        elif kind == "word" and text in _LABEL_LISTS:
            if follows == "(":
                closing = tokens.index(("mark", ")"), at)
                labels.update(word for kind, word in tokens[at:closing] if kind == "word")
                at = closing + 1
        elif kind == "word" and text not in _KEYWORDS and follows != "(" and not _aggregates(follows):
            matchers: list[Matcher] = []
            if follows == "{":
                closing = tokens.index(("mark", "}"), at)
                matchers = list(_matchers(tokens[at + 1 : closing]))
                at = closing + 1
            selectors.append(Selector(text, tuple(matchers)))
        elif (kind, text) == ("mark", "{"):
            raise ValueError(f"a selector without a name: {expression}")
    return Named(tuple(selectors), frozenset(labels), tuple(windows))


def _aggregates(follows: str) -> bool:
    """`sum by (…) (…)`"""
    return follows in ("by", "without")


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None:
            raise ValueError(f"at {expression[at : at + 20]!r} of {expression}")
        at = found.end()
        if found.lastgroup != "space":
            yield str(found.lastgroup), found.group()


def _matchers(tokens: list[tuple[str, str]]) -> Iterator[Matcher]:
    words = [text for _, text in tokens if text != ","]
    for label, how, value in zip(words[::3], words[1::3], words[2::3], strict=True):
        yield Matcher(label, how, value[1:-1])
