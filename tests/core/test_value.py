"""Values: frozen, equal by what they hold, and made anew with other fields."""

from __future__ import annotations

import pytest

from dispatcher.core.value import Value


class Place(Value, frozen=True):
    row: int
    seat: int = 1


def test_value_is_equal_to_another_that_holds_the_same() -> None:
    assert Place(3) == Place(3, 1)
    assert hash(Place(3)) == hash(Place(3, 1))
    assert Place(3) != Place(3, 2)


def test_value_never_changes_and_is_made_anew_with_other_fields() -> None:
    place = Place(3)
    with pytest.raises(AttributeError):
        place.row = 4  # type: ignore[misc]
    assert (place.copy_with(seat=2), place) == (Place(3, 2), Place(3, 1))


def test_field_that_a_value_has_not_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        Place(3).copy_with(aisle=2)
