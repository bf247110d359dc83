"""The shape of a list call, and the parsed body of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class ItemKind(StrEnum):
    """Kind of the items in the list of a shape."""

    TEXTS = "texts"
    """Strings, or lists of token ids. A single item may replace the list."""
    PAIRS = "pairs"
    """Lists of one or two strings. A single string or pair may replace the list, and is then answered without
    a list."""
    ANY = "any"
    """Any JSON values, always in a list."""
    TENSORS = "tensors"
    """Arrays that are concatenated along their first axis, each with its shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A row of the table: position of the list in a body, and in its answer."""

    name: str
    path_pattern: str
    """Regular expression that matches the whole path of a request, without its query."""
    list_field: str
    """Field of the body that contains the items."""
    item_kind: ItemKind = ItemKind.ANY
    second_list_field: str = ""
    """Second field, which may be a list of the same length. Both lists are then merged item by item."""
    repeated_field: str = ""
    """Field whose text belongs to each item, and counts for each."""
    answer_field: str = ""
    """Field of the answer that contains a result for each item. Empty if the answer is itself the list."""
    item_field: str = ""
    """Field that each item of the answer has."""
    has_indexes: bool = False
    """True if items of the answer state their index."""
    is_ranked: bool = False
    """True if items of the answer are in descending order of `item_field` instead of the order of their
    index."""
    top_field: str = ""
    """Field of the body with the number of ranked items that are requested."""
    unsupported_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields whose presence (except as null or false) prevents merging and cutting, and why."""
    has_vectors: bool = False
    """True if each item of the answer is a vector, or contains one in `item_field`. Vectors are compared by
    direction."""
    tolerance: float = 0.0
    """Absolute difference that numbers of two answers may have, however small they are."""
    sequence_field: str = ""
    """Field of the body that tells a server about sequences. Empty if the shape has none."""
    fallback: Shape | None = None
    """Row for a body without this list."""


class Unfit(msgspec.Struct, frozen=True):
    """The body cannot be merged, or the answer cannot be split."""

    why: str


class Part(msgspec.Struct, frozen=True, eq=False):
    """The parsed body of one request, or a piece that was cut from it."""

    shape: Shape
    merge_key: bytes
    """Canonical text of the body without its lists. Only bodies with equal keys may be merged."""
    model: str
    """Model that the body names. Empty if it names none."""
    size: int
    """Number of items in its list. A single item in place of a list counts one."""
    tokens: int
    """Number of tokens of all items: exact for token ids, else estimated (`bodies.estimate_tokens`)."""
    payload: bytes
    """The original body. Empty for a piece."""
    other_fields: bytes
    """Other fields of the body, canonical: `"a":1,"b":2`."""
    lists: tuple[bytes | memoryview, ...]
    """Text between the brackets of the list and of the second list, or of the data of each tensor."""
    top_count: int = 0
    """Number of ranked items that are requested. 0 for all."""
    is_single_item: bool = False
    """True if the body has one item in place of a list."""
    repeated_tokens: int = 0
    """Number of tokens of each item that are not part of the list."""
    has_token_ids: bool = False
    """True if the items are lists of token ids."""
    id: bytes = b""
    """Id that the answer must have, as it is written. Empty for the id that the server chooses."""
    tensor_heads: tuple[tuple[bytes, bytes], ...] = ()
    """Text before the number of rows of each tensor, and text from there to its data."""
    row_elements: tuple[int, ...] = ()
    """Number of elements of the data of each tensor that make one row. 0 if each row is a list of its own."""
