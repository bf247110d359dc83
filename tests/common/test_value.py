"""Values are frozen, equal if their fields are equal, and copied with other fields."""

from __future__ import annotations

import pytest

from dispatcher.common.value import Value


class Point(Value, frozen=True):
    x: int
    y: int = 1


def test_values_with_equal_fields_are_equal() -> None:
    assert Point(3) == Point(3, 1)
    assert hash(Point(3)) == hash(Point(3, 1))
    assert Point(3) != Point(3, 2)


def test_value_is_frozen_and_copied_with_other_fields() -> None:
    point = Point(3)
    with pytest.raises(AttributeError):
        point.x = 4  # type: ignore[misc]
    assert (point.copy_with(y=2), point) == (Point(3, 2), Point(3, 1))


def test_copy_with_an_unknown_field_is_rejected() -> None:
    with pytest.raises(TypeError):
        Point(3).copy_with(z=2)
