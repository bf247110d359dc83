"""Number of tokens that an answer reports: `usage` of completions, embeddings and responses."""

from __future__ import annotations

import msgspec

USAGE_MOST_BYTES = 1 << 20
"""Size of the largest answer that is searched for its usage."""
TOKENS_MOST = 10_000_000
"""Largest number of tokens of one request that is believed. No model reads or writes more."""


class _Usage(msgspec.Struct):
    """Usage of completions and embeddings. Responses use `input_tokens` and `output_tokens`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_WithUsage, strict=False)


def tokens(body: bytes) -> tuple[int, int]:
    """Return the tokens in and out that the `usage` of an answer reports. 0 if it is missing or
    implausible."""
    if len(body) > USAGE_MOST_BYTES:
        return 0, 0
    try:
        usage = _answer.decode(body).usage
    except (msgspec.DecodeError, RecursionError):
        return 0, 0
    if usage is None:
        return 0, 0
    came = usage.prompt_tokens or usage.input_tokens or 0
    went = usage.completion_tokens or usage.output_tokens or 0
    return max(0, min(came, TOKENS_MOST)), max(0, min(went, TOKENS_MOST))
