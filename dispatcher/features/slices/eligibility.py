"""Which requests may be sent in slices: a closed table of the fields of a body.

A request with a field that is not in the table, or with a value that the table does not allow, is sent whole,
and the reason is counted. Servers add fields all the time, and the effect of an unknown field may depend on
the generation being one call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from dispatcher.common.value import Value

CHAT_SUFFIX, COMPLETIONS_SUFFIX = "/chat/completions", "/completions"


class WholeReason(StrEnum):
    """Reason why a request is sent whole."""

    DECLINED = "declined"
    """The request says no."""
    SHORT = "short"
    """`max_tokens` is less than `slicing.min_tokens`."""
    NO_MAX_TOKENS = "no max_tokens"
    PATH = "path"
    """The path is not in `slicing.paths`, or is no path for text generation."""
    MERGED = "merged"
    """A rule of `batching` merges the request."""
    BODY = "body"
    """The body cannot be read, or has a known field with a value of the wrong type."""
    FIELD = "unknown field"
    PROMPT = "prompt"
    """There are several prompts, or the prompt consists of token ids and the server returns none."""
    PREFILL = "prefill"
    """The last message is one of the assistant, or the request continues it itself."""
    TOOLS = "tools"
    STRUCTURED_OUTPUT = "structured output"
    SEVERAL_ANSWERS = "several answers"
    ECHO = "echo"
    STREAM = "stream"
    LOGPROBS = "logprobs"
    PENALTY = "penalty"
    """A penalty depends on the tokens generated so far, which a later slice has in its prompt."""
    SEED = "seed"
    REASONING = "reasoning"
    """The server returns the reasoning apart from the answer, so that it cannot be continued."""
    UNCHECKED = "unchecked"
    """It is not known yet whether slices and whole generations are equal on this model."""
    UNEQUAL = "unequal"
    """Slices and whole generations were not equal on this model."""
    NOT_WORTH_IT = "not worth it"
    """Slices cost too much on this model."""
    TOO_MANY_STARTED = "too many started"
    """MAX_STARTED requests have been started and wait for their next slice."""
    TOO_LARGE = "too large"
    """The progress of the generation would exceed MAX_KEPT_BYTES."""


@dataclass(frozen=True, slots=True)
class SliceTerms:
    """Settings that decide which requests are sliced."""

    slice_tokens: int = 256
    """Number of tokens of each slice."""
    min_tokens: int = 512
    """Smallest `max_tokens` of a request that is sliced."""
    paths: tuple[str, ...] = ()
    """Paths of the requests that are sliced."""


class Generation(Value, frozen=True):
    """A request that may be sliced, as far as its body says."""

    path: str
    fields: Mapping[str, msgspec.Raw]
    """Fields of the body, as they are written."""
    is_chat: bool
    model: str
    max_tokens: int
    max_tokens_field: str
    """Name of the field with the number of tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    prompt: str | tuple[int, ...] = ""
    """Prompt of a completion. Empty for a chat."""


class _Whole(Exception):  # noqa: N818 - never leaves this module
    """The request is sent whole."""

    def __init__(self, reason: WholeReason) -> None:
        super().__init__(reason)
        self.reason = reason


_Check = Callable[[Any], bool]


def _is_any(value: Any) -> bool:
    return True


def _is_unset(value: Any) -> bool:
    return value is None or value is False


def _is_empty(value: Any) -> bool:
    return value is None or value in ([], {}, "")


def _is_at_most_one(value: Any) -> bool:
    return value is None or value == 1


def _is_zero(value: Any) -> bool:
    return value is None or value == 0


