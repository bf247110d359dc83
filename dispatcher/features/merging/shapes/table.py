"""The table of shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from dispatcher.features.merging.shapes.part import ItemKind, Shape

_TEI_RERANK = Shape(
    name="tei_rerank",
    path_pattern=r".*/rerank",
    list_field="texts",
    repeated_field="query",
    item_field="score",
    has_indexes=True,
    is_ranked=True,
    tolerance=1e-3,
)


def _score_shape(single_field: str, list_field: str, fallback: Shape | None = None) -> Shape:
    """Return a shape with one text that is scored against many, or with many pairs."""
    return Shape(
        name="score",
        path_pattern=r".*/score",
        list_field=list_field,
        item_kind=ItemKind.TEXTS,
        second_list_field=single_field,
        repeated_field=single_field,
        answer_field="data",
        item_field="score",
        has_indexes=True,
        tolerance=1e-3,
        fallback=fallback,
    )


_ROWS = (
    Shape(
        name="embeddings",
        path_pattern=r".*/embeddings",
        list_field="input",
        item_kind=ItemKind.TEXTS,
        answer_field="data",
        item_field="embedding",
        has_indexes=True,
        unsupported_fields=MappingProxyType({"late_chunking": "its items are embedded as one text"}),
        has_vectors=True,
    ),
    Shape(
        name="tensorflow",
        path_pattern=r".*:predict",
        list_field="instances",
        answer_field="predictions",
        unsupported_fields=MappingProxyType({"inputs": "the columnar format"}),
    ),
    Shape(
        name="kserve",
        path_pattern=r".*/v2/models/[^/]+(?:/versions/[^/]+)?/infer",
        list_field="inputs",
        item_kind=ItemKind.TENSORS,
        answer_field="outputs",
        sequence_field="parameters",
    ),
    Shape(
        name="rerank",
        path_pattern=r".*/rerank",
        list_field="documents",
        repeated_field="query",
        answer_field="results",
        item_field="relevance_score",
        has_indexes=True,
        is_ranked=True,
        top_field="top_n",
        tolerance=1e-3,
        fallback=_TEI_RERANK,
    ),
    _TEI_RERANK,
    _score_shape(
        "text_1",
        "text_2",
        _score_shape(
            "queries", "documents", _score_shape("queries", "items", _score_shape("data_1", "data_2"))
        ),
    ),
    Shape(
        name="embed",
        path_pattern=r".*/embed",
        list_field="inputs",
        item_kind=ItemKind.TEXTS,
        has_vectors=True,
    ),
    Shape(
        name="predict",
        path_pattern=r".*/predict",
        list_field="inputs",
        item_kind=ItemKind.PAIRS,
        tolerance=1e-3,
    ),
)
SHAPES: Mapping[str, Shape] = MappingProxyType({row.name: row for row in _ROWS})
"""All shapes by name."""

_PATHS = tuple((re.compile(row.path_pattern), row) for row in _ROWS)


def find_shape(path: str) -> Shape | None:
    """Return the shape of bodies at this path, without its query. `None` if the path has no known list
    calls."""
    path = path.partition("?")[0]
    return next((row for pattern, row in _PATHS if pattern.fullmatch(path)), None)
