"""A bar of characters shows amounts in proportion and never exceeds its width."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.cli.bar import count_cells, draw_bar, draw_pool, format_legend

AMOUNTS = st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=6)


@given(AMOUNTS, st.floats(0, 1e6), st.integers(0, 200))
def test_bar_never_exceeds_its_width(amounts: list[float], whole: float, width: int) -> None:
    found = count_cells(amounts, whole, width)
    assert all(share >= 0 for share in found)
    assert sum(found) <= width
    assert len(draw_bar([("x", amount) for amount in amounts], whole, width)) == width


@given(AMOUNTS, st.floats(0, 1e6), st.integers(12, 200))
def test_every_positive_amount_is_visible_and_zero_is_not(
    amounts: list[float], whole: float, width: int
) -> None:
    assert [share > 0 for share in count_cells(amounts, whole, width)] == [amount > 0 for amount in amounts]


@given(AMOUNTS.filter(any), st.integers(12, 200))
def test_each_amount_has_its_share_of_the_bar(amounts: list[float], width: int) -> None:
    whole = sum(amounts)
    for amount, share in zip(amounts, count_cells(amounts, whole, width), strict=True):
        assert abs(share - amount / whole * width) <= len(amounts)


def test_bar_looks_as_designed() -> None:
    assert draw_bar([("█", 20), ("▒", 10)], 40, 8) == "████▒▒··"
    assert draw_bar([("█", 50), ("▒", 30)], 40, 8) == "█████▒▒▒", "more than the capacity"
    assert draw_bar([], 0, 4) == "····"


def test_pool_bar_ends_with_the_part_of_the_reserve_that_is_left() -> None:
    whole = {"realtime": 2.0, "waiting": 1.0, "batch": 3.0, "reserve": 2.0, "capacity": 10.0}
    assert draw_pool(**whole, width=10) == "██▓▒▒▒··░░"
    assert draw_pool(**{**whole, "realtime": 6.0}, width=10) == "██████▓▒▒▒", "the reserve is used up"
    assert format_legend(**whole) == "█ realtime 2  ▓ waiting 1  ▒ batch 3  · free 2  ░ reserve 2"
