"""Progress of a generation that is sent in slices, as it is stored with the request in the queue."""

from __future__ import annotations

from enum import StrEnum

import msgspec


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
    slices: int = 0
    """Number of slices that were answered."""
    text: str = ""
    """Text of all slices."""
    token_ids: bytes = b""
    """Tokens of all slices, as JSON without the brackets. Empty if the generation is continued by its
    text."""
    prompt_token_ids: bytes = b""
    """Tokens of the prompt, like `token_ids`."""
    tokens: int = 0
    """Number of generated tokens."""
    uncounted_tokens: int = 0
    """Largest number of tokens in addition to `tokens`, after a stream broke off that does not say it."""
    prompt_tokens: int = 0
    """Number of tokens of the prompt, as the first answer says."""
    cached_tokens: int = 0
    """Number of tokens that later slices found in the prefix cache."""
    response_id: str = ""
    """`id` of the first answer."""
    created: int = 0
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
    cut_tokens: int = 0
    """Largest number of `tokens` that were cut off at the end of the text, and are generated again."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Progress).decode


def encode_progress(progress: Progress) -> bytes:
    return _encode(progress)


def find_version(stored: bytes) -> str:
    """Return the version that a stored generation has begun with. Empty if there is none."""
    progress = decode_progress(stored) if stored else None
    return "" if progress is None else progress.version


def decode_progress(stored: bytes) -> Progress | None:
    """Return the stored progress. `None` if there is none, or it is not readable: the generation then starts
    from the beginning."""
    if not stored:
        return None
    try:
        return _decode(stored)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
