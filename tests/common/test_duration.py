"""Durations are parsed from text, and formatted with two significant digits."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.duration import format_duration, format_time_until, parse_duration

UNITS = ["w", "d", "h", "m", "s", "ms"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("30s", 30),
        ("1.5m", 90),
        ("2 h", 7200),
        ("1d", 86_400),
        ("2w", 1_209_600),
        ("250ms", 0.25),
        (" 5min ", 300),
        ("1h30m", 5400),
        ("1d 2h 3min", 93_780),
        ("1w1d1h1m1s1ms", 694_861.001),
        ("1.5h30m", 7200),
    ],
)
def test_duration_is_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-5s", "1e3s", "5 weeks", "inf", "nan", "h", "1h30", "30 1h", "9" * 400]
)
def test_text_that_is_not_a_duration_is_rejected_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write 90s, 10m, 1h30m, 8h or 1d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1h1h", "(h behind h:"),
        ("30m1h", "(h behind m:"),
        ("1h 5m 5min", "(min behind m:"),
        ("1d30s2h", "(h behind s:"),
    ],
)
def test_repeated_unit_or_unit_after_a_smaller_one_is_rejected(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="each unit once, the larger one first") as raised:
        parse_duration(text)
    assert why in str(raised.value)


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(UNITS)), min_size=1, max_size=5))
def test_duration_is_the_sum_of_its_parts_or_rejected(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{count}{unit}" for count, unit in parts)
    unit_positions = [UNITS.index(unit) for _, unit in parts]
    if all(later > earlier for earlier, later in pairwise(unit_positions)):
        assert parse_duration(text) == sum(parse_duration(f"{count}{unit}") for count, unit in parts)
    else:
        with pytest.raises(ValueError, match="each unit once"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.42, "0.4 s"),
        (59.6, "60 s"),
        (119, "2 min"),
        (3600, "60 min"),
        (9000, "2.5 h"),
        (2e5, "2.3 d"),
    ],
)
def test_duration_is_formatted_with_two_significant_digits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0, 1e9))
def test_formatted_duration_is_parsed_to_nearly_the_same_value(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.06, abs=0.5)


def test_time_is_formatted_relative_to_now() -> None:
    assert (format_time_until(160, 100), format_time_until(40, 100)) == ("in 60 s", "60 s ago")
