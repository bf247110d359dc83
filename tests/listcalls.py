"""List calls for tests: bodies of every shape, and the model that answers them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from dispatcher.core.merging.shapes import SHAPES, Part, Shape, parse_part
from dispatcher.lab.standin.list_models import parse_call as asked

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
"""Of each shape, where the stand-in has it."""


def text_of(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def part(name: str, body: Any) -> Part:
    """What is read of a body that is good."""
    found = parse_part(SHAPES[name], body if isinstance(body, bytes) else text_of(body))
    assert isinstance(found, Part), found
    return found


def model(name: str, body: bytes, *, wrong: bool = False) -> bytes:
    """What a server answers that does nothing wrong, or gets all its numbers wrong."""
    call = asked(PATHS[name], body, model="m", dims=4, index_last=False)
    return msgspec.json.encode(call.make_answer(wrong))


@dataclass(frozen=True)
class Group:
    """Bodies that may travel together."""

    name: str
    bodies: list[dict[str, Any]]

    @property
    def shape(self) -> Shape:
        return SHAPES[self.name]

    @property
    def parts(self) -> list[Part]:
        return [part(self.name, body) for body in self.bodies]


texts = st.text(st.characters(codec="utf-8"), max_size=12)
ids = st.lists(st.integers(0, 99), min_size=1, max_size=5)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers(-9, 9) | floats | texts
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
some = st.integers(1, 5)


def many(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, min_size=1, max_size=5)


@st.composite
def groups(draw: st.DrawFn, names: tuple[str, ...] = tuple(PATHS)) -> Group:
    """One to five bodies of one shape that say the same beside their lists."""
    name = draw(st.sampled_from(names))
    count = draw(some)
    bodies: list[dict[str, Any]]
    if name in ("embeddings", "embed"):
        kind = draw(st.sampled_from([texts, ids]))
        rest: dict[str, Any] = draw(
            st.fixed_dictionaries({"model": texts}, optional={"encoding_format": st.just("base64")})
        )
        field = "input" if name == "embeddings" else "inputs"
        rest = rest if name == "embeddings" else {"truncate": draw(st.booleans())}
        bodies = [{field: draw(kind | many(kind)), **rest} for _ in range(count)]
    elif name == "tensorflow":
        rest = draw(st.fixed_dictionaries({}, optional={"signature_name": texts}))
        bodies = [{**rest, "instances": draw(many(anything))} for _ in range(count)]
    elif name == "kserve":
        bodies = draw(tensors(count))
    elif name == "rerank":
        rest = {"model": "m", "query": draw(texts)}
        if draw(st.booleans()):
            rest["top_n"] = draw(st.integers(1, 4))
        document = texts | st.fixed_dictionaries({"text": texts})
        bodies = [{**rest, "documents": draw(many(document))} for _ in range(count)]
    elif name == "tei_rerank":
        rest = {"query": draw(texts)}
        bodies = [{**rest, "texts": draw(many(texts))} for _ in range(count)]
    elif name == "score":
        bodies = draw(scored(count))
    else:
        pair = st.lists(texts, min_size=1, max_size=2)
        bodies = [{"inputs": draw(texts | pair | many(pair))} for _ in range(count)]
    return Group(name, bodies)


@st.composite
def scored(draw: st.DrawFn, count: int) -> list[dict[str, Any]]:
    if draw(st.booleans()):
        one = draw(texts)
        return [{"model": "m", "text_1": one, "text_2": draw(texts | many(texts))} for _ in range(count)]
    pairs = [draw(many(st.tuples(texts, texts))) for _ in range(count)]
    return [
        {"model": "m", "text_1": [one for one, _ in each], "text_2": [other for _, other in each]}
        for each in pairs
    ]


@st.composite
def tensors(draw: st.DrawFn, count: int) -> list[dict[str, Any]]:
    """Bodies with one to three tensors, flat or nested."""
    kinds = [
        (draw(st.sampled_from(["FP32", "BYTES", "BOOL"])), draw(st.lists(st.integers(1, 3), max_size=2)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    nested = draw(st.booleans())
    values = {"FP32": floats, "BYTES": texts, "BOOL": st.booleans()}
    bodies = []
    for number in range(count):
        size = draw(some)
        inputs = []
        for at, (datatype, tail) in enumerate(kinds):
            row = values[datatype]
            each = 1
            for length in reversed(tail):
                each *= length
                if nested:
                    row = st.lists(row, min_size=length, max_size=length)
            length = size if nested else size * each
            data = draw(st.lists(row, min_size=length, max_size=length))
            inputs.append({"name": f"x{at}", "shape": [size, *tail], "datatype": datatype, "data": data})
        body: dict[str, Any] = {"inputs": inputs}
        if draw(st.booleans()):
            body["id"] = f"r{number}"
        bodies.append(body)
    return bodies


def without(answer: bytes, *names: str) -> Any:
    """An answer as a value, less some of its fields."""
    found = json.loads(answer)
    if isinstance(found, dict):
        for name in names:
            found.pop(name, None)
    return found
