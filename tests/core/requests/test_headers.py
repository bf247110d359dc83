"""One list of what belongs to a connection, for operators and callers alike."""

from __future__ import annotations

import pytest

from dispatcher.core.requests.headers import HOP_BY_HOP, NAME, VALUE, is_forwardable, normalize_name
from dispatcher.core.requests.request import encode_member
from dispatcher.settings import Settings


def by_operator(name: str, value: str) -> bool:
    try:
        Settings.model_validate({"gateway": {"url": "http://g", "headers": {name: value}}})
    except ValueError:
        return False
    return True


def by_caller(name: str, value: str) -> bool:
    try:
        encode_member("1", b"{}", 1, headers={name: value})  # which refuses what `parse` would
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_nobody_sets_what_belongs_to_the_connection(name: str) -> None:
    assert not is_forwardable(normalize_name(name.upper()))
    with pytest.raises(ValueError, match="belongs to the connection"):
        Settings.model_validate({"gateway": {"url": "http://g", "headers": {name.upper(): "x"}}})


@pytest.mark.parametrize("name", ["", "a b", "a:", "é", "x-ok", "_", "a/b", 'a"'])
def test_a_header_s_name_is_one_for_everybody(name: str) -> None:
    assert by_operator(name, "x") == by_caller(name, "x") == (NAME.fullmatch(name) is not None)


@pytest.mark.parametrize(
    "value", ["", "b l u e", "tab\there", "a\nb", "a\rb", "\x00", "\x1b[2J", "\x7f", "\x9b", "\xe9"]
)
def test_a_header_s_value_is_one_for_everybody(value: str) -> None:
    assert by_operator("x-a", value) == by_caller("x-a", value) == (VALUE.fullmatch(value) is not None)


@pytest.mark.parametrize("value", [" padded", "padded\t", "\u4e2d"])
def test_operator_is_told_of_what_would_not_arrive_as_it_is_written(value: str) -> None:
    assert by_caller("x-a", value)
    assert not by_operator("x-a", value)
