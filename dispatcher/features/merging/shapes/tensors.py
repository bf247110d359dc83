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

from dispatcher.features.merging.shapes.bodies import (
    MAX_OTHER_BYTES,
    divide_items,
    estimate_tokens,
    parse_model_field,
)
from dispatcher.features.merging.shapes.part import Part, Shape
from dispatcher.requests.json_fields import (
    NotUnderstoodError,
    check_utf8,
    join_canonical_fields,
    make_canonical,
    parse_fields,
    parse_items,
    parse_list_content,
    parse_object_with_list,
)

_dimensions = msgspec.json.Decoder(list[int]).decode
_encode = msgspec.json.Encoder().encode
MAX_ELEMENTS = 1 << 40
_BEYOND_JSON = re.compile(
    rb'"(binary_data|binary_data_output|binary_data_size|shared_memory_\w+|sequence_id|sequence_start|sequence_end)":'
    rb'(?!false|null|0[,}]|""[,}])'
)
"""Fields that refer to bytes after the JSON, to data elsewhere, or to a sequence. The text is canonical."""


def parse_part(shape: Shape, payload: bytes) -> Part:
    """Return the list call in a body. Raise NotUnderstoodError, or an error of the decoder."""
    body_fields = parse_fields(check_utf8(payload))
    if shape.list_field not in body_fields:
        raise NotUnderstoodError(f"no {shape.list_field} in the body")
    tensors = [parse_fields(bytes(tensor)) for tensor in parse_items(body_fields.pop(shape.list_field))]
    request_id = bytes(body_fields.pop("id", b""))
    data = [tensor.pop("data", None) for tensor in tensors]
    shapes = [parse_dimensions(tensor.pop("shape", None)) for tensor in tensors]
    if not tensors or None in data:
        raise NotUnderstoodError("a tensor without data")
    size = shapes[0][0]
    if any(each[0] != size for each in shapes):
        raise NotUnderstoodError("tensors of different first dimensions")
    if len(payload) - sum(len(each or b"") for each in data) > MAX_OTHER_BYTES:
        raise NotUnderstoodError(f"more than {MAX_OTHER_BYTES} bytes beside its data")
    row_elements = tuple(
        count_row_elements(each, dims) for each, dims in zip(data, shapes, strict=True) if each is not None
    )
    tensor_heads = tuple(_build_head(tensor, dims[1:]) for tensor, dims in zip(tensors, shapes, strict=True))
    other_fields = join_canonical_fields(body_fields.items())
    merge_key = b" ".join(
        # Flat and nested data cannot be concatenated, so the key says which of both each tensor has.
        [
            b"kserve",
            other_fields,
            *(b"%b%b%d" % (*head, row > 0) for head, row in zip(tensor_heads, row_elements, strict=True)),
        ]
    )
    if _BEYOND_JSON.search(merge_key):
        raise NotUnderstoodError("data that are not in the JSON, or a request of a sequence")
    lists = tuple(memoryview(each)[1:-1] for each in data if each is not None)
    return Part(
        shape,
        merge_key,
        parse_model_field(body_fields),
        size,
        estimate_tokens(size, sum(map(len, lists))),
        payload,
        other_fields,
        lists,
        id=request_id if request_id != b"null" else b"",
        tensor_heads=tensor_heads,
        row_elements=row_elements,
    )


def parse_dimensions(text: msgspec.Raw | None) -> list[int]:
    """Return the shape of a tensor."""
    dims = _dimensions(text) if text is not None else []
    if not dims or min(dims) < 1 or prod(dims) > MAX_ELEMENTS:
        raise NotUnderstoodError("a tensor without a shape, or without rows")
    return dims


def count_row_elements(data: msgspec.Raw, dims: Sequence[int]) -> int:
    """Return how many elements of the data make a row. 0 if each row is a list of its own.

    Check that the number of elements matches the shape, as far as that is possible without decoding each
    element.
    """
    text = bytes(data)
    if text[:1] != b"[" or not text[1:-1].strip():
        raise NotUnderstoodError("a tensor whose data are no list, or an empty one")
    is_nested = len(dims) > 1 and text[1:].lstrip()[:1] == b"["
    is_plain = b'"' not in text and b"{" not in text
    # Commas inside strings or objects would be counted as well.
    element_count = text.count(b",") + 1 if is_plain else len(parse_items(data))
    if element_count != (prod(dims) if is_plain or not is_nested else dims[0]) or (
        is_nested and len(parse_items(data)) != dims[0]
    ):
        raise NotUnderstoodError("a tensor whose data are not as many as its shape says")
    return 0 if is_nested else prod(dims[1:])


def _build_head(tensor: dict[str, msgspec.Raw], tail: Sequence[int]) -> tuple[bytes, bytes]:
    for name in ("name", "datatype"):
        if name not in tensor:
            raise NotUnderstoodError(f"a tensor without {name}")
    return (
        b'{%b,"shape":[' % join_canonical_fields(tensor.items()),
        b'%b],"data":[' % b"".join(b",%d" % each for each in tail),
    )