_ANY = (_is_any, WholeReason.FIELD)
_COMMON: dict[str, tuple[_Check, WholeReason]] = {
    # The sampling of the next token depends on these and on the tokens before it, wherever they came from.
    **dict.fromkeys(
        (
            "model", "user", "temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids",
            "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
            "max_tokens", "metadata", "store", "service_tier", "priority", "safety_identifier",
            "prompt_cache_key", "cache_salt", "seed",
        ),
        _ANY,
    ),
    "n": (_is_at_most_one, WholeReason.SEVERAL_ANSWERS),
    "best_of": (_is_at_most_one, WholeReason.SEVERAL_ANSWERS),
    "use_beam_search": (_is_unset, WholeReason.SEVERAL_ANSWERS),
    "echo": (_is_unset, WholeReason.ECHO),
    "stream": (_is_unset, WholeReason.STREAM),
    "stream_options": (_is_empty, WholeReason.STREAM),
    "logprobs": (_is_unset, WholeReason.LOGPROBS),
    "top_logprobs": (_is_zero, WholeReason.LOGPROBS),
    "prompt_logprobs": (_is_unset, WholeReason.LOGPROBS),
    "return_token_ids": (_is_unset, WholeReason.LOGPROBS),
    "presence_penalty": (_is_zero, WholeReason.PENALTY),
    "frequency_penalty": (_is_zero, WholeReason.PENALTY),
    "repetition_penalty": (_is_at_most_one, WholeReason.PENALTY),
    "length_penalty": (_is_at_most_one, WholeReason.PENALTY),
    # A number of tokens that counts from the beginning of the generation.
    "min_tokens": (_is_zero, WholeReason.PENALTY),
    # A server would find a string of several tokens only if no slice ends inside it.
    "bad_words": (_is_empty, WholeReason.FIELD),
    "include_stop_str_in_output": (_is_unset, WholeReason.FIELD),
    "response_format": (
        lambda value: value is None or value == {"type": "text"},
        WholeReason.STRUCTURED_OUTPUT,
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
         "json_schema", "regex", "ebnf"),
        (_is_empty, WholeReason.STRUCTURED_OUTPUT),
    ),
}  # fmt: skip
_COMPLETION: dict[str, tuple[_Check, WholeReason]] = {
    **_COMMON,
    "prompt": _ANY,
    "suffix": (_is_empty, WholeReason.FIELD),
}
_CHAT: dict[str, tuple[_Check, WholeReason]] = {
    **_COMMON,
    **dict.fromkeys(("messages", "max_completion_tokens", "chat_template_kwargs"), _ANY),
    "tools": (_is_empty, WholeReason.TOOLS),
    "tool_choice": (lambda value: value in (None, "none", "auto"), WholeReason.TOOLS),
    "parallel_tool_calls": _ANY,
    "functions": (_is_empty, WholeReason.TOOLS),
    "function_call": (lambda value: value in (None, "none"), WholeReason.TOOLS),
    "modalities": (lambda value: value in (None, ["text"]), WholeReason.FIELD),
    "audio": (_is_unset, WholeReason.FIELD),
    "prediction": (_is_unset, WholeReason.FIELD),
    "reasoning_effort": (lambda value: value in (None, "none"), WholeReason.REASONING),
    "add_generation_prompt": (lambda value: value in (None, True), WholeReason.PREFILL),
    "continue_final_message": (_is_unset, WholeReason.PREFILL),
}

_MAX_TOKENS, _TOKENS_NAME = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*([0-9]+)\s*[,}]'), b'_tokens"'
_MAX_DIGITS = 10
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode


def check_generation(
    path: str, payload: bytes, terms: SliceTerms, *, has_begun: bool = False
) -> Generation | WholeReason:
    """Return the request if it may be sliced, else the reason why it is sent whole.

    If the generation has begun in slices, settings that have changed since do not matter.
    """
    if not path.endswith(COMPLETIONS_SUFFIX) or (path not in terms.paths and not has_begun):
        return WholeReason.PATH
    if not has_begun and _is_obviously_short(payload, terms.min_tokens):
        return WholeReason.SHORT
    try:
        return _check_fields(path, _decode_fields(payload), None if has_begun else terms)
    except _Whole as whole:
        return whole.reason
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return WholeReason.BODY


