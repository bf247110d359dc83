"""Rules on header names and values are the same for operators and callers."""

from __future__ import annotations

import pytest

from dispatcher.requests.headers import HOP_BY_HOP, NAME, VALUE, is_forwardable, normalize_name
from dispatcher.requests.request import encode_member
from dispatcher.settings.model import Settings


def is_accepted_in_settings(name: str, value: str) -> bool:
    try:
        Settings.model_validate({"gateway": {"url": "http://g", "headers": {name: value}}})
    except ValueError:
        return False
    return True


def is_accepted_in_member(name: str, value: str) -> bool:
    try:
        encode_member("1", b"{}", 1, headers={name: value})  # it rejects what `parse_member` would reject
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_hop_by_hop_header_is_rejected(name: str) -> None:
    assert not is_forwardable(normalize_name(name.upper()))
    with pytest.raises(ValueError, match="belongs to the connection"):
        Settings.model_validate({"gateway": {"url": "http://g", "headers": {name.upper(): "x"}}})


@pytest.mark.parametrize("name", ["", "a b", "a:", "é", "x-ok", "_", "a/b", 'a"'])
def test_settings_and_members_accept_the_same_header_names(name: str) -> None:
    assert (
        is_accepted_in_settings(name, "x")
        == is_accepted_in_member(name, "x")
        == (NAME.fullmatch(name) is not None)
    )


@pytest.mark.parametrize(
    "value", ["", "b l u e", "tab\there", "a\nb", "a\rb", "\x00", "\x1b[2J", "\x7f", "\x9b", "\xe9"]
)
def test_settings_and_members_accept_the_same_header_values(value: str) -> None:
    assert (
        is_accepted_in_settings("x-a", value)
        == is_accepted_in_member("x-a", value)
        == (VALUE.fullmatch(value) is not None)
    )


@pytest.mark.parametrize("value", [" padded", "padded\t", "\u4e2d"])
def test_settings_reject_values_that_would_not_arrive_unchanged(value: str) -> None:
    assert is_accepted_in_member("x-a", value)
    assert not is_accepted_in_settings("x-a", value)
