"""Bodies with one list: parse, merge and cut them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import inf

import msgspec

from dispatcher.features.merging.shapes.part import ItemKind, Part, Shape
from dispatcher.requests.json_fields import (
    NotUnderstoodError,
    check_utf8,
    join_canonical_fields,
    parse_fields,
    parse_items,
    parse_list_content,
)

MAX_OTHER_BYTES = 65_536
"""Largest size of a body without its list. A larger one is not made canonical, and is sent alone."""
BYTES_PER_TOKEN = 4
"""Estimated bytes of text per token, for English. Other scripts have up to twice as many tokens."""

_strings = msgspec.json.Decoder(list[str]).decode
_id_lists = msgspec.json.Decoder(list[list[int]]).decode
_ids = msgspec.json.Decoder(list[int]).decode
_string_lists = msgspec.json.Decoder(list[list[str]]).decode
_NOTHING = (b"null", b"false")
_COUNT = re.compile(rb"[1-9][0-9]{0,8}")


def estimate_tokens(size: int, text_bytes: int) -> int:
    """Estimate the tokens of items from the number of items and the bytes of their text as written.

    Each item counts one token, plus one per BYTES_PER_TOKEN of what is left without quotes and commas.
    """
    return size + max(0, text_bytes - 3 * size) // BYTES_PER_TOKEN


def parse_part(shape: Shape, payload: bytes) -> Part:
    """Return the list call in a body. Raise NotUnderstoodError, or an error of the decoder."""
    body_fields = parse_fields(check_utf8(payload))
    # Some paths have several formats, told apart by the field that holds the list.
    while shape.list_field not in body_fields:
        if shape.fallback is None:
            raise NotUnderstoodError(f"no {shape.list_field} in the body")
        shape = shape.fallback
    for name, why in shape.unsupported_fields.items():
        if name in body_fields and bytes(body_fields[name]) not in _NOTHING:
            raise NotUnderstoodError(f"{name}: {why}")
    listed = body_fields.pop(shape.list_field)
    second_list = None
    if (
        shape.second_list_field
        and shape.second_list_field in body_fields
        and bytes(body_fields[shape.second_list_field])[:1] == b"["
    ):
        second_list = body_fields.pop(shape.second_list_field)
    if len(payload) - len(listed) - len(second_list or b"") > MAX_OTHER_BYTES:
        raise NotUnderstoodError(f"more than {MAX_OTHER_BYTES} bytes beside its list")
    kind, size, tokens, is_single_item, text = _PARSERS[shape.item_kind](listed)
    lists: tuple[bytes | memoryview, ...] = (text,)
    if second_list is not None:
        second_kind, second_size, second_tokens, is_second_single, second_text = _PARSERS[shape.item_kind](
            second_list
        )
        if is_single_item or is_second_single or second_size != size:
            raise NotUnderstoodError(
                f"{shape.second_list_field} and {shape.list_field} are not as long as each other"
            )
        kind, tokens, lists = kind + second_kind, tokens + second_tokens, (text, second_text)
    top_text = b""
    if shape.top_field and shape.top_field in body_fields:
        top_text = bytes(body_fields[shape.top_field])
        if _COUNT.fullmatch(top_text):
            del body_fields[shape.top_field]
        elif top_text not in (b"null", b"0"):
            raise NotUnderstoodError(f"{shape.top_field}: no count")
        else:
            top_text = b""
    repeated_tokens = (
        estimate_tokens(0, len(body_fields[shape.repeated_field]) - 2)
        if shape.repeated_field and shape.repeated_field in body_fields
        else 0
    )
    other_fields = join_canonical_fields(body_fields.items())
    return Part(
        shape,
        b"%b %b %b %b" % (shape.name.encode(), kind, top_text, other_fields),
        parse_model_field(body_fields),
        size,
        tokens + size * repeated_tokens,
        payload,
        other_fields,
        lists,
        int(top_text or 0),
        is_single_item,
        repeated_tokens,
        has_token_ids=kind == _TOKEN_IDS,
    )


def parse_model_field(body_fields: dict[str, msgspec.Raw]) -> str:
    """Return the model that the body names. Empty if the value is not a string."""
    model = body_fields.get("model")
    if model is None or bytes(model)[:1] != b'"':
        return ""
    return msgspec.json.decode(model, type=str)


_TOKEN_IDS = b"ids"
"""Kind of items that are lists of token ids."""
_ParsedList = tuple[bytes, int, int, bool, bytes | memoryview]
"""Result of parsing a list: the kind of the items (bodies with different kinds are not merged), their number,
their tokens, whether it is a single item in place of a list, and the text between the brackets of the
list."""


def _parse_texts(listed: msgspec.Raw) -> _ParsedList:
    text = memoryview(listed)
    if text[0] == ord('"'):
        return b"text", 1, estimate_tokens(1, len(text)), True, text
    try:
        size = len(_strings(listed))
        kind, tokens, is_single_item = b"text", estimate_tokens(size, len(text) - 2), False
    except msgspec.ValidationError:
        kind = _TOKEN_IDS
        try:
            lists = _id_lists(listed)
            # Lists of token ids; an empty one among them makes the whole list invalid.
            size, tokens, is_single_item = len(lists) if all(lists) else 0, sum(map(len, lists)), False
        except msgspec.ValidationError:
            try:
                tokens = len(_ids(listed))
            except msgspec.ValidationError:
                raise NotUnderstoodError("its items are neither text nor token ids") from None
            size, is_single_item = 1, True
    if not size:
        raise NotUnderstoodError("an empty list")
    return kind, size, tokens, is_single_item, text if is_single_item else text[1:-1]


def _parse_pairs(listed: msgspec.Raw) -> _ParsedList:
    text = memoryview(listed)
    if text[0] == ord('"'):
        return b"", 1, estimate_tokens(1, len(text)), True, b"".join((b"[", text, b"]"))
    try:
        sizes, is_single_item = [len(_strings(listed))], True
    except msgspec.ValidationError:
        try:
            sizes, is_single_item = [len(one) for one in _string_lists(listed)], False
        except msgspec.ValidationError:
            raise NotUnderstoodError("its items are neither texts nor pairs of them") from None
    if not sizes or not 1 <= min(sizes) <= max(sizes) <= 2:
        raise NotUnderstoodError("an item is neither a text nor a pair of them")
    return (
        b"",
        len(sizes),
        estimate_tokens(len(sizes), len(text)),
        is_single_item,
        text if is_single_item else text[1:-1],
    )


def _parse_any(listed: msgspec.Raw) -> _ParsedList:
    if bytes(listed)[:1] != b"[":
        raise NotUnderstoodError("its items are not in a list")
    size = len(parse_items(listed))
    if not size:
        raise NotUnderstoodError("an empty list")
    text = memoryview(listed)
    return b"", size, estimate_tokens(size, len(text) - 2), False, text[1:-1]


_PARSERS = {ItemKind.TEXTS: _parse_texts, ItemKind.PAIRS: _parse_pairs, ItemKind.ANY: _parse_any}


def merge_parts(parts: Sequence[Part]) -> bytes:
    """Return one body with the lists of all parts in sequence. A single part keeps its number of
    requested items."""
    first = parts[0]
    shape = first.shape
    text: list[bytes | memoryview] = [b"{", first.other_fields, b"," if first.other_fields else b""]
    # The parts of a merged call may want different numbers, so the server returns all items.
    if first.top_count and len(parts) == 1:
        text.append(b'"%b":%d,' % (shape.top_field.encode(), first.top_count))
    for number, name in enumerate((shape.list_field, shape.second_list_field)[: len(first.lists)]):
        text.append(b'%b"%b":[' % (b"," if number else b"", name.encode()))
        text.append(b",".join([part.lists[number] for part in parts]))
        text.append(b"]")
    text.append(b"}")
    return b"".join(text)


def cut_part(part: Part, max_items: int, max_tokens: float) -> list[Part]:
    """Return the pieces in order, each as long as it may be. An item with too many tokens becomes a piece of
    its own."""
    columns = [parse_list_content(text) for text in part.lists]

    def count_tokens(texts: Sequence[bytes], size: int) -> int:
        if part.has_token_ids:
            return sum(bytes(text).count(b",") + 1 for text in texts)
        return sum(estimate_tokens(size, len(text)) for text in texts) + size * part.repeated_tokens

    weights = None
    if max_tokens < inf:
        rounded = (
            0 if part.has_token_ids else len(columns)
        )  # so that the estimate of a group never exceeds the sum of its items
        weights = [count_tokens(row, 1) + rounded for row in zip(*columns, strict=True)]
    pieces = []
    for start, end in divide_items(part.size, max_items, weights, max_tokens):
        lists = tuple(b",".join(column[start:end]) for column in columns)
        size = end - start
        pieces.append(
            msgspec.structs.replace(
                part, size=size, tokens=count_tokens(lists, size), payload=b"", lists=lists
            )
        )
    return pieces


def divide_items(
    size: int, max_items: int, weights: Sequence[float] | None, max_weight: float
) -> Iterator[tuple[int, int]]:
    """Yield start and end of each piece, so that it has at most this many items and this much weight."""
    if weights is None:
        yield from ((at, min(at + max_items, size)) for at in range(0, size, max_items))
        return
    start, weight = 0, 0.0
    for at, item_weight in enumerate(weights):
        if at > start and (at - start >= max_items or weight + item_weight > max_weight):
            yield start, at
            start, weight = at, 0.0
        weight += item_weight
    yield start, size