def _is_obviously_short(payload: bytes, min_tokens: int) -> bool:
    """Return True if each `max_tokens` in the text of the body is small, so that it need not be decoded."""
    numbers = _MAX_TOKENS.findall(payload)
    # With fewer numbers than names, one of them has another value or is part of another name.
    if len(numbers) != payload.count(_TOKENS_NAME) or not numbers:
        return False
    return all(len(number) < _MAX_DIGITS and 0 < int(number) < min_tokens for number in numbers)


def _check_fields(path: str, fields: dict[str, msgspec.Raw], terms: SliceTerms | None) -> Generation:
    """Return the generation. `terms` is `None` if it has begun, so that the table has allowed its fields."""
    is_chat = path.endswith(CHAT_SUFFIX)
    max_tokens_field = "max_tokens"
    if is_chat and fields.get("max_completion_tokens", _NULL) != _NULL:
        max_tokens_field = "max_completion_tokens"
    # Asked first: it is cheap, and most requests that go whole are short.
    max_tokens = _decode(fields.get(max_tokens_field, _NULL))
    if max_tokens is None:
        raise _Whole(WholeReason.NO_MAX_TOKENS)
    if type(max_tokens) is not int or max_tokens < 1:
        raise _Whole(WholeReason.BODY)
    if terms is None:
        values = {name: _decode(fields[name]) for name in _USED if name in fields}
    else:
        if max_tokens < terms.min_tokens or max_tokens <= terms.slice_tokens:
            raise _Whole(WholeReason.SHORT)
        values = _decode_values(fields, _CHAT if is_chat else _COMPLETION)
        _check_seed(values)
        if is_chat:
            _check_messages(fields.get("messages", _NULL))
    return Generation(
        path=path,
        fields=fields,
        is_chat=is_chat,
        model=_read_model(values.get("model")),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        stop=_read_stop(values.get("stop")),
        prompt="" if is_chat else _read_prompt(fields.get("prompt", _NULL)),
    )


def _decode_values(
    fields: dict[str, msgspec.Raw], table: Mapping[str, tuple[_Check, WholeReason]]
) -> dict[str, Any]:
    """Return the values of the fields, without those that are long or looked at elsewhere."""
    values: dict[str, Any] = {}
    for name, raw in fields.items():
        known = table.get(name)
        if known is None:
            raise _Whole(WholeReason.FIELD)
        if name in _CONTENT:
            continue
        allows, reason = known
        value = values[name] = _decode(raw)
        if not allows(value):
            raise _Whole(reason)
    return values


def _read_model(model: Any) -> str:
    if model is None:
        return ""
    if type(model) is not str:
        raise _Whole(WholeReason.BODY)
    return model


def _read_stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = [stop] if type(stop) is str else stop
    if type(strings) is not list or not all(type(each) is str for each in strings):
        raise _Whole(WholeReason.BODY)
    return tuple(each for each in strings if each)


def _read_prompt(raw: msgspec.Raw) -> str | tuple[int, ...]:
    prompt = _decode(raw)
    if type(prompt) is str:
        return prompt
    # Several prompts have several answers, also if there is only one in the list.
    if type(prompt) is not list or not prompt or not all(type(token) is int for token in prompt):
        raise _Whole(WholeReason.PROMPT)
    return tuple(prompt)


def _check_seed(values: Mapping[str, Any]) -> None:
    seed = values.get("seed")
    if seed is None:
        return
    if type(seed) is not int:
        raise _Whole(WholeReason.BODY)
    # With the same seed, each slice would draw the same random numbers again. At temperature 0 a seed has no
    # effect.
    if values.get("temperature") != 0:
        raise _Whole(WholeReason.SEED)


def _check_messages(raw: msgspec.Raw) -> None:
    messages = msgspec.json.decode(raw, type=list[msgspec.Raw])
    if not messages:
        raise _Whole(WholeReason.BODY)
    last = msgspec.json.decode(messages[-1], type=_Message)
    if last.role == "assistant":
        raise _Whole(WholeReason.PREFILL)


class _Message(msgspec.Struct):
    role: str


_NULL = msgspec.Raw(b"null")
_USED = ("model", "stop")
_CONTENT = frozenset({"messages", "prompt", "max_tokens", "max_completion_tokens"})
