"""Read and write the turn of a request in its member: `data.sequence`, or metadata of other producers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from dispatcher.features.sequences.turns import (
    MAX_INDEX,
    MAX_SECRET_CHARS,
    MAX_SEQUENCE_ID_BYTES,
    MIN_SECRET_CHARS,
    CarryMode,
    OnError,
    Turn,
    digest_owner,
)

FIELD = "sequence"
"""Name of the field in `data`."""


class Fields(msgspec.Struct):
    """The field as a decoder reads it."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SEQUENCE_ID_BYTES)]
    index: Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)] | None = None
    last: bool | None = None
    reset: bool | None = None
    on_error: Literal["continue", "abort", "hold"] | None = None
    carry: Literal["off", "messages"] | None = None
    secret: Annotated[str, msgspec.Meta(min_length=MIN_SECRET_CHARS, max_length=MAX_SECRET_CHARS)] | None = (
        None
    )

    def to_turn(self, results: str, submitted_at: float) -> Turn:
        if len(self.id.encode()) > MAX_SEQUENCE_ID_BYTES:
            raise ValueError(f"data.sequence.id: longer than {MAX_SEQUENCE_ID_BYTES} bytes")
        return Turn(
            self.id,
            self.index,
            bool(self.last),
            bool(self.reset),
            None if self.on_error is None else OnError(self.on_error),
            None if self.carry is None else CarryMode(self.carry),
            self.secret or "",
            digest_owner(self.secret or "", results),
            submitted_at,
        )


def read_extra(
    fields: Fields | None, metadata: Mapping[str, str], results: str, submitted_at: float
) -> Turn | None:
    """Return the turn of a request. `None` if it is of no sequence. Raise `ValueError` if the member is
    invalid."""
    if fields is None:
        return _read_metadata(metadata, results, submitted_at)
    return fields.to_turn(results, submitted_at)


def _read_metadata(metadata: Mapping[str, str], results: str, submitted_at: float) -> Turn | None:
    """Return the turn that a producer without `data.sequence` states in its metadata: `sequence_id`,
    `sequence_index`.

    These never reject a request, because producers may use these names with another meaning. An invalid id is
    treated as absent, and without a valid index the order of arrival counts.
    """
    sequence_id = metadata.get("sequence_id", "")
    if not 0 < len(sequence_id.encode()) <= MAX_SEQUENCE_ID_BYTES:
        return None
    index_text = metadata.get("sequence_index", "")
    # 15 digits are at most MAX_INDEX.
    index = (
        int(index_text) if index_text.isascii() and index_text.isdigit() and len(index_text) <= 15 else None
    )
    return Turn(sequence_id, index, owner=digest_owner("", results), submitted_at=submitted_at)
