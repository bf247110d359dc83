"""A body whose model was replaced differs in nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.models.body_rewrite import replace_model

TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["model", '"model"', '"model":"a"', "\\", '\\"model\\":', "m\tl", "\ud800", "ü", "€\n"]),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
OBJECTS = st.lists(st.tuples(TEXTS, VALUES), max_size=4)
NAMES = st.one_of(st.text(min_size=1, max_size=8), st.sampled_from(["qwen-v3", 'a"b', "a\\b", "model", "é"]))
LAYOUTS = st.fixed_dictionaries(
    {"ensure_ascii": st.booleans(), "indent": st.sampled_from([None, None, 0, 3])},
    optional={"separators": st.sampled_from([(",", ":"), (" ,\t", " :\n")])},
)


class ObjectWithDuplicates(dict[str, Any]):
    """JSON object whose fields are encoded as given, even if a name occurs twice."""

    def __init__(self, fields: list[tuple[str, Any]]) -> None:
        super().__init__(fields)
        self._fields = fields

    def items(self) -> Any:
        return self._fields


def encode_fields(fields: list[tuple[str, Any]], layout: dict[str, Any]) -> bytes:
    return json.dumps(ObjectWithDuplicates(fields), **layout).encode(errors="surrogatepass")


def change_model(pairs: list[tuple[str, Any]], name: str) -> list[tuple[str, Any]]:
    return [(field, name if field == "model" else value) for field, value in pairs]


def decode_fields(body: bytes) -> list[tuple[str, Any]]:
    """Return the fields of an object in order, including duplicates, and numbers as their texts."""
    fields: list[tuple[str, Any]] = json.loads(
        body, object_pairs_hook=list, parse_int=str, parse_float=str, parse_constant=str
    )
    return fields


@given(OBJECTS, st.one_of(TEXTS, TEXTS, VALUES), st.integers(0, 4), LAYOUTS, NAMES)
def test_only_the_model_differs_after_the_replacement(
    fields: list[tuple[str, Any]], model: Any, position: int, layout: dict[str, Any], name: str
) -> None:
    fields.insert(position, ("model", model))
    body = encode_fields(fields, layout)
    replaced = replace_model(body, name)
    is_unambiguous = (
        isinstance(model, str)
        and len({field for field, _ in fields}) == len(fields)
        and all(json.dumps(field, ensure_ascii=layout["ensure_ascii"]) == f'"{field}"' for field, _ in fields)
        and is_utf8(body)
        and is_utf8(name.encode(errors="surrogatepass"))
    )
    assert not is_unambiguous or replaced is not None, "an unambiguous model was not replaced"
    if replaced is None:
        return
    assert decode_fields(replaced) == change_model(decode_fields(body), name)
    old = json.dumps(model, ensure_ascii=layout["ensure_ascii"]).encode()
    new = msgspec.json.encode(name)
    assert any(
        replaced == body[: match.start()] + new + body[match.end() :]
        for match in re.finditer(re.escape(old), body)
    ), "more than the value was changed"


@given(OBJECTS, st.integers(0, 8), st.binary(min_size=1, max_size=3), NAMES)
def test_any_bytes_are_replaced_or_rejected_without_an_error(
    fields: list[tuple[str, Any]], position: int, inserted: bytes, name: str
) -> None:
    body = encode_fields([*fields, ("model", "a")], {})
    replaced = replace_model(body[:position] + inserted + body[position:], name)
    assert replaced is None or json.loads(replaced)["model"] == name


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
