"""Bodies with one list: parse, merge and cut them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import inf

import msgspec

from dispatcher.core.merging.shapes.fields import canonical_fields, fields, inside, items, text_of
from dispatcher.core.merging.shapes.part import Items, NotUnderstoodError, Part, Shape

REST_BYTES_MOST = 65_536
"""Largest size of a body without its list. A larger one is not made canonical, and is sent alone."""
TOKEN_BYTES = 4
"""Estimated bytes of text per token, for English. Other scripts have up to twice as many tokens."""

_strings = msgspec.json.Decoder(list[str]).decode
_id_lists = msgspec.json.Decoder(list[list[int]]).decode
_ids = msgspec.json.Decoder(list[int]).decode
_string_lists = msgspec.json.Decoder(list[list[str]]).decode
_NOTHING = (b"null", b"false")
_COUNT = re.compile(rb"[1-9][0-9]{0,8}")


def estimated(size: int, text_bytes: int) -> int:
    """Estimate the tokens of items from the number of items and the bytes of their text as written.

    Each item counts one token, plus one per BYTES_PER_TOKEN of what is left without quotes and commas.
    """
    return size + max(0, text_bytes - 3 * size) // TOKEN_BYTES


def read(shape: Shape, payload: bytes) -> Part:
    """Return the list call in a body. Raise NotUnderstoodError, or an error of the decoder."""
    found = fields(text_of(payload))
    # Some paths have several formats, told apart by the field that holds the list.
    while shape.listed not in found:
        if shape.otherwise is None:
            raise NotUnderstoodError(f"no {shape.listed} in the body")
        shape = shape.otherwise
    for name, why in shape.refused.items():
        if name in found and bytes(found[name]) not in _NOTHING:
            raise NotUnderstoodError(f"{name}: {why}")
    listed = found.pop(shape.listed)
    beside = None
    if shape.beside and shape.beside in found and bytes(found[shape.beside])[:1] == b"[":
        beside = found.pop(shape.beside)
    if len(payload) - len(listed) - len(beside or b"") > REST_BYTES_MOST:
        raise NotUnderstoodError(f"more than {REST_BYTES_MOST} bytes beside its list")
    form, size, tokens, alone, text = _READERS[shape.items](listed)
    lists: tuple[bytes | memoryview, ...] = (text,)
    if beside is not None:
        other, other_size, more, lone, other_text = _READERS[shape.items](beside)
        if alone or lone or other_size != size:
            raise NotUnderstoodError(f"{shape.beside} and {shape.listed} are not as long as each other")
        form, tokens, lists = form + other, tokens + more, (text, other_text)
    top_text = b""
    if shape.top and shape.top in found:
        top_text = bytes(found[shape.top])
        if _COUNT.fullmatch(top_text):
            del found[shape.top]
        elif top_text not in (b"null", b"0"):
            raise NotUnderstoodError(f"{shape.top}: no count")
        else:
            top_text = b""
    each = estimated(0, len(found[shape.each]) - 2) if shape.each and shape.each in found else 0
    rest = canonical_fields(found.items())
    return Part(
        shape,
        b"%b %b %b %b" % (shape.name.encode(), form, top_text, rest),
        model_of(found),
        size,
        tokens + size * each,
        payload,
        rest,
        lists,
        int(top_text or 0),
        alone,
        each,
    )


def model_of(found: dict[str, msgspec.Raw]) -> str:
    """Return the model that the body names. Empty if the value is not a string."""
    named = found.get("model")
    if named is None or bytes(named)[:1] != b'"':
        return ""
    return msgspec.json.decode(named, type=str)


_Read = tuple[bytes, int, int, bool, bytes | memoryview]
"""Result of parsing a list: the kind of the items (bodies with different kinds are not merged), their number,
their tokens, whether it is a single item in place of a list, and the text between the brackets of the
list."""


def _texts(listed: msgspec.Raw) -> _Read:
    text = memoryview(listed)
    if text[0] == ord('"'):
        return b"text", 1, estimated(1, len(text)), True, text
    try:
        size = len(_strings(listed))
        kind, tokens, alone = b"text", estimated(size, len(text) - 2), False
    except msgspec.ValidationError:
        kind = b"ids"
        try:
            lists = _id_lists(listed)
            # Lists of token ids; an empty one among them makes the whole list invalid.
            size, tokens, alone = len(lists) if all(lists) else 0, sum(map(len, lists)), False
        except msgspec.ValidationError:
            try:
                tokens = len(_ids(listed))
            except msgspec.ValidationError:
                raise NotUnderstoodError("its items are neither text nor token ids") from None
            size, alone = 1, True
    if not size:
        raise NotUnderstoodError("an empty list")
    return kind, size, tokens, alone, text if alone else text[1:-1]


def _pairs(listed: msgspec.Raw) -> _Read:
    text = memoryview(listed)
    if text[0] == ord('"'):
        return b"", 1, estimated(1, len(text)), True, b"".join((b"[", text, b"]"))
    try:
        sizes, alone = [len(_strings(listed))], True
    except msgspec.ValidationError:
        try:
            sizes, alone = [len(one) for one in _string_lists(listed)], False
        except msgspec.ValidationError:
            raise NotUnderstoodError("its items are neither texts nor pairs of them") from None
    if not sizes or not 1 <= min(sizes) <= max(sizes) <= 2:
        raise NotUnderstoodError("an item is neither a text nor a pair of them")
    return b"", len(sizes), estimated(len(sizes), len(text)), alone, text if alone else text[1:-1]


def _anything(listed: msgspec.Raw) -> _Read:
    if bytes(listed)[:1] != b"[":
        raise NotUnderstoodError("its items are not in a list")
    size = len(items(listed))
    if not size:
        raise NotUnderstoodError("an empty list")
    text = memoryview(listed)
    return b"", size, estimated(size, len(text) - 2), False, text[1:-1]


_READERS = {Items.TEXTS: _texts, Items.PAIRS: _pairs, Items.ANY: _anything}


def merge(parts: Sequence[Part]) -> bytes:
    """Return one body with the lists of all parts in sequence. A single part keeps its number of
    requested items."""
    first = parts[0]
    shape = first.shape
    text: list[bytes | memoryview] = [b"{", first.rest, b"," if first.rest else b""]
    # The parts of a merged call may want different numbers, so the server returns all items.
    if first.top and len(parts) == 1:
        text.append(b'"%b":%d,' % (shape.top.encode(), first.top))
    for number, name in enumerate((shape.listed, shape.beside)[: len(first.lists)]):
        text.append(b'%b"%b":[' % (b"," if number else b"", name.encode()))
        text.append(b",".join([part.lists[number] for part in parts]))
        text.append(b"]")
    text.append(b"}")
    return b"".join(text)


def cut(part: Part, most: int, most_tokens: float) -> list[Part]:
    """Return the pieces in order, each as long as it may be. An item with too many tokens becomes a piece of
    its own."""
    columns = [inside(text) for text in part.lists]
    ids = part.key.startswith(b"%b ids " % part.shape.name.encode())

    def tokens(texts: Sequence[bytes], size: int) -> int:
        if ids:
            return sum(bytes(text).count(b",") + 1 for text in texts)
        return sum(estimated(size, len(text)) for text in texts) + size * part.each_tokens

    weights = None
    if most_tokens < inf:
        rounded = (
            0 if ids else len(columns)
        )  # so that the estimate of a group never exceeds the sum of its items
        weights = [tokens(row, 1) + rounded for row in zip(*columns, strict=True)]
    pieces = []
    for start, end in spans(part.size, most, weights, most_tokens):
        lists = tuple(b",".join(column[start:end]) for column in columns)
        size = end - start
        pieces.append(
            msgspec.structs.replace(part, size=size, tokens=tokens(lists, size), payload=b"", lists=lists)
        )
    return pieces


def spans(
    size: int, most: int, weights: Sequence[float] | None, most_weight: float
) -> Iterator[tuple[int, int]]:
    """Yield start and end of each piece, so that it has at most this many items and this much weight."""
    if weights is None:
        yield from ((at, min(at + most, size)) for at in range(0, size, most))
        return
    start, weight = 0, 0.0
    for at, one in enumerate(weights):
        if at > start and (at - start >= most or weight + one > most_weight):
            yield start, at
            start, weight = at, 0.0
        weight += one
    yield start, size
