"""Bodies of the slices of a generation."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from dispatcher.features.slices.eligibility import Generation
from dispatcher.features.slices.pieces import join_token_ids
from dispatcher.features.slices.progress import Progress, Stage
from dispatcher.requests.affinity import Affinity
from dispatcher.requests.request import Request

_encode = msgspec.json.Encoder().encode
_TRUE, _FALSE = msgspec.Raw(b"true"), msgspec.Raw(b"false")
_FIRST_WORD_END = msgspec.Raw(_encode([" ", "\n", "\N{FULLWIDTH COMMA}", "\N{IDEOGRAPHIC FULL STOP}"]))
"""Stop strings that end almost every text within a few tokens. Some servers accept no more than four."""
_USAGE = msgspec.Raw(b'{"include_usage":true}')


def can_be_continued(generation: Generation, progress: Progress) -> bool:
    """Return True if the next slice can be continued from the progress. A prompt of token ids can only be
    continued by token ids."""
    return isinstance(generation.prompt, str) or bool(progress.token_ids)


def compute_slice_tokens(generation: Generation, progress: Progress | None, slice_tokens: int) -> int:
    """Return the number of tokens that the next call asks for."""
    if progress is None:
        return min(slice_tokens, generation.max_tokens)
    # The answer to this call will say how many tokens there are.
    remaining = max(1, generation.max_tokens - progress.tokens - progress.uncounted_tokens)
    return remaining if progress.stage is Stage.REST else min(slice_tokens, remaining)


def build_slice_body(
    generation: Generation,
    progress: Progress | None,
    max_tokens: int,
    *,
    wants_token_ids: bool,
    is_streamed: bool = False,
) -> bytes:
    """Return the body of the next slice, which generates up to `max_tokens`.

    All other fields of the request are sent as they are written. `wants_token_ids` asks a server for the
    tokens of a completion, if it is known to return them.
    """
    fields = dict(generation.fields)
    # A chat may have both names for the number of tokens, and servers differ in which one counts.
    fields.pop("max_tokens", None)
    fields[generation.max_tokens_field] = msgspec.Raw(b"%d" % max_tokens)
    if is_streamed:
        fields["stream"], fields["stream_options"] = _TRUE, _USAGE
    if wants_token_ids and not generation.is_chat:
        fields["return_token_ids"] = _TRUE
    if progress is not None:
        if generation.is_chat:
            fields["messages"] = _append_message(fields["messages"], progress.text)
            fields["add_generation_prompt"], fields["continue_final_message"] = _FALSE, _TRUE
        elif isinstance(generation.prompt, str) and not progress.token_ids:
            fields["prompt"] = msgspec.Raw(_encode(generation.prompt + progress.text))
        else:
            ids = join_token_ids(progress.prompt_token_ids, progress.token_ids)
            fields["prompt"] = msgspec.Raw(b"[%b]" % ids)
    return _encode(fields)


def build_length_check(generation: Generation) -> bytes:
    """Return the body of a call that shows whether the server accepts the length of the request. It generates
    only a few tokens."""
    return _encode({**generation.fields, "stop": _FIRST_WORD_END})


def replace_body(
    request: Request, body: bytes, affinity: Affinity | None, received: list[bytes] | None = None
) -> Request:
    """Return the request with another body, as it is sent for one slice."""
    return replace(request, payload=body, affinity=affinity, received=received)


def _append_message(messages: msgspec.Raw, text: str) -> msgspec.Raw:
    """Return the list with the beginning of the assistant's message, which the server continues."""
    last = _encode({"role": "assistant", "content": text})
    return msgspec.Raw(b"%b,%b]" % (bytes(messages).rstrip()[:-1], last))