def merge_parts(parts: Sequence[Part]) -> bytes:
    """Return one body with the rows of all parts in sequence. Only a single part keeps its id."""
    first = parts[0]
    size = b"%d" % sum(part.size for part in parts)
    text: list[bytes | memoryview] = [b"{", first.other_fields, b"," if first.other_fields else b""]
    if first.id and len(parts) == 1:
        text += (b'"id":', first.id, b",")
    text.append(b'"inputs":[')
    for number, (before, after) in enumerate(first.tensor_heads):
        text += (b"," if number else b"", before, size, after)
        text.append(b",".join([part.lists[number] for part in parts]))
        text.append(b"]}")
    text.append(b"]}")
    return b"".join(text)


def split_rows(text: bytes | memoryview, size: int, elements: int) -> list[bytes]:
    """Return the text of each row. `text` is the text between the brackets, with this many elements per
    row."""
    plain = bytes(text)
    if elements and b'"' not in plain and b"{" not in plain and b"[" not in plain:
        parts: Sequence[bytes] = plain.split(b",")
    else:
        parts = parse_list_content(text)
    if elements <= 1:
        return [bytes(row) for row in parts]
    return [b",".join(parts[at : at + elements]) for at in range(0, size * elements, elements)]


def cut_part(part: Part, max_items: int, max_tokens: float) -> list[Part]:
    """Return the pieces in order, each as long as it may be."""
    columns = [
        split_rows(text, part.size, elements)
        for text, elements in zip(part.lists, part.row_elements, strict=True)
    ]
    weights = None
    if max_tokens < inf:
        weights = [1 + estimate_tokens(1, sum(map(len, row))) for row in zip(*columns, strict=True)]
    pieces = []
    for start, end in divide_items(part.size, max_items, weights, max_tokens):
        lists = tuple(b",".join(column[start:end]) for column in columns)
        size = end - start
        tokens = estimate_tokens(size, sum(map(len, lists)))
        pieces.append(msgspec.structs.replace(part, size=size, tokens=tokens, payload=b"", lists=lists))
    return pieces


Output = tuple[dict[str, Any], list[int], int]
"""Fields of an output, its shape, and the number of elements per row."""


def parse_outputs(body: bytes, name: str, size: int) -> tuple[dict[str, Any], list[Output]]:
    """Return the fields of an answer, and its tensors, each with `size` rows."""
    answer_fields, listed = parse_object_with_list(body, name)
    tensors: list[Output] = []
    for output in listed:
        if "data" not in output:
            raise NotUnderstoodError("an output without data")
        dims = parse_dimensions(output.get("shape"))
        if dims[0] != size:
            raise NotUnderstoodError(f"an output of {dims[0]} rows in the answer to {size}")
        tensors.append((output, dims, count_row_elements(output["data"], dims)))
    if not tensors:
        raise NotUnderstoodError("no outputs in the answer")
    return answer_fields, tensors


def split_answer(parts: Sequence[Part], body: bytes) -> list[bytes]:
    """Return the answers to the parts. Raise NotUnderstoodError, or an error of the decoder."""
    size = sum(part.size for part in parts)
    answer_fields, tensors = parse_outputs(body, parts[0].shape.answer_field, size)
    texts = [split_rows(memoryview(output["data"])[1:-1], size, row) for output, _, row in tensors]
    answers = []
    start = 0
    for part in parts:
        end = start + part.size
        part_outputs = [
            _rewrite_output(output, [part.size, *dims[1:]], rows[start:end])
            for (output, dims, _), rows in zip(tensors, texts, strict=True)
        ]
        answers.append(_encode(_build_answer(part, answer_fields, part_outputs)))
        start = end
    return answers


def _rewrite_output(
    output: dict[str, Any], dims: list[int], rows: Sequence[bytes | memoryview]
) -> dict[str, Any]:
    return {**output, "shape": dims, "data": msgspec.Raw(b"[%b]" % b",".join(rows))}


def _build_answer(
    part: Part, answer_fields: dict[str, Any], part_outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    answer = {**answer_fields, part.shape.answer_field: part_outputs}
    if part.id:
        answer["id"] = msgspec.Raw(part.id)
    return answer


def join_answers(part: Part, pieces: Sequence[Part], piece_bodies: Sequence[bytes]) -> bytes:
    """Return the joined answer. Raise NotUnderstoodError, or an error of the decoder."""
    answers = [
        parse_outputs(body, part.shape.answer_field, piece.size)
        for piece, body in zip(pieces, piece_bodies, strict=True)
    ]
    answer_fields, first = answers[0]
    descriptions = [_describe_outputs(tensors) for _, tensors in answers]
    if any(each != descriptions[0] for each in descriptions):
        raise NotUnderstoodError("answers with different outputs")
    part_outputs = [
        _rewrite_output(
            output,
            [part.size, *dims[1:]],
            [memoryview(tensors[number][0]["data"])[1:-1] for _, tensors in answers],
        )
        for number, (output, dims, _) in enumerate(first)
    ]
    return _encode(_build_answer(part, answer_fields, part_outputs))


def _describe_outputs(tensors: Sequence[Output]) -> list[tuple[bytes, bytes, list[int], int]]:
    """Return what the outputs of several answers must have in common to belong to one tensor."""
    return [
        (
            make_canonical(bytes(output.get("name", b""))),
            make_canonical(bytes(output.get("datatype", b""))),
            dims[1:],
            row,
        )
        for output, dims, row in tensors
    ]
