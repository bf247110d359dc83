"""JSON is taken apart without changing how its values are written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.json_fields import (
    MAX_DEPTH,
    MAX_FIELDS,
    NotUnderstoodError,
    check_utf8,
    find_value,
    make_canonical,
    parse_fields,
    parse_fields_loosely,
    parse_items,
    parse_list_content,
    parse_object_with_list,
)

TEXT = b' { "a" : 1.50 ,"b":[1, 2 ] , "c": {"a": "\\u00e9"} } '
texts = st.text("aé :,]}", max_size=3)  # names with escapes are not understood
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def test_values_of_fields_keep_their_bytes() -> None:
    assert {name: bytes(value) for name, value in parse_fields(TEXT).items()} == {
        "a": b"1.50",
        "b": b"[1, 2 ]",
        "c": b'{"a": "\\u00e9"}',
    }
    assert parse_fields(b"{}") == parse_fields(b" { } ") == {}
    assert [bytes(item) for item in parse_items(b"[1.0, [2]]")] == [b"1.0", b"[2]"]
    assert [bytes(item) for item in parse_list_content(b"1.0, [2]")] == [b"1.0", b"[2]"]


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 1}',
        b'{"a": 1, "a": 2}',
        b'{"a": 1, "b": 2, "a": 1}',
        b'{"a": 1, "b": 2, "b": 2}',
        b'{"\\u0061": 1}',
        b'{"a": 1, "\\u0062": 1}',
    ],
)
def test_field_that_is_given_twice_or_has_an_escaped_name_is_not_understood(text: bytes) -> None:
    with pytest.raises(NotUnderstoodError, match="given twice"):
        parse_fields(text)


@pytest.mark.parametrize(("count", "is_understood"), [(MAX_FIELDS, True), (MAX_FIELDS + 1, False)])
def test_object_with_very_many_fields_is_not_understood(count: int, is_understood: bool) -> None:
    text = b"{%b}" % b",".join(b'"%d":1' % number for number in range(count))
    if is_understood:
        assert len(parse_fields(text)) == count
    else:
        with pytest.raises(NotUnderstoodError, match="more than 10,000 fields"):
            parse_fields(text)


def test_last_of_two_fields_counts_where_that_is_asked_for() -> None:
    assert parse_fields_loosely(b'{"a": 1, "a": 2}') == {"a": msgspec.Raw(b"2")}


@pytest.mark.parametrize(("name", "value"), [("a", b"1.50"), ("b", b"[1, 2 ]"), ("c", b'{"a"')])
def test_position_of_a_value_is_where_its_bytes_begin(name: str, value: bytes) -> None:
    at = find_value(TEXT, name)
    assert TEXT[at : at + len(value)] == value


def test_missing_field_is_named() -> None:
    with pytest.raises(NotUnderstoodError, match="no d"):
        find_value(TEXT, "d")


def test_bytes_that_are_not_utf_8_are_refused() -> None:
    assert check_utf8(b"a") == b"a"
    assert check_utf8("é".encode()) == "é".encode()
    with pytest.raises(UnicodeDecodeError):
        check_utf8(b"\xff")


def test_canonical_text_has_sorted_fields_no_whitespace_and_the_same_values() -> None:
    assert make_canonical(b'{"b": [ 1.50, {"d": 1, "c" :2}],\n"a": "x y"}') == (
        b'{"a":"x y","b":[1.50,{"c":2,"d":1}]}'
    )
    assert make_canonical(b" 1") == b" 1", "only objects and lists are written anew"


@given(json_values)
def test_canonical_text_does_not_depend_on_order_or_whitespace(value: Any) -> None:
    assert (
        len(
            {
                make_canonical(
                    json.dumps(value, sort_keys=is_sorted, indent=indent, ensure_ascii=False).encode()
                )
                for is_sorted in (False, True)
                for indent in (None, 2)
            }
        )
        == 1
    )


@pytest.mark.parametrize(("start", "end"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
def test_canonical_text_has_a_largest_depth(start: bytes, end: bytes) -> None:
    deepest = start * MAX_DEPTH + b"1" + end * MAX_DEPTH
    assert make_canonical(deepest) == deepest
    with pytest.raises(NotUnderstoodError, match="nested"):
        make_canonical(start + deepest + end)


@pytest.mark.parametrize(
    "body",
    [
        b'{"id": "x", "data": [{"i": 0}, {"i": 1}], "n": 1.0}',
        b'{"id": "x", "n": 1.0, "data": [{"i": 0}, {"i": 1}]}',
        b'{"id": "x", "data": [{"i": 0}, {"i": 1}], "n": 1.0, "more": [3]}',
        b'{"id": ["data"], "data": [{"i": 0}, {"i": 1}], "n": 1.0}',
        b'{"more": {"data": [{"i": 7}]}, "data": [{"i": 0}, {"i": 1}], "n": 1.0}',
        b'{"data": [{"i": 7}], "data": [{"i": 0}, {"i": 1}], "n": 1.0}',
    ],
    ids=["first", "last", "other list behind", "name as a value", "same name inside", "given twice"],
)
def test_list_of_an_object_is_found_wherever_it_is(body: bytes) -> None:
    fields, items = parse_object_with_list(body, "data")
    assert items == [{"i": msgspec.Raw(b"0")}, {"i": msgspec.Raw(b"1")}]
    assert fields["n"] == msgspec.Raw(b"1.0")


def test_answer_without_the_list_is_not_understood() -> None:
    with pytest.raises(NotUnderstoodError, match="no data"):
        parse_object_with_list(b'{"id": "x", "more": [3]}', "data")
    with pytest.raises(NotUnderstoodError, match="no data"):
        parse_object_with_list(b"{}", "data")
