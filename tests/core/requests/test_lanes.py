"""Lanes: where a request waits by what is known of it, and the names by which it waits for its model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.lanes import (
    CLOSED_LANES,
    MAX_MODEL_NAME_BYTES,
    Lane,
    choose_lane,
    compute_lane_room,
    shorten_model_name,
)


@pytest.mark.parametrize("deaths", [0, 1, 2, 5])
def test_who_is_in_line_waits_there_and_who_awaits_his_model_wherever_he_would_wait_else(deaths: int) -> None:
    without = Lane.SUSPECTS if deaths >= 2 else None
    assert choose_lane(deaths) is without
    assert choose_lane(deaths, waits_for_model=True) is Lane.WAITING_FOR_MODEL
    assert (
        choose_lane(deaths, waits_for_turn=True)
        is choose_lane(deaths, waits_for_turn=True, waits_for_model=True)
        is Lane.SEQUENCED
    )


def test_of_a_closed_lane_no_claim_takes_any() -> None:
    assert compute_lane_room(dict.fromkeys(Lane, 9)) == {
        lane: 0 if lane in CLOSED_LANES else 9 for lane in Lane
    }


@given(st.text(st.characters(), max_size=400))
def test_a_name_is_kept_as_any_queue_takes_it_and_so_again(model: str) -> None:
    kept = shorten_model_name(model)
    assert len(kept.encode()) <= MAX_MODEL_NAME_BYTES
    assert shorten_model_name(kept) == kept
    if "?" not in kept:
        assert model.startswith(kept)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_MODEL_NAME_BYTES // 4))
def test_a_name_that_fits_is_kept_as_it_is(model: str) -> None:
    assert shorten_model_name(model) == model
