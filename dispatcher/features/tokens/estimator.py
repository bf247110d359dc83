"""Estimate the tokens of requests, and learn from the usage that answers report.

    prompt   bytes of the body × tokens per byte, learned for the path, the model and bodies of this size
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


class _Mean(msgspec.Struct, gc=False):
    """Mean of recent values: of all of them at first, and then with a lower weight for older ones."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _RECENT)
        self.value += (value - self.value) / self.count


class CallTokens(msgspec.Struct, frozen=True, gc=False):
    """Estimated tokens of one call, and what is needed to learn from its answer."""

    prompt: float
    output: float
    max_output: float
    """Largest number of tokens that the call can generate. Infinite if nothing limits it."""
    path: str = ""
    body: BodyLength | None = None
    """`None` if the estimate is not made from a body, and nothing can be learned."""
    is_part: bool = False
    """True if the call asks for a part of the answer, so that its length shows nothing."""


class TokenEstimator:
    """Table of what answers have shown about the tokens of requests."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[str, str, int], _Mean] = {}
        """Tokens per byte by path, model and number of binary digits of the size. The size −1 is for bodies
        of all sizes."""
        self._outputs: dict[tuple[str, str, int], _Mean] = {}
        """Tokens of an answer by path, model and number of binary digits of `max_tokens`."""
        self._errors: dict[str, _Mean] = {}
        """Relative error of the estimated prompt, by model."""

    def estimate(self, body: BodyLength, path: str) -> CallTokens:
        """Return the estimated tokens of a request."""
        model = body.model
        prompt: float = body.token_ids + body.images * TOKENS_PER_IMAGE
        if body.text_bytes:
            known = self._prompts.get((path, model, body.text_bytes.bit_length())) or self._prompts.get(
                (path, model, -1)
            )
            prompt += body.text_bytes * (INITIAL_TOKENS_PER_BYTE if known is None else known.value)
        limit = body.max_tokens
        learned = self._outputs.get((path, model, 0 if limit is None else limit.bit_length()))
        most: float = math.inf if limit is None else limit
        expected: float = INITIAL_OUTPUT_TOKENS if limit is None else limit
        if learned is not None and learned.count >= _MIN_ANSWERS:
            expected = min(learned.value, most)
        return CallTokens(
            prompt,
            expected * body.copies,
            most * body.copies,
            path,
            body,
        )

    def learn(self, call: CallTokens, prompt_tokens: int, output_tokens: int) -> None:
        """Learn from the usage that the answer to a call reports. 0 stands for a missing number."""
        body, path = call.body, call.path
        if body is None:
            return
        model = body.model
        if prompt_tokens > 0:
            error = _get_row(self._errors, model)
            error.add(abs(call.prompt - prompt_tokens) / prompt_tokens)
            # The number of tokens of an image is a rule, so such a request shows nothing about its text.
            if body.text_bytes and not body.images:
                per_byte = prompt_tokens / body.text_bytes
                _get_row(self._prompts, (path, model, body.text_bytes.bit_length())).add(per_byte)
                _get_row(self._prompts, (path, model, -1)).add(per_byte)
        if output_tokens > 0 and not call.is_part:
            limit = body.max_tokens
            key = (path, model, 0 if limit is None else limit.bit_length())
            _get_row(self._outputs, key).add(output_tokens / body.copies)

    def list_errors(self) -> dict[str, float]:
        """Return the mean relative error of the estimated prompts of recent requests, by model."""
        return {model: error.value for model, error in self._errors.items()}


def _get_row(rows: dict[K, _Mean], key: K) -> _Mean:
    row = rows.get(key)
    if row is None:
        if len(rows) >= MAX_ROWS:
            del rows[next(iter(rows))]
        row = rows[key] = _Mean()
    return row
