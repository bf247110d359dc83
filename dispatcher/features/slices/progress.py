"""Progress of a generation that is sent in slices, as it is stored with the request in the queue."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from dispatcher.features.slices.pieces import is_list_of_ids

MAX_KEPT_BYTES = 1 << 20
"""Largest size of the progress of a generation: some 100,000 tokens of text with their ids. A longer one goes
on in one call."""
MAX_STARTED = 1000
"""Number of requests that wait for their next slice at which no further request is sliced. Most pools have
fewer slots, and Redis keeps at most a gigabyte of progress."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Type of a number of slices or tokens. It has room for any sum of numbers that answers may have."""
Time = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Type of a time in any unit that servers use, down to nanoseconds."""


class Stage(StrEnum):
    """How the generation continues."""

    SLICES = "slices"
    """By the next slice."""
    REST = "rest"
    """By one call for all tokens that are left, because the server has rejected the next slice."""
    RESTART = "restart"
    """From the beginning and whole, because what was generated cannot be continued."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Text and tokens that the slices so far have generated.

    `array_like`, because it is written and read for each slice. New fields are added at the end, with a
    default.
    """

    stage: Stage
    slices: Count = 0
    """Number of slices that were answered."""
    text: str = ""
    """Text of all slices."""
    token_ids: bytes = b""
    """Tokens of all slices, as JSON without the brackets. Empty if the generation is continued by its
    text."""
    prompt_token_ids: bytes = b""
    """Tokens of the prompt, like `token_ids`."""
    tokens: Count = 0
    """Number of generated tokens."""
    uncounted_tokens: Count = 0
    """Largest number of tokens in addition to `tokens`, after a stream broke off that does not say it."""
    prompt_tokens: Count = 0
    """Number of tokens of the prompt, as the first answer says."""
    cached_tokens: Count = 0
    """Number of tokens that later slices found in the prefix cache."""
    response_id: str = ""
    """`id` of the first answer."""
    created: Time = 0
    """`created` of the first answer."""
    object: str = ""
    """`object` of the first answer."""
    model: str = ""
    """`model` of the first answer."""
    version: str = ""
    """Model version that the slices were sent to, if the dispatcher chose it."""
    session_token: str = ""
    """Value of the header that sends the next slice to the same server."""
    repeats_text: bool = False
    """True if the answers of the server begin with the text of the slices before."""
    cut_tokens: Count = 0
    """Largest number of `tokens` that were cut off at the end of the text, and are generated again."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Progress).decode


def encode_progress(progress: Progress) -> bytes:
    return _encode(progress)


def find_version(stored: bytes) -> str:
    """Return the version that a stored generation has begun with. Empty if there is none."""
    progress = decode_progress(stored)
    return "" if progress is None else progress.version


def decode_progress(stored: bytes) -> Progress | None:
    """Return the stored progress. `None` if there is none, or if no slice can have written it. Then the
    generation starts from the beginning."""
    if not stored:
        return None
    try:
        progress = _decode(stored)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if progress.stage is Stage.RESTART:
        return progress
    # A slice without text and tokens writes no progress, and tokens are stored only with those of the prompt.
    is_possible = (
        progress.slices > 0
        and bool(progress.text or progress.token_ids)
        and is_list_of_ids(progress.token_ids)
        and is_list_of_ids(progress.prompt_token_ids)
        and bool(progress.token_ids) == bool(progress.prompt_token_ids)
    )
    return progress if is_possible else None


def has_advanced(progress: Progress, before: Progress | None) -> bool:
    """Return True if `progress` has more text or tokens than `before`, or another stage.

    A generation goes only forward through the stages, and each call that adds nothing counts as a failed
    attempt. Every generation therefore ends.
    """
    if before is None:
        return bool(progress.text or progress.token_ids) or progress.stage is not Stage.SLICES
    return (
        len(progress.text) > len(before.text)
        or len(progress.token_ids) > len(before.token_ids)
        or progress.stage is not before.stage
    )
