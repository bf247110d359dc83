"""Models for list calls: answers made from a hash of each item, in the format of the real servers.

The module parses bodies on its own, so that tests compare the dispatcher with code that it does not share.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

CHARS_PER_TOKEN = 4
SPOILED_SHARE = 0.5
"""Share of the neighbouring vector that is mixed into each vector of a call with wrong answers."""


class BadCallError(Exception):
    """Error for a body that the API does not accept."""


@dataclass(frozen=True, slots=True)
class ListCall:
    """Parsed body of a list call, and the function that makes its answer."""

    texts: Sequence[str]
    """Text of each item."""
    tokens: int
    make_answer: Callable[[bool], Any]
    """Function that makes the answer. With True the answer is wrong: each item is influenced by its
    neighbour."""
    is_indented: bool = False


def count_tokens(text: str) -> int:
    """Return the number of tokens of a text: one per four characters, and two that mark begin and end."""
    return 2 + math.ceil(len(text) / CHARS_PER_TOKEN)


@lru_cache(maxsize=4096)
def make_vector(text: str, dims: int) -> tuple[float, ...]:
    """Return a vector of length 1 that depends only on the text, rounded to 32-bit floats."""
    # JSON may contain lone surrogates, which UTF-8 cannot encode.
    drawn = struct.unpack(f"<{dims}I", hashlib.shake_128(text.encode("utf-8", "replace")).digest(4 * dims))
    return _normalize_vector([number / 2**31 - 1 for number in drawn])


def _normalize_vector(numbers: Sequence[float]) -> tuple[float, ...]:
    length = math.sqrt(sum(number * number for number in numbers)) or 1.0
    count = len(numbers)
    # Rounded to 32 bits, like the numbers of real servers.
    return struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *(number / length for number in numbers)))


def make_vectors(texts: Sequence[str], dims: int, is_wrong: bool) -> list[tuple[float, ...]]:
    correct = [make_vector(text, dims) for text in texts]
    if not is_wrong:
        return correct
    return [
        _normalize_vector([a + SPOILED_SHARE * b for a, b in zip(one, other, strict=True)])
        for one, other in pairwise([*correct, correct[0]])
    ]


def make_scores(query: str | Sequence[str], texts: Sequence[str], is_wrong: bool) -> list[float]:
    """Return a score from 0 to 1 for each pair."""
    queries = [query] * len(texts) if isinstance(query, str) else query
    correct = [
        (1.0 + make_vector(f"{one}\0{text}", 2)[0]) / 2 for one, text in zip(queries, texts, strict=True)
    ]
    return [1.0 - score for score in correct] if is_wrong else correct


def parse_call(path: str, body: bytes, *, model: str, dims: int, index_last: bool) -> ListCall:
    """Parse a call. Raises BadCallError."""
    path = path.partition("?")[0]
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadCallError(f"not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise BadCallError("not an object")
    for pattern, reader in _PARSERS:
        if match := pattern.fullmatch(path):
            return reader(
                asked, match.groupdict().get("model") or asked.get("model") or model, dims, index_last
            )
    raise BadCallError(f"nothing is at {path}")


def _parse_texts(value: Any) -> list[str]:
    """Parse strings or lists of token ids, or a single one of them."""
    # Not `isinstance`: booleans are integers in Python, but no token ids.
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadCallError("no input")
    if not all(isinstance(item, str) or _is_token_ids(item) for item in value):
        raise BadCallError("an input is neither a text nor token ids")
    return [item if isinstance(item, str) else json.dumps(item) for item in value]


def _is_token_ids(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(each) is int for each in item)


def _parse_strings(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise BadCallError("no list")
    return [item if isinstance(item, str) else json.dumps(item, sort_keys=True) for item in value]


def _build_usage(texts: Sequence[str]) -> tuple[int, dict[str, Any]]:
    count = sum(map(count_tokens, texts))
    return count, {
        "prompt_tokens": count,
        "total_tokens": count,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _parse_embeddings(asked: Mapping[str, Any], model: str, dims: int, index_last: bool) -> ListCall:
    texts = _parse_texts(asked.get("input"))
    count, usage = _build_usage(texts)
    size = asked.get("dimensions") or dims

    def build_answer(wrong: bool) -> Any:
        data = []
        for index, found in enumerate(make_vectors(texts, size, wrong)):
            embedding: Any = found
            if asked.get("encoding_format") == "base64":
                # Little-endian 32-bit floats, as in the OpenAI API.
                embedding = base64.b64encode(struct.pack(f"<{size}f", *found)).decode()
            item = {"object": "embedding", "index": index, "embedding": embedding}
            if index_last:
                # Moves the key to the end, since some servers write it last.
                item["index"] = item.pop("index")
            data.append(item)
        return {"object": "list", "data": data, "model": model, "usage": usage}

    return ListCall(texts, count, build_answer)


def _parse_embed(asked: Mapping[str, Any], _model: str, dims: int, _last: bool) -> ListCall:
    texts = _parse_texts(asked.get("inputs"))
    return ListCall(texts, _build_usage(texts)[0], lambda wrong: make_vectors(texts, dims, wrong))


def _parse_instances(asked: Mapping[str, Any], _model: str, _dims: int, _last: bool) -> ListCall:
    texts = _parse_strings(asked.get("instances"))
    return ListCall(
        texts,
        _build_usage(texts)[0],
        lambda wrong: {"predictions": make_vectors(texts, 3, wrong)},
        is_indented=True,
    )


def _parse_predict(asked: Mapping[str, Any], _model: str, _dims: int, _last: bool) -> ListCall:
    inputs = asked.get("inputs")
    batch = isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], list)
    rows = inputs if batch else [inputs if isinstance(inputs, list) else [inputs]]
    if not isinstance(rows, list) or not all(isinstance(row, list) and 1 <= len(row) <= 2 for row in rows):
        raise BadCallError("`inputs` are neither texts nor pairs of texts")
    texts = _parse_strings([row[0] if len(row) == 1 else row for row in rows])

    def build_answer(wrong: bool) -> Any:
        found = [
            [{"score": score, "label": "yes"}, {"score": 1.0 - score, "label": "no"}]
            for score in make_scores("", texts, wrong)
        ]
        return found if batch else found[0]

    return ListCall(texts, _build_usage(texts)[0], build_answer)


def _parse_rerank(asked: Mapping[str, Any], model: str, _dims: int, _last: bool) -> ListCall:
    query, tei = asked.get("query"), "texts" in asked
    if not isinstance(query, str):
        raise BadCallError("no query")
    texts = _parse_strings(asked.get("texts" if tei else "documents"))
    count, usage = _build_usage([query + text for text in texts])

    def build_answer(wrong: bool) -> Any:
        found = sorted(enumerate(make_scores(query, texts, wrong)), key=lambda pair: (-pair[1], pair[0]))
        if tei:
            return [{"index": index, "score": score} for index, score in found]
        results = [
            {"index": index, "document": {"text": texts[index]}, "relevance_score": score}
            for index, score in found[: asked.get("top_n") or None]
        ]
        return {"id": "rerank-1", "model": model, "usage": usage, "results": results}

    return ListCall(texts, count, build_answer)


def _parse_score(asked: Mapping[str, Any], model: str, _dims: int, _last: bool) -> ListCall:
    ones, texts = asked.get("text_1"), asked.get("text_2")
    texts = [texts] if isinstance(texts, str) else _parse_strings(texts)
    if isinstance(ones, list) and len(ones) == 1:
        ones = ones[0]
    if not isinstance(ones, str) and not (isinstance(ones, list) and len(ones) == len(texts)):
        raise BadCallError("Input lengths must be either 1:1, 1:N or N:N")
    count, usage = _build_usage(texts)

    def build_answer(wrong: bool) -> Any:
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(make_scores(ones, texts, wrong))
        ]
        return {"id": "score-1", "object": "list", "created": 1, "model": model, "data": data, "usage": usage}

    return ListCall(texts, count, build_answer)


def _parse_tensors(asked: Mapping[str, Any], model: str, dims: int, _last: bool) -> ListCall:
    inputs = asked.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise BadCallError("no inputs")
    try:
        columns = [_split_rows(tensor["data"], tensor["shape"]) for tensor in inputs]
    except (KeyError, TypeError, IndexError):
        raise BadCallError("a tensor without data or shape") from None
    if len({len(column) for column in columns}) != 1:
        raise BadCallError("input batch size does not match other inputs")
    texts = [json.dumps(row) for row in zip(*columns, strict=True)]
    nested = isinstance(inputs[0]["data"][0], list)

    def build_answer(wrong: bool) -> Any:
        rows = make_vectors(texts, dims, wrong)
        flat = [number for row in rows for number in row]
        outputs = [
            {"name": "y", "datatype": "FP32", "shape": [len(rows), dims], "data": rows if nested else flat},
            {
                "name": "label",
                "datatype": "BYTES",
                "shape": [len(rows)],
                "data": [f"a,{row[0]:.1f}" for row in rows],
            },
        ]
        wanted = [output["name"] for output in asked.get("outputs") or outputs]
        found = {"model_name": model, "model_version": "1"}
        return {
            **found,
            **({"id": asked["id"]} if "id" in asked else {}),
            "outputs": [output for output in outputs if output["name"] in wanted],
        }

    return ListCall(texts, _build_usage(texts)[0], build_answer)


def _split_rows(data: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """Split the data of a tensor, flat or nested, into the rows of its first dimension."""
    each = math.prod(shape[1:])
    nested = len(shape) > 1 and isinstance(data[0], list)
    if len(data) != (shape[0] if nested else shape[0] * each):
        raise BadCallError("unexpected size of the data of an input")
    return list(data) if nested else [list(data[at : at + each]) for at in range(0, len(data), each)]


_PARSERS: Sequence[tuple[re.Pattern[str], Callable[[Mapping[str, Any], str, int, bool], ListCall]]] = (
    (re.compile(r".*/embeddings"), _parse_embeddings),
    (re.compile(r".*/v1/models/(?P<model>[^/:]+)(?:/versions/\d+)?:predict"), _parse_instances),
    (re.compile(r".*/v2/models/(?P<model>[^/]+)(?:/versions/[^/]+)?/infer"), _parse_tensors),
    (re.compile(r".*/rerank"), _parse_rerank),
    (re.compile(r".*/score"), _parse_score),
    (re.compile(r".*/embed"), _parse_embed),
    (re.compile(r".*/predict"), _parse_predict),
)
