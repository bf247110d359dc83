"""One list of what belongs to a connection, for operators and callers alike."""

from __future__ import annotations

import pytest

from dispatcher.core.headers import HOP_BY_HOP, NAME, passed_on, plain
from dispatcher.core.request import encode_member
from dispatcher.settings import Settings


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
def test_nobody_sets_what_belongs_to_the_connection(name: str) -> None:
    assert not passed_on(plain(name.upper()))
    with pytest.raises(ValueError, match="belongs to the connection"):
        Settings.model_validate({"gateway": {"url": "http://g", "headers": {name.upper(): "x"}}})


@pytest.mark.parametrize("name", ["", "a b", "a:", "é", "x-ok", "_", "a/b", 'a"'])
def test_a_header_s_name_is_one_for_everybody(name: str) -> None:
    def by_operator() -> bool:
        try:
            Settings.model_validate({"gateway": {"url": "http://g", "headers": {name: "x"}}})
        except ValueError:
            return False
        return True

    def by_caller() -> bool:
        try:
            encode_member("1", b"{}", 1, headers={name: "x"})  # which refuses what `parse` would
        except ValueError:
            return False
        return True

    assert by_operator() == by_caller() == (NAME.fullmatch(name) is not None)
