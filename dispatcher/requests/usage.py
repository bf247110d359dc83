"""Number of tokens that an answer reports: `usage` of completions, embeddings and responses."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

MAX_USAGE_BODY_BYTES = 1 << 20
"""Size of the largest answer that is searched for its usage."""
MAX_TOKENS = 10_000_000
"""Largest number of tokens of one request that is believed. No model reads or writes more."""


TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
"""Type of a number of tokens in an answer. An answer with another value cannot be decoded."""


class TokenUsage(NamedTuple):
    """Numbers of tokens that an answer reports. 0 stands for a missing one."""

    tokens_in: int = 0
    tokens_out: int = 0
    cached: int = 0
    """Part of `tokens_in` that was in the prefix cache of the server."""


class _Usage(msgspec.Struct):
    """Usage of completions and embeddings. Responses use `input_tokens` and `output_tokens`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    # Of any type: servers that write something else here still report the other numbers.
    prompt_tokens_details: Any = None
    input_tokens_details: Any = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_WithUsage, strict=False)


def parse_token_usage(body: bytes) -> tuple[int, int]:
    """Return the tokens in and out that the `usage` of an answer reports. 0 if it is missing or
    implausible."""
    return parse_usage(body)[:2]


def parse_usage(body: bytes) -> TokenUsage:
    """Return all that the `usage` of an answer reports."""
    if len(body) > MAX_USAGE_BODY_BYTES:
        return TokenUsage()
    try:
        usage = _answer.decode(body).usage
    except (msgspec.DecodeError, RecursionError):
        return TokenUsage()
    if usage is None:
        return TokenUsage()
    tokens_in = limit_tokens(usage.prompt_tokens or usage.input_tokens or 0)
    tokens_out = usage.completion_tokens or usage.output_tokens or 0
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(
        tokens_in,
        limit_tokens(tokens_out),
        max(0, min(cached, tokens_in)) if isinstance(cached, int) else 0,
    )


def limit_tokens(tokens: int) -> int:
    """Return a reported number of tokens within the range that is believed."""
    return max(0, min(tokens, MAX_TOKENS))
