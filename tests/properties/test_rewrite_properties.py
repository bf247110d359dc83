"""A body whose model is replaced differs in that alone, whatever else is in it."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.models.body_rewrite import replace_model

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


class Twice(dict[str, Any]):
    """An object whose fields are written as they are given, one name twice too."""

    def __init__(self, fields: list[tuple[str, Any]]) -> None:
        super().__init__(fields)
        self._fields = fields

    def items(self) -> Any:
        return self._fields


def written(fields: list[tuple[str, Any]], layout: dict[str, Any]) -> bytes:
    return json.dumps(Twice(fields), **layout).encode(errors="surrogatepass")


def changed(pairs: list[tuple[str, Any]], name: str) -> list[tuple[str, Any]]:
    return [(field, name if field == "model" else value) for field, value in pairs]


def read(body: bytes) -> list[tuple[str, Any]]:
    """An object's fields in order, with those given twice; numbers as they are written."""
    found: list[tuple[str, Any]] = json.loads(
        body, object_pairs_hook=list, parse_int=str, parse_float=str, parse_constant=str
    )
    return found


@given(OBJECTS, st.one_of(TEXTS, TEXTS, VALUES), st.integers(0, 4), LAYOUTS, NAMES)
def test_the_model_is_all_that_differs(
    fields: list[tuple[str, Any]], model: Any, at: int, layout: dict[str, Any], name: str
) -> None:
    fields.insert(at, ("model", model))
    body = written(fields, layout)
    replaced = replace_model(body, name)
    plain = (
        isinstance(model, str)
        and len({field for field, _ in fields}) == len(fields)
        and all(json.dumps(field, ensure_ascii=layout["ensure_ascii"]) == f'"{field}"' for field, _ in fields)
        and utf8(body)
        and utf8(name.encode(errors="surrogatepass"))
    )
    assert not plain or replaced is not None, "it is plain what is to be replaced"
    if replaced is None:
        return
    assert read(replaced) == changed(read(body), name)
    old = json.dumps(model, ensure_ascii=layout["ensure_ascii"]).encode()
    new = msgspec.json.encode(name)
    assert any(
        replaced == body[: found.start()] + new + body[found.end() :]
        for found in re.finditer(re.escape(old), body)
    ), "more than the value was written anew"


@given(OBJECTS, st.integers(0, 8), st.binary(min_size=1, max_size=3), NAMES)
def test_no_bytes_raise(fields: list[tuple[str, Any]], at: int, noise: bytes, name: str) -> None:
    body = written([*fields, ("model", "a")], {})
    replaced = replace_model(body[:at] + noise + body[at:], name)
    assert replaced is None or json.loads(replaced)["model"] == name


def utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
