"""Text and tokens of one slice, as its answer says."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dispatcher.features.slices.eligibility import WholeReason
from dispatcher.requests.usage import TokenCount

_ABSENT = msgspec.Raw(b"")
_EMPTY = (b"", b"null", b'""', b"[]", b"{}", b"false")
"""Values of a field that mean the same as an absent field."""
_SPACE, _DIGITS_AND_COMMAS = b" \t\r\n", b"0123456789,"
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_decode_ids = msgspec.json.Decoder(list[_TokenId]).decode


class NotContinuableError(Exception):
    """The answer says something that cannot be joined. It never leaves the package."""

    def __init__(self, reason: WholeReason, why: str) -> None:
        super().__init__(why)
        self.reason, self.why = reason, why


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: TokenCount | None = None


class Usage(msgspec.Struct):
    """Tokens of one slice."""

    prompt_tokens: TokenCount
    completion_tokens: TokenCount
    prompt_tokens_details: _PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were in the prefix cache. `None` if the server does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class Piece(msgspec.Struct, frozen=True):
    """Text and tokens of one slice."""

    text: str
    finish_reason: str
    usage: Usage
    token_ids: bytes
    """Tokens of the text, as JSON without the brackets. Empty if the server does not return them."""
    prompt_token_ids: bytes
    answer: bytes
    """The whole answer, as the answer to a call without a stream."""


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: msgspec.Raw = _ABSENT
    reasoning: msgspec.Raw = _ABSENT
    tool_calls: msgspec.Raw = _ABSENT
    function_call: msgspec.Raw = _ABSENT


class _Choice(msgspec.Struct):
    finish_reason: str
    text: str | None = None
    message: _Message | None = None
    token_ids: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage


# Tokens and fields that are not looked at are not decoded: an answer has thousands of them.
_decode = msgspec.json.Decoder(_Answer).decode


def read_piece(body: bytes, *, is_chat: bool, is_first: bool) -> Piece:
    """Return what the answer to a call says. The tokens of the prompt are read in the first one only.

    Raise an exception if a part is missing, or if there is something that cannot be continued.
    """
    answer = _decode(body)
    if len(answer.choices) != 1:
        raise NotContinuableError(WholeReason.BODY, "the answer to a slice has not exactly one choice")
    (choice,) = answer.choices
    text = choice.text
    if is_chat:
        message = choice.message or _Message()
        if _has_value(message.reasoning_content) or _has_value(message.reasoning):
            why = "the server returns the reasoning of the model apart"
            raise NotContinuableError(WholeReason.REASONING, why)
        if _has_value(message.tool_calls) or _has_value(message.function_call):
            raise NotContinuableError(WholeReason.TOOLS, "the answer to a slice has tool calls")
        text = message.content
    if text is None:
        raise NotContinuableError(WholeReason.BODY, "the answer to a slice has no text")
    token_ids = read_token_ids(choice.token_ids)
    prompt_token_ids = read_token_ids(choice.prompt_token_ids) if is_first else b""
    return Piece(text, choice.finish_reason, answer.usage, token_ids, prompt_token_ids, body)


def _has_value(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in _EMPTY


def read_token_ids(raw: msgspec.Raw) -> bytes:
    """Return a JSON list of token ids without its brackets. Empty if it is something else."""
    ids = bytes(raw).translate(None, _SPACE)
    if not ids.startswith(b"[") or ids[1:-1].translate(None, _DIGITS_AND_COMMAS):
        return b""
    try:
        _decode_ids(ids)
    except msgspec.DecodeError:
        return b""
    return ids[1:-1]


def is_list_of_ids(ids: bytes) -> bool:
    """Return True for a JSON list of numbers without its brackets, which may be empty."""
    if not ids:
        return True
    has_empty_items = ids.startswith(b",") or ids.endswith(b",") or b",," in ids
    return not has_empty_items and not ids.translate(None, _DIGITS_AND_COMMAS)


def join_token_ids(first: bytes, second: bytes) -> bytes:
    """Return two lists without brackets as one."""
    return b"%b,%b" % (first, second) if first and second else first or second


def count_token_ids(ids: bytes) -> int:
    return ids.count(b",") + 1 if ids else 0
