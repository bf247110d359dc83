"""How many tokens an answer says that it took: `usage` of completions, embeddings and responses. Pure."""

from __future__ import annotations

import msgspec

USAGE_MOST_BYTES = 1 << 20
"""Answers longer than this are not read for their usage."""
TOKENS_MOST = 10_000_000
"""Of one request: no model reads or writes more."""


class _Usage(msgspec.Struct):
    """Of completions and embeddings; of responses under the other names."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_WithUsage, strict=False)


def tokens(body: bytes) -> tuple[int, int]:
    """Tokens in and out, as an answer's `usage` has them; 0 where it has none that can be believed."""
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
