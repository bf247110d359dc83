"""Names in requests and results that other programs use: error codes, fields of a result, metadata.

The names of features are here, too, because consumers read one list. A name is never used for anything else.
docs/reference/queue-contract.md describes them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

ONE_CALL = {"slicing": "off"}
"""Metadata by which a producer says that a request is sent in one call."""


class ErrorCode(StrEnum):
    """Reason why a request has no answer of the gateway: `error_code` of its result."""

    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    GATE_DROPPED = "GATE_DROPPED"
    GATE_ERROR = "GATE_ERROR"
    INFERENCE_ERROR = "INFERENCE_ERROR"
    INVALID_REQUEST = "INVALID_REQUEST"
    RETRIES_EXHAUSTED = "RETRIES_EXHAUSTED"
    DELIVERIES_EXHAUSTED = "DELIVERIES_EXHAUSTED"
    TOO_LARGE = "TOO_LARGE"
    SEQUENCE_ABORTED = "SEQUENCE_ABORTED"
    """An earlier request of the sequence has failed, or an operator aborted the sequence."""
    SEQUENCE_DENIED = "SEQUENCE_DENIED"
    """The sequence belongs to another producer."""
    SEQUENCE_ENDED = "SEQUENCE_ENDED"
    """The sequence has ended, and takes no more requests."""
    SEQUENCE_FULL = "SEQUENCE_FULL"
    """Too many requests of the sequence wait."""
    SEQUENCE_INDEX = "SEQUENCE_INDEX"
    """Another request of the sequence has the index, or the turn of the index has passed."""
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    """The model of the request is not served by the pool."""


class PoppedResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A result. It has a `status_code` if the gateway answered, else an `error_code`."""

    id: str
    payload: str
    """The response body as a string, or `{"error": …}`."""
    status_code: int | None = None
    error_code: str | None = None
    """An `ErrorCode`, as a string because other dispatchers may use further codes."""
    error_message: str | None = None
    payload_note: str | None = None
    """Note if `payload` is not exactly what the gateway sent, because bytes that are not UTF-8 were
    replaced."""
    request_token: str | None = None
    """Token of the request, if it has one. Other writers of the list cannot know it."""
    model_version: str | None = None
    """Model version that the last attempt was sent to, if the dispatcher chose it."""
    partial: bool | None = None
    """True if `payload` is what was generated before the request ended with the error."""
    slices: int | None = None
    """Number of calls in which the answer was generated, if it was more than one."""
    cached_tokens: int | None = None
    """Tokens that later calls found in the prefix cache of the model server."""
