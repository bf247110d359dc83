"""List calls for tests: bodies of every shape, and a model server that answers them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from dispatcher.features.merging.shapes import SHAPES, Part, Shape, parse_part
from dispatcher.lab.standin.list_models import parse_call

PATHS = {
    "embeddings": "/v1/embeddings",
    "tensorflow": "/v1/models/m:predict",
    "kserve": "/v2/models/m/infer",
    "rerank": "/v1/rerank",
    "tei_rerank": "/rerank",
    "score": "/score",
    "embed": "/embed",
    "predict": "/predict",
}
"""Path at which the stand-in server has each shape."""


def encode_body(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def parse_valid_part(name: str, body: Any) -> Part:
    """Parse a valid body."""
    found = parse_part(SHAPES[name], body if isinstance(body, bytes) else encode_body(body))
    assert isinstance(found, Part), found
    return found


def answer_call(name: str, body: bytes, *, wrong: bool = False) -> bytes:
    """Return the answer of a correct server, or of one that gets all numbers wrong."""
    call = parse_call(PATHS[name], body, model="m", dims=4, index_last=False)
    return msgspec.json.encode(call.make_answer(wrong))


@dataclass(frozen=True)
class BodyGroup:
    """Bodies that may be merged into one call."""

    name: str
    bodies: list[dict[str, Any]]

    @property
    def shape(self) -> Shape:
        return SHAPES[self.name]

    @property
    def parts(self) -> list[Part]:
        return [parse_valid_part(self.name, body) for body in self.bodies]


texts = st.text(st.characters(codec="utf-8"), max_size=12)
token_ids = st.lists(st.integers(0, 99), min_size=1, max_size=5)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers(-9, 9) | floats | texts
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
small_counts = st.integers(1, 5)


def small_lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, min_size=1, max_size=5)


@st.composite
def body_groups(draw: st.DrawFn, names: tuple[str, ...] = tuple(PATHS)) -> BodyGroup:
    """Draw one to five bodies of one shape that differ in their lists only."""
    name = draw(st.sampled_from(names))
    count = draw(small_counts)
    bodies: list[dict[str, Any]]
    if name in ("embeddings", "embed"):
        kind = draw(st.sampled_from([texts, token_ids]))
        rest: dict[str, Any] = draw(
            st.fixed_dictionaries({"model": texts}, optional={"encoding_format": st.just("base64")})
        )
        field = "input" if name == "embeddings" else "inputs"
        rest = rest if name == "embeddings" else {"truncate": draw(st.booleans())}
        bodies = [{field: draw(kind | small_lists(kind)), **rest} for _ in range(count)]
    elif name == "tensorflow":
        rest = draw(st.fixed_dictionaries({}, optional={"signature_name": texts}))
        bodies = [{**rest, "instances": draw(small_lists(json_values))} for _ in range(count)]
    elif name == "kserve":
        bodies = draw(tensor_bodies(count))
    elif name == "rerank":
        rest = {"model": "m", "query": draw(texts)}
        if draw(st.booleans()):
            rest["top_n"] = draw(st.integers(1, 4))
        document = texts | st.fixed_dictionaries({"text": texts})
        bodies = [{**rest, "documents": draw(small_lists(document))} for _ in range(count)]
    elif name == "tei_rerank":
        rest = {"query": draw(texts)}
        bodies = [{**rest, "texts": draw(small_lists(texts))} for _ in range(count)]
    elif name == "score":
        bodies = draw(score_bodies(count))
    else:
        pair = st.lists(texts, min_size=1, max_size=2)
        bodies = [{"inputs": draw(texts | pair | small_lists(pair))} for _ in range(count)]
    return BodyGroup(name, bodies)


@st.composite
def score_bodies(draw: st.DrawFn, count: int) -> list[dict[str, Any]]:
    if draw(st.booleans()):
        first = draw(texts)
        return [
            {"model": "m", "text_1": first, "text_2": draw(texts | small_lists(texts))} for _ in range(count)
        ]
    pairs = [draw(small_lists(st.tuples(texts, texts))) for _ in range(count)]
    return [
        {"model": "m", "text_1": [first for first, _ in each], "text_2": [second for _, second in each]}
        for each in pairs
    ]


@st.composite
def tensor_bodies(draw: st.DrawFn, count: int) -> list[dict[str, Any]]:
    """Draw bodies with one to three tensors, flat or nested."""
    kinds = [
        (draw(st.sampled_from(["FP32", "BYTES", "BOOL"])), draw(st.lists(st.integers(1, 3), max_size=2)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    nested = draw(st.booleans())
    values = {"FP32": floats, "BYTES": texts, "BOOL": st.booleans()}
    bodies = []
    for number in range(count):
        size = draw(small_counts)
        inputs = []
        for position, (datatype, tail) in enumerate(kinds):
            row = values[datatype]
            row_length = 1
            for length in reversed(tail):
                row_length *= length
                if nested:
                    row = st.lists(row, min_size=length, max_size=length)
            length = size if nested else size * row_length
            data = draw(st.lists(row, min_size=length, max_size=length))
            inputs.append(
                {"name": f"x{position}", "shape": [size, *tail], "datatype": datatype, "data": data}
            )
        body: dict[str, Any] = {"inputs": inputs}
        if draw(st.booleans()):
            body["id"] = f"r{number}"
        bodies.append(body)
    return bodies


def decode_without(answer: bytes, *names: str) -> Any:
    """Decode an answer and remove some of its fields."""
    decoded = json.loads(answer)
    if isinstance(decoded, dict):
        for name in names:
            decoded.pop(name, None)
    return decoded
