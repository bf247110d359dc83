"""Sequences in batch files: parses the field `sequence` of a line, or a field that the caller names.

The index may be left out, because the order of the lines is then the order of the sequence. `reset` is not
allowed: requests after a reset may be submitted only when the reset has a result, but lines are submitted
before the lines above them are answered. A sequence that begins anew needs its own id. Does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from dispatcher.features.sequences.turns import MAX_INDEX, MAX_SEQUENCE_ID_BYTES, CarryMode, OnError

_ABSENT_VALUES = (b"", b"null")


@dataclass(frozen=True, slots=True)
class LineTurn:
    """Turn in a sequence, as a line of a batch file gives it."""

    id: str
    index: int | None = None
    last: bool = False
    on_error: OnError | None = None
    carry: CarryMode | None = None


class TurnFaultError(ValueError):
    """The turn of a line is not valid. The message says why."""


class _TurnObject(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    index: Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)] | None = None
    last: bool | None = None
    reset: bool | None = None
    on_error: Literal["continue", "abort", "hold"] | None = None
    carry: Literal["off", "messages"] | None = None


_decode_object = msgspec.json.Decoder(_TurnObject).decode
_decode_string = msgspec.json.Decoder(str).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def parse_turn(sequence: bytes, line: bytes, field: str) -> LineTurn | None:
    """Return the turn from the field `sequence`, or else from `field` if it is given. `None` if the line has
    neither. Raises TurnFaultError."""
    turn = parse_sequence_field(sequence)
    return parse_named_field(field, line) if turn is None and field else turn


def parse_sequence_field(sequence: bytes) -> LineTurn | None:
    """Parse the field `sequence`: an id, or an object as in the queue contract. Raises TurnFaultError."""
    if sequence in _ABSENT_VALUES:
        return None
    if sequence.startswith(b'"'):
        return LineTurn(_check_id("sequence", _decode_string(sequence)))
    if not sequence.startswith(b"{"):
        raise TurnFaultError("sequence: must be an id or an object")
    try:
        fields = _decode_object(sequence)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).replace("`", "").partition(" - at $")
        raise TurnFaultError(f"sequence{where}: {problem[:1].lower()}{problem[1:]}") from error
    if fields.reset:
        raise TurnFaultError("sequence.reset: not in a file: give what begins anew an id of its own")
    on_error = None if fields.on_error is None else OnError(fields.on_error)
    carry = None if fields.carry is None else CarryMode(fields.carry)
    return LineTurn(_check_id("sequence.id", fields.id), fields.index, bool(fields.last), on_error, carry)


def parse_named_field(field: str, line: bytes) -> LineTurn | None:
    """Return the turn from a field of the line or of its body, such as `metadata.conversation`.

    The value must be a string or a whole number. Return `None` if the field is missing. Raises
    TurnFaultError.
    """
    fields = _decode_fields(line)
    raw = _find_field(fields, field.split("."))
    if raw in _ABSENT_VALUES and (body := bytes(fields.get("body", msgspec.Raw()))).startswith(b"{"):
        raw = _find_field(_decode_fields(body), field.split("."))
    if raw in _ABSENT_VALUES:
        return None
    if raw.startswith(b'"'):
        return LineTurn(_check_id(field, _decode_string(raw)))
    if raw.removeprefix(b"-").isdigit():
        return LineTurn(_check_id(field, raw.decode()))
    raise TurnFaultError(f"{field}: must be a string or a whole number, to name a sequence")


def _find_field(fields: dict[str, msgspec.Raw], path: list[str]) -> bytes:
    raw = bytes(fields.get(path[0], msgspec.Raw()))
    if len(path) == 1 or not raw.startswith(b"{"):
        return raw if len(path) == 1 else b""
    return _find_field(_decode_fields(raw), path[1:])


def _check_id(where: str, name: str) -> str:
    if not 0 < (size := len(name.encode())) <= MAX_SEQUENCE_ID_BYTES:
        raise TurnFaultError(f"{where}: an id of 1 to {MAX_SEQUENCE_ID_BYTES} bytes, not of {size}")
    return name
