"""The table of shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from dispatcher.core.merging.shapes.part import Items, Shape

_TEI_RERANK = Shape(
    name="tei_rerank",
    paths=r".*/rerank",
    listed="texts",
    each="query",
    needs="score",
    numbered=True,
    ranked=True,
    near=1e-3,
)


def _score(one: str, many: str, otherwise: Shape | None = None) -> Shape:
    """Return a shape with one text that is scored against many, or with many pairs."""
    return Shape(
        name="score",
        paths=r".*/score",
        listed=many,
        items=Items.TEXTS,
        beside=one,
        each=one,
        answer="data",
        needs="score",
        numbered=True,
        near=1e-3,
        otherwise=otherwise,
    )


_ROWS = (
    Shape(
        name="embeddings",
        paths=r".*/embeddings",
        listed="input",
        items=Items.TEXTS,
        answer="data",
        needs="embedding",
        numbered=True,
        refused=MappingProxyType({"late_chunking": "its items are embedded as one text"}),
        vectors=True,
    ),
    Shape(
        name="tensorflow",
        paths=r".*:predict",
        listed="instances",
        answer="predictions",
        refused=MappingProxyType({"inputs": "the columnar format"}),
    ),
    Shape(
        name="kserve",
        paths=r".*/v2/models/[^/]+(?:/versions/[^/]+)?/infer",
        listed="inputs",
        items=Items.TENSORS,
        answer="outputs",
    ),
    Shape(
        name="rerank",
        paths=r".*/rerank",
        listed="documents",
        each="query",
        answer="results",
        needs="relevance_score",
        numbered=True,
        ranked=True,
        top="top_n",
        near=1e-3,
        otherwise=_TEI_RERANK,
    ),
    _TEI_RERANK,
    _score(
        "text_1",
        "text_2",
        _score("queries", "documents", _score("queries", "items", _score("data_1", "data_2"))),
    ),
    Shape(name="embed", paths=r".*/embed", listed="inputs", items=Items.TEXTS, vectors=True),
    Shape(name="predict", paths=r".*/predict", listed="inputs", items=Items.PAIRS, near=1e-3),
)
SHAPES: Mapping[str, Shape] = MappingProxyType({row.name: row for row in _ROWS})
"""All shapes by name."""

_PATHS = tuple((re.compile(row.paths), row) for row in _ROWS)


def shape_at(path: str) -> Shape | None:
    """Return the shape of bodies at this path, without its query. `None` if the path has no known list
    calls."""
    path = path.partition("?")[0]
    return next((row for pattern, row in _PATHS if pattern.fullmatch(path)), None)
