"""Bodies and answers with tensors (JSON of the v2 protocol of KServe and Triton), merged along the first
axis.

A body has several tensors, each with a shape. Their data are flat, or nested as the shape says. All tensors
of a body have the same number of rows, which is the size of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, prod
from typing import Any

import msgspec

from dispatcher.core.merging.shapes.bodies import REST_BYTES_MOST, estimated, model_of, spans
from dispatcher.core.merging.shapes.fields import (
    canonical,
    canonical_fields,
    fields,
    inside,
    items,
    opened,
    text_of,
)
from dispatcher.core.merging.shapes.part import NotUnderstoodError, Part, Shape

_dimensions = msgspec.json.Decoder(list[int]).decode
_encode = msgspec.json.Encoder().encode
ELEMENTS_MOST = 1 << 40
_BEYOND_JSON = re.compile(
    rb'"(binary_data|binary_data_output|binary_data_size|shared_memory_\w+|sequence_id|sequence_start|sequence_end)":'
    rb'(?!false|null|0[,}]|""[,}])'
)
"""Fields that refer to bytes after the JSON, to data elsewhere, or to a sequence. The text is canonical."""


def read(shape: Shape, payload: bytes) -> Part:
    """Return the list call in a body. Raise NotUnderstoodError, or an error of the decoder."""
    found = fields(text_of(payload))
    if shape.listed not in found:
        raise NotUnderstoodError(f"no {shape.listed} in the body")
    tensors = [fields(bytes(tensor)) for tensor in items(found.pop(shape.listed))]
    given = bytes(found.pop("id", b""))
    data = [tensor.pop("data", None) for tensor in tensors]
    shapes = [dimensions(tensor.pop("shape", None)) for tensor in tensors]
    if not tensors or None in data:
        raise NotUnderstoodError("a tensor without data")
    size = shapes[0][0]
    if any(each[0] != size for each in shapes):
        raise NotUnderstoodError("tensors of different first dimensions")
    if len(payload) - sum(len(each or b"") for each in data) > REST_BYTES_MOST:
        raise NotUnderstoodError(f"more than {REST_BYTES_MOST} bytes beside its data")
    rows = tuple(checked(each, dims) for each, dims in zip(data, shapes, strict=True) if each is not None)
    heads = tuple(_head(tensor, dims[1:]) for tensor, dims in zip(tensors, shapes, strict=True))
    rest = canonical_fields(found.items())
    said = b" ".join(
        # Flat and nested data cannot be concatenated, so the key says which of both each tensor has.
        [b"kserve", rest, *(b"%b%b%d" % (*head, row > 0) for head, row in zip(heads, rows, strict=True))]
    )
    if _BEYOND_JSON.search(said):
        raise NotUnderstoodError("data that are not in the JSON, or a request of a sequence")
    lists = tuple(memoryview(each)[1:-1] for each in data if each is not None)
    return Part(
        shape,
        said,
        model_of(found),
        size,
        estimated(size, sum(map(len, lists))),
        payload,
        rest,
        lists,
        id=given if given != b"null" else b"",
        heads=heads,
        rows=rows,
    )


def dimensions(text: msgspec.Raw | None) -> list[int]:
    """Return the shape of a tensor."""
    found = _dimensions(text) if text is not None else []
    if not found or min(found) < 1 or prod(found) > ELEMENTS_MOST:
        raise NotUnderstoodError("a tensor without a shape, or without rows")
    return found


def checked(data: msgspec.Raw, dims: Sequence[int]) -> int:
    """Return how many elements of the data make a row. 0 if each row is a list of its own.

    Check that the number of elements matches the shape, as far as that is possible without decoding each
    element.
    """
    text = bytes(data)
    if text[:1] != b"[" or not text[1:-1].strip():
        raise NotUnderstoodError("a tensor whose data are no list, or an empty one")
    nested = len(dims) > 1 and text[1:].lstrip()[:1] == b"["
    plain = b'"' not in text and b"{" not in text
    # Commas inside strings or objects would be counted as well.
    counted = text.count(b",") + 1 if plain else len(items(data))
    if counted != (prod(dims) if plain or not nested else dims[0]) or (
        nested and len(items(data)) != dims[0]
    ):
        raise NotUnderstoodError("a tensor whose data are not as many as its shape says")
    return 0 if nested else prod(dims[1:])


def _head(tensor: dict[str, msgspec.Raw], tail: Sequence[int]) -> tuple[bytes, bytes]:
    for name in ("name", "datatype"):
        if name not in tensor:
            raise NotUnderstoodError(f"a tensor without {name}")
    return (
        b'{%b,"shape":[' % canonical_fields(tensor.items()),
        b'%b],"data":[' % b"".join(b",%d" % each for each in tail),
    )


def merge(parts: Sequence[Part]) -> bytes:
    """Return one body with the rows of all parts in sequence. Only a single part keeps its id."""
    first = parts[0]
    size = b"%d" % sum(part.size for part in parts)
    text: list[bytes | memoryview] = [b"{", first.rest, b"," if first.rest else b""]
    if first.id and len(parts) == 1:
        text += (b'"id":', first.id, b",")
    text.append(b'"inputs":[')
    for number, (before, after) in enumerate(first.heads):
        text += (b"," if number else b"", before, size, after)
        text.append(b",".join([part.lists[number] for part in parts]))
        text.append(b"]}")
    text.append(b"]}")
    return b"".join(text)


def rows_of(text: bytes | memoryview, size: int, elements: int) -> list[bytes]:
    """Return the text of each row. `text` is the text between the brackets, with this many elements per
    row."""
    plain = bytes(text)
    if elements and b'"' not in plain and b"{" not in plain and b"[" not in plain:
        found: Sequence[bytes] = plain.split(b",")
    else:
        found = inside(text)
    if elements <= 1:
        return [bytes(row) for row in found]
    return [b",".join(found[at : at + elements]) for at in range(0, size * elements, elements)]


def cut(part: Part, most: int, most_tokens: float) -> list[Part]:
    """Return the pieces in order, each as long as it may be."""
    columns = [
        rows_of(text, part.size, elements) for text, elements in zip(part.lists, part.rows, strict=True)
    ]
    weights = None
    if most_tokens < inf:
        weights = [1 + estimated(1, sum(map(len, row))) for row in zip(*columns, strict=True)]
    pieces = []
    for start, end in spans(part.size, most, weights, most_tokens):
        lists = tuple(b",".join(column[start:end]) for column in columns)
        size = end - start
        tokens = estimated(size, sum(map(len, lists)))
        pieces.append(msgspec.structs.replace(part, size=size, tokens=tokens, payload=b"", lists=lists))
    return pieces


Output = tuple[dict[str, Any], list[int], int]
"""Fields of an output, its shape, and the number of elements per row."""


def outputs(body: bytes, name: str, size: int) -> tuple[dict[str, Any], list[Output]]:
    """Return the fields of an answer, and its tensors, each with `size` rows."""
    found, listed = opened(body, name)
    tensors: list[Output] = []
    for output in listed:
        if "data" not in output:
            raise NotUnderstoodError("an output without data")
        dims = dimensions(output.get("shape"))
        if dims[0] != size:
            raise NotUnderstoodError(f"an output of {dims[0]} rows in the answer to {size}")
        tensors.append((output, dims, checked(output["data"], dims)))
    if not tensors:
        raise NotUnderstoodError("no outputs in the answer")
    return found, tensors


def split(parts: Sequence[Part], body: bytes) -> list[bytes]:
    """Return the answers to the parts. Raise NotUnderstoodError, or an error of the decoder."""
    size = sum(part.size for part in parts)
    found, tensors = outputs(body, parts[0].shape.answer, size)
    texts = [rows_of(memoryview(output["data"])[1:-1], size, row) for output, _, row in tensors]
    answers = []
    start = 0
    for part in parts:
        end = start + part.size
        mine = [
            _rewritten(output, [part.size, *dims[1:]], rows[start:end])
            for (output, dims, _), rows in zip(tensors, texts, strict=True)
        ]
        answers.append(_encode(_answer(part, found, mine)))
        start = end
    return answers


def _rewritten(output: dict[str, Any], dims: list[int], rows: Sequence[bytes | memoryview]) -> dict[str, Any]:
    return {**output, "shape": dims, "data": msgspec.Raw(b"[%b]" % b",".join(rows))}


def _answer(part: Part, found: dict[str, Any], mine: list[dict[str, Any]]) -> dict[str, Any]:
    answer = {**found, part.shape.answer: mine}
    if part.id:
        answer["id"] = msgspec.Raw(part.id)
    return answer


def join(part: Part, pieces: Sequence[Part], bodies: Sequence[bytes]) -> bytes:
    """Return the joined answer. Raise NotUnderstoodError, or an error of the decoder."""
    answers = [
        outputs(body, part.shape.answer, piece.size) for piece, body in zip(pieces, bodies, strict=True)
    ]
    found, first = answers[0]
    said = [_said(tensors) for _, tensors in answers]
    if any(each != said[0] for each in said):
        raise NotUnderstoodError("answers with different outputs")
    mine = [
        _rewritten(
            output,
            [part.size, *dims[1:]],
            [memoryview(tensors[number][0]["data"])[1:-1] for _, tensors in answers],
        )
        for number, (output, dims, _) in enumerate(first)
    ]
    return _encode(_answer(part, found, mine))


def _said(tensors: Sequence[Output]) -> list[tuple[bytes, bytes, list[int], int]]:
    """Return what the outputs of several answers must have in common to belong to one tensor."""
    return [
        (
            canonical(bytes(output.get("name", b""))),
            canonical(bytes(output.get("datatype", b""))),
            dims[1:],
            row,
        )
        for output, dims, row in tensors
    ]
