"""Largest calls that servers accept: known caps of some servers, and caps that a refusal states."""

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
    """Largest call that a server accepts, if the operator configured nothing else."""

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
"""Known caps for embeddings, by server."""

REFUSAL_STATUSES = (400, 413, 422)
"""Statuses with which servers refuse a call that is too large."""
MAX_MESSAGE_CHARS = 500
"""Number of characters of a message that are searched. The server's reason comes first, and the request may
follow."""
MAX_CAP = 10_000_000

# Messages of several model servers and APIs; tests/features/merging has examples.
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
_MESSAGE_FIELDS = ("message", "error", "detail", "msg", "errors")

_decode = msgspec.json.Decoder().decode


def parse_item_cap(status: int, body: bytes) -> int | None:
    """Return the largest number of items that the server accepts in a call, as its answer states.

    0 if there were too many and the answer states no number. `None` if the answer is not about the number of
    items.
    """
    text = _extract_refusal_text(status, body)
    if text is None or _find_cap(text, _TOKENS, _TOKENS_UNCOUNTED) is not None:
        return None
    # An empty 413 gives no reason, so the number of items is assumed to be it.
    if status == 413 and not text.strip():
        return 0
    return _find_cap(text, _ITEMS, _ITEMS_UNCOUNTED)


def parse_token_cap(status: int, body: bytes) -> int | None:
    """Return the same for the tokens of all items together. (One item that is too long is another error.)"""
    text = _extract_refusal_text(status, body)
    return None if text is None else _find_cap(text, _TOKENS, _TOKENS_UNCOUNTED)


def _find_cap(text: str, with_number: re.Pattern[str], without_number: re.Pattern[str]) -> int | None:
    match = with_number.search(text)
    if match is not None and match.lastindex is not None:
        digits = match[match.lastindex]
        # Avoids converting very long digit strings.
        cap = int(digits) if len(digits) < 10 else MAX_CAP
        return min(cap, MAX_CAP)
    return 0 if without_number.search(text) is not None else None


def _extract_refusal_text(status: int, body: bytes) -> str | None:
    """Return the text of a refusal. Only the messages of a JSON body count, because its other fields may
    repeat the request."""
    if status not in REFUSAL_STATUSES:
        return None
    try:
        text = "\n".join(_walk_messages(_decode(body)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body[:MAX_MESSAGE_CHARS].decode(errors="replace")
    return text


def _walk_messages(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value[:MAX_MESSAGE_CHARS]
    elif isinstance(value, list) and depth < 4:
        for inner in value[:4]:
            yield from _walk_messages(inner, depth + 1)
    elif isinstance(value, dict) and depth < 4:
        for name in _MESSAGE_FIELDS:
            if name in value:
                yield from _walk_messages(value[name], depth + 1)
        code = value.get("code")
        if isinstance(code, str):
            yield code[:MAX_MESSAGE_CHARS]
