"""Estimate the tokens of requests, and learn from the usage that answers report.

    prompt   bytes of the body × tokens per byte, learned for the path, the model and bodies of this size
    shared   prompt × the share that earlier prompts found in the prefix cache
    output   the mean length of earlier answers to requests with about this `max_tokens`, never above it

A body says little about its tokens, and a producer may say anything. Therefore only answers of the model
server teach something. Before the first of them, the number of tokens is taken rather too large.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from dispatcher.features.tokens.body_scan import BodyLength

INITIAL_TOKENS_PER_BYTE = 0.3
"""Tokens per byte of a body before anything is known. English text in JSON has about 0.22 to 0.28."""
TOKENS_PER_IMAGE = 1500
"""Tokens of an image: about as many as the usual vision models use for a picture of a million pixels."""
INITIAL_OUTPUT_TOKENS = 1000
"""Length of an answer before anything is known, if the request does not limit it."""
_MIN_ANSWERS = 8
"""Number of answers after which their mean length counts instead of `max_tokens`. The first answers to come
are the short ones."""
_RECENT = 64
"""Approximate number of recent answers over which means are taken."""
MAX_ROWS = 1024
"""Largest number of rows of what is learned. The oldest ones are dropped."""


K = TypeVar("K")
V = TypeVar("V")


class _Mean(msgspec.Struct, gc=False):
    """Mean of recent values: of all of them at first, and then with a lower weight for older ones."""

    value: float = 0.0
    count: int = 0


class _Means(msgspec.Struct, gc=False):
    """Means of what answers to requests of one kind have shown. Several kinds share a mean."""

    per_byte: _Mean
    """Tokens of the prompt per byte, of bodies of about the same size."""
    per_byte_of_all: _Mean
    """The same of bodies of all sizes."""
    shared: _Mean
    """Share of the prompt that was in the prefix cache, of bodies of about the same size."""
    output: _Mean
    """Tokens of an answer, by about the same `max_tokens`."""
    error: _Mean
    """Relative error of the estimated prompt."""


Kind = tuple[str, str, int, int]
"""Path, model, and the numbers of binary digits of the size and of `max_tokens` (-1 if there is none)."""


class CallTokens(msgspec.Struct, gc=False):
    """Tokens that one call may grow to, and what is needed to learn from its answer."""

    prompt: float
    output: float
    max_output: float
    """Largest number of tokens that the call can generate. Infinite if nothing limits it."""
    shared: float = 0.0
    """Part of `prompt` that the call probably shares with others in the prefix cache."""
    kind: Kind | None = None
    """`None` if the estimate is not made from a body, and nothing can be learned."""
    body: BodyLength = BodyLength(0)
    is_part: bool = False
    """True if the call asks for a part of the answer, so that its length shows nothing."""
    since: float = 0.0
    """Time at which it began."""
    generated: int = 0
    """Tokens that its answer reports. 0 before the answer, or if it reports none."""


class TokenEstimator:
    """Table of what answers have shown about the tokens of requests."""

    def __init__(self) -> None:
        self._means: dict[Kind, _Means] = {}
        self._prompts: dict[tuple[str, str, int], _Mean] = {}
        """Tokens per byte by path, model and number of binary digits of the size. The size −1 is for bodies
        of all sizes."""
        self._shared: dict[tuple[str, str, int], _Mean] = {}
        """Share of a prompt that was in the prefix cache, by the same key."""
        self._outputs: dict[tuple[str, str, int], _Mean] = {}
        """Tokens of an answer by path, model and number of binary digits of `max_tokens`."""
        self._errors: dict[str, _Mean] = {}
        """Relative error of the estimated prompt, by model."""

    def estimate(self, body: BodyLength, path: str) -> CallTokens:
        """Return the estimated tokens of a request."""
        limit, text_bytes = body.max_tokens, body.text_bytes
        kind = path, body.model, text_bytes.bit_length(), -1 if limit is None else limit.bit_length()
        means = self._means.get(kind) or self._find_means(kind)
        prompt: float = body.token_ids + body.images * TOKENS_PER_IMAGE
        if text_bytes:
            known = means.per_byte if means.per_byte.count else means.per_byte_of_all
            prompt += text_bytes * (known.value if known.count else INITIAL_TOKENS_PER_BYTE)
        most: float = math.inf if limit is None else limit
        expected: float = INITIAL_OUTPUT_TOKENS if limit is None else limit
        learned = means.output
        if learned.count >= _MIN_ANSWERS:
            expected = min(most, learned.value)
        return CallTokens(
            prompt, expected * body.copies, most * body.copies, prompt * means.shared.value, kind, body
        )

    def learn(self, call: CallTokens, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> None:
        """Learn from the usage that the answer to a call reports. 0 stands for a missing number."""
        kind, body = call.kind, call.body
        if kind is None:
            return
        # Only here, so that requests without an answer displace nothing that was learned.
        means = self._means.get(kind) or self._add_means(kind)
        values: list[tuple[_Mean, float]] = []
        if prompt_tokens > 0:
            values += ((means.error, abs(call.prompt - prompt_tokens) / prompt_tokens),)
            # The number of tokens of an image is a rule, so such a request shows nothing about its text.
            if body.text_bytes and not body.images:
                per_byte = prompt_tokens / body.text_bytes
                values += (means.per_byte, per_byte), (means.per_byte_of_all, per_byte)
        if not call.is_part:
            # A later part finds its own earlier parts in the cache, which it shares with nobody.
            if prompt_tokens > 0:
                values += ((means.shared, cached_tokens / prompt_tokens),)
            if output_tokens > 0:
                values += ((means.output, output_tokens / body.copies),)
        for mean, value in values:
            if mean.count < _RECENT:
                mean.count += 1
            mean.value += (value - mean.value) / mean.count

    def list_errors(self) -> dict[str, float]:
        """Return the mean relative error of the estimated prompts of recent requests, by model."""
        return {model: error.value for model, error in self._errors.items() if error.count}

    def _find_means(self, kind: Kind) -> _Means:
        """Return what is known about a kind of which no request was answered yet."""
        path, model, size, limit = kind
        return _Means(
            self._prompts.get((path, model, size), _UNKNOWN),
            self._prompts.get((path, model, -1), _UNKNOWN),
            self._shared.get((path, model, size), _UNKNOWN),
            self._outputs.get((path, model, limit), _UNKNOWN),
            _UNKNOWN,
        )

    def _add_means(self, kind: Kind) -> _Means:
        path, model, size, limit = kind
        means = _Means(
            _get_row(self._prompts, (path, model, size), _Mean()),
            _get_row(self._prompts, (path, model, -1), _Mean()),
            _get_row(self._shared, (path, model, size), _Mean()),
            _get_row(self._outputs, (path, model, limit), _Mean()),
            _get_row(self._errors, model, _Mean()),
        )
        return _get_row(self._means, kind, means)


_UNKNOWN = _Mean()


def _get_row(rows: dict[K, V], key: K, new_row: V) -> V:
    """Return the row of a key, which is the new one if there is none."""
    row = rows.get(key)
    if row is None:
        if len(rows) >= MAX_ROWS:
            del rows[next(iter(rows))]
        row = rows[key] = new_row
    return row
