"""What a shape is, and one request's body read by it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class Items(StrEnum):
    """What may stand in a shape's list."""

    TEXTS = "texts"
    """Strings, or lists of token ids; one of either may stand in place of the list."""
    PAIRS = "pairs"
    """Lists of one or two strings; one string or one pair may stand in place of the list, and is then
    answered without a list."""
    ANY = "any"
    """Whatever JSON has; always in a list."""
    TENSORS = "tensors"
    """Arrays that go together along their first axis, each with its shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A row of the table: where the list of a body lies, and where the list of its answer."""

    name: str
    paths: str
    """A regular expression that the path of a request matches whole, without its query."""
    listed: str
    """The field of the body that has the items."""
    items: Items = Items.ANY
    beside: str = ""
    """Another field, which may be a list as long: then both go together item by item."""
    each: str = ""
    """A field whose text goes with each item, and counts with each."""
    answer: str = ""
    """The field of the answer that has an item for each; empty: the answer is the list itself."""
    needs: str = ""
    """A field that each item of the answer has."""
    numbered: bool = False
    """Items of the answer say their index."""
    ranked: bool = False
    """They stand in descending order of what they need, and not in that of their index."""
    top: str = ""
    """The field of the body that says how many of the ranked items are wanted."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields that no body has (but as null or false) that can be merged or cut, and why."""
    vectors: bool = False
    """Each item of the answer is a vector, or has one where it needs a field: compared by direction."""
    near: float = 0.0
    """So much may numbers of two answers differ, however small they are."""
    otherwise: Shape | None = None
    """The row for a body without this list."""


class Unfit(msgspec.Struct, frozen=True):
    """Not to be merged, or an answer that cannot be split."""

    why: str


class NotUnderstoodError(Exception):
    """Bytes of others are not what the shape says. It stays in this package: its callers get an `Unfit`."""


class Part(msgspec.Struct, frozen=True, eq=False):
    """One request's body, read; or a piece that was cut of one."""

    shape: Shape
    key: bytes
    """Bodies of equal keys may travel together: all that they say beside their lists, canonical."""
    model: str
    """Empty where the body names none."""
    size: int
    """Items in its list; one that stands in place of a list counts one."""
    tokens: int
    """Of all its items: exact where they are token ids, else estimated (`bodies.estimated`)."""
    payload: bytes
    """The body as it came; empty: a piece."""
    rest: bytes
    """Its other fields, canonical: `"a":1,"b":2`."""
    lists: tuple[bytes | memoryview, ...]
    """What stands between the brackets: of the list and of what goes beside it, or of each tensor's data."""
    top: int = 0
    """So many of the ranked items are wanted; 0: all."""
    alone: bool = False
    """One item in place of a list."""
    each_tokens: int = 0
    """Tokens of each item that do not stand in the list."""
    id: bytes = b""
    """The id that its answer must have, as it is written; empty: whatever the server gives."""
    heads: tuple[tuple[bytes, bytes], ...] = ()
    """Of each tensor, what goes before its size and what between that and its data."""
    rows: tuple[int, ...] = ()
    """Of each tensor, how many elements of its data are one item; 0: one each, which is a list itself."""
