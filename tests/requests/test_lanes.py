"""Choice of the lane of a request, and the shortened names under which requests wait for their model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.lanes import (
    MAX_MODEL_NAME_BYTES,
    Lane,
    compute_lane_room,
    count_losses,
    shorten_model_name,
)


def test_a_lane_that_is_not_named_has_no_room() -> None:
    assert compute_lane_room({Lane.STARTED: 9}) == {Lane.SUSPECTS: 0, Lane.STARTED: 9}
    assert compute_lane_room({Lane.SUSPECTS: -1}) == {Lane.SUSPECTS: 0, Lane.STARTED: 0}


@given(st.text(st.characters(), max_size=400))
def test_shortened_model_name_fits_and_is_not_shortened_again(model: str) -> None:
    shortened = shorten_model_name(model)
    assert len(shortened.encode()) <= MAX_MODEL_NAME_BYTES
    assert shorten_model_name(shortened) == shortened
    if "?" not in shortened:
        assert model.startswith(shortened)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_MODEL_NAME_BYTES // 4))
def test_model_name_that_fits_is_unchanged(model: str) -> None:
    assert shorten_model_name(model) == model


def test_losses_count_from_the_second_death_on() -> None:
    assert [count_losses(deaths) for deaths in range(5)] == [0, 0, 0, 1, 2]
