"""Number of tokens that an answer reports: `usage` of completions, embeddings and responses."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

MAX_USAGE_BODY_BYTES = 1 << 20
"""Size of the largest answer that is searched for its usage."""
MAX_TOKENS = 10_000_000
"""Largest number of tokens of one request that is believed. No model reads or writes more."""


TokenCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
"""Type of a number of tokens in an answer. An answer with another value cannot be decoded."""


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


def parse_token_usage(body: bytes) -> tuple[int, int, int]:
    """Return the tokens in and out that the `usage` of an answer reports, and how many of the tokens in were
    in the prefix cache of the server. 0 for what is missing or implausible."""
    if len(body) > MAX_USAGE_BODY_BYTES:
        return 0, 0, 0
    try:
        usage = _answer.decode(body).usage
    except (msgspec.DecodeError, RecursionError):
        return 0, 0, 0
    if usage is None:
        return 0, 0, 0
    tokens_in = limit_tokens(usage.prompt_tokens or usage.input_tokens or 0)
    tokens_out = limit_tokens(usage.completion_tokens or usage.output_tokens or 0)
    details, cached = usage.prompt_tokens_details or usage.input_tokens_details, 0
    if details and isinstance(details, dict) and isinstance(value := details.get("cached_tokens"), int):
        cached = max(0, min(value, tokens_in))
    return tokens_in, tokens_out, cached


def limit_tokens(tokens: int) -> int:
    """Return a reported number of tokens within the range that is believed."""
    return max(0, min(tokens, MAX_TOKENS))
