"""Which sequence a line of a batch file is of: by its field `sequence`, or by a field that the caller names.
Pure.

A file is read as a whole, so the index may be left out: the order of the lines is that of the sequence. It
cannot have `reset`, for its lines are submitted before those above them are answered, and what follows a
reset may not be: what begins anew has an id of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from dispatcher.core.sequences.turns import INDEX_MOST, MAX_SEQUENCE_BYTES, Carry, OnError

_NOTHING = (b"", b"null")


@dataclass(frozen=True, slots=True)
class LineTurn:
    """What a line says of its sequence."""

    id: str
    index: int | None = None
    last: bool = False
    on_error: OnError | None = None
    carry: Carry | None = None


class TurnFaultError(ValueError):
    """What a line says of its sequence can be nothing; the message says why."""


class _TurnObject(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    index: Annotated[int, msgspec.Meta(ge=0, le=INDEX_MOST)] | None = None
    last: bool | None = None
    reset: bool | None = None
    on_error: Literal["continue", "abort", "hold"] | None = None
    carry: Literal["off", "messages"] | None = None


_decode_object = msgspec.json.Decoder(_TurnObject).decode
_decode_string = msgspec.json.Decoder(str).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def turn_in(sequence: bytes, line: bytes, field: str) -> LineTurn | None:
    """By the field `sequence`, or where that is not there by `field`, if one is given. Raises
    TurnFaultError."""
    turn = line_turn(sequence)
    return turn_by(field, line) if turn is None and field else turn


def line_turn(sequence: bytes) -> LineTurn | None:
    """By the field `sequence`: an id, or an object as the queue contract has it. Raises TurnFaultError."""
    if sequence in _NOTHING:
        return None
    if sequence.startswith(b'"'):
        return LineTurn(_fit("sequence", _decode_string(sequence)))
    if not sequence.startswith(b"{"):
        raise TurnFaultError("sequence: must be an id or an object")
    try:
        told = _decode_object(sequence)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at $")
        raise TurnFaultError(f"sequence{where}: {what[:1].lower()}{what[1:]}") from error
    if told.reset:
        raise TurnFaultError("sequence.reset: not in a file: give what begins anew an id of its own")
    on_error = None if told.on_error is None else OnError(told.on_error)
    carry = None if told.carry is None else Carry(told.carry)
    return LineTurn(_fit("sequence.id", told.id), told.index, bool(told.last), on_error, carry)


def turn_by(field: str, line: bytes) -> LineTurn | None:
    """By a field of the line, or of its body, such as `metadata.conversation`: a string or a whole number.
    None: it is not there. Raises TurnFaultError."""
    fields = _decode_fields(line)
    raw = _found(fields, field.split("."))
    if raw in _NOTHING and (body := bytes(fields.get("body", msgspec.Raw()))).startswith(b"{"):
        raw = _found(_decode_fields(body), field.split("."))
    if raw in _NOTHING:
        return None
    if raw.startswith(b'"'):
        return LineTurn(_fit(field, _decode_string(raw)))
    if raw.removeprefix(b"-").isdigit():
        return LineTurn(_fit(field, raw.decode()))
    raise TurnFaultError(f"{field}: must be a string or a whole number, to name a sequence")


def _found(fields: dict[str, msgspec.Raw], path: list[str]) -> bytes:
    raw = bytes(fields.get(path[0], msgspec.Raw()))
    if len(path) == 1 or not raw.startswith(b"{"):
        return raw if len(path) == 1 else b""
    return _found(_decode_fields(raw), path[1:])


def _fit(where: str, name: str) -> str:
    if not 0 < (size := len(name.encode())) <= MAX_SEQUENCE_BYTES:
        raise TurnFaultError(f"{where}: an id of 1 to {MAX_SEQUENCE_BYTES} bytes, not of {size}")
    return name
