"""How much a server takes in one call: what is known of some, and what a refusal says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class KnownCap:
    """What a call may hold at the most, where nobody configured the server otherwise."""

    items: int
    tokens: float = inf


KNOWN_CAPS: Mapping[str, KnownCap] = MappingProxyType(
    {
        "openai": KnownCap(2048, 300_000),
        "tei": KnownCap(32),
        "cohere": KnownCap(96),
        "infinity": KnownCap(2048),
        "gemini": KnownCap(100),
        "mistral": KnownCap(512),
        "jina": KnownCap(512),
        "dashscope": KnownCap(10),
    }
)
"""Of embeddings, by who serves them."""

STATUSES = (400, 413, 422)
"""With these a server says that a call is too large."""
MESSAGE_CHARS = 500
"""What a server has to say stands at the beginning; behind it may come what the call was."""
COUNT_MOST = 10_000_000

_ITEMS = re.compile(
    r"""
    > \s* maximum \s allowed \s batch \s size \s (\d+)
    | expected \s an \s array \s with \s maximum \s length \s (\d+)
    | inference \s request \s batch-size \s must \s be \s <= \s (\d+)
    | larger \s than \s maximum \s (?:input \s)? batch \s size \s (\d+)
    | total \s number \s of \s texts \s must \s be \s at \s most \s (\d+)
    | (?:list|array) \s should \s have \s at \s most \s (\d+) \s items?
    | ensure \s this \s value \s has \s at \s most \s (\d+) \s items?
    | input \s list \s can \s contain \s at \s most \s (\d+) \s items?
    | max \s number \s of \s inputs \s is \s (\d+)
    | batch \s size \s is \s invalid, \s it \s should \s not \s be \s larger \s than \s (\d+)
    | at \s most \s (\d+) \s requests \s can \s be \s in \s one \s batch
    | batch \s size \s limit \s is \s (\d+)
    | (\d+) \s instance\(s\) \s is \s allowed \s per \s prediction
    """,
    re.VERBOSE | re.IGNORECASE,
)
_ITEMS_UNCOUNTED = re.compile(
    r"array too long|too many inputs|batch size too large|batch too large|split into more batches"
    r"|length limit exceeded|payload size exceeds the limit|maximum request body size|request body too large"
    r"|request entity too large|payload too large|content too large",
    re.IGNORECASE,
)
_TOKENS = re.compile(
    r"""
    max \s (\d+) \s tokens \s per \s request
    | max \s allowed \s tokens \s per \s submitted \s batch \s is \s (\d+)
    | too \s many \s tokens \s in \s batch\. \s max \s is \s (\d+)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_TOKENS_UNCOUNTED = re.compile(r"max_tokens_per_request|too many tokens (?:overall|in batch)", re.IGNORECASE)
_WORDS = ("message", "error", "detail", "msg", "errors")

_decode = msgspec.json.Decoder().decode


def too_many(status: int, body: bytes) -> int | None:
    """The most items that an answer says the server takes in a call; 0: fewer than there were, it says not
    how many; None: it says nothing of the kind."""
    said = _said(status, body)
    if said is None or _found(said, _TOKENS, _TOKENS_UNCOUNTED) is not None:
        return None
    if status == 413 and not said.strip():
        return 0
    return _found(said, _ITEMS, _ITEMS_UNCOUNTED)


def too_many_tokens(status: int, body: bytes) -> int | None:
    """The same of the tokens of all items together. (One item that is too long is another matter.)"""
    said = _said(status, body)
    return None if said is None else _found(said, _TOKENS, _TOKENS_UNCOUNTED)


def _found(said: str, counted: re.Pattern[str], uncounted: re.Pattern[str]) -> int | None:
    match = counted.search(said)
    if match is not None and match.lastindex is not None:
        digits = match[match.lastindex]
        most = int(digits) if len(digits) < 10 else COUNT_MOST
        return min(most, COUNT_MOST)
    return 0 if uncounted.search(said) is not None else None


def _said(status: int, body: bytes) -> str | None:
    """The words of a refusal: of JSON its messages, for the rest of it may repeat what was asked."""
    if status not in STATUSES:
        return None
    try:
        said = "\n".join(_messages(_decode(body)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = body[:MESSAGE_CHARS].decode(errors="replace")
    return said


def _messages(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value[:MESSAGE_CHARS]
    elif isinstance(value, list) and depth < 4:
        for each in value[:4]:
            yield from _messages(each, depth + 1)
    elif isinstance(value, dict) and depth < 4:
        for name in _WORDS:
            if name in value:
                yield from _messages(value[name], depth + 1)
        code = value.get("code")
        if isinstance(code, str):
            yield code[:MESSAGE_CHARS]
