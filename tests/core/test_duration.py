"""Spans of time: read as they are written, told in two figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.duration import seconds_of, told, until


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30", 30),
        ("0.3", 0.3),
        ("30s", 30),
        ("1.5m", 90),
        ("2 h", 7200),
        ("1d", 86_400),
        ("1w", 604_800),
        ("250ms", 0.25),
        (" 5min ", 300),
        ("1h30m", 5400),
        ("2 h 5 min", 7500),
        ("1d 0.5s", 86_400.5),
        ("1m1ms", 60.001),
    ],
)
def test_a_span_is_read_as_it_is_written(written: str, seconds: float) -> None:
    assert seconds_of(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        *(
            "",
            "soon",
            "-5s",
            "1e3s",
            "5 weeks",
            "inf",
            "nan",
            "s",
            ".5s",
            "1.s",
            "1h 30",
            "30 1h",
            "1,5h",
            "1H",
        ),
        *(
            "30m1h",
            "1h1h",
            "1m2min",
            "\N{ARABIC-INDIC DIGIT FIVE}s",
            "1h\n2m",
            "9" * 400,
            "1h" + "9" * 400 + "s",
        ),
    ],
)
def test_what_is_no_span_is_refused_with_how_to_write_it(written: str) -> None:
    with pytest.raises(ValueError, match="write 30s, 10m, 1h30m or 2d") as refused:
        seconds_of(written)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(
    ("seconds", "words"),
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
def test_a_span_is_told_in_two_figures(seconds: float, words: str) -> None:
    assert told(seconds) == words


@given(st.floats(0, 1e9))
def test_what_is_told_is_read_again_as_nearly_the_same(seconds: float) -> None:
    assert seconds_of(told(seconds)) == pytest.approx(seconds, rel=0.06, abs=0.5)


@given(st.lists(st.integers(0, 1000), min_size=7, max_size=7), st.sets(st.integers(0, 6), min_size=1))
def test_parts_from_the_largest_to_the_smallest_are_added(counts: list[int], chosen: set[int]) -> None:
    units = [("w", 604_800.0), ("d", 86_400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 0.001)]
    parts = [(count, *units[n]) for n, count in enumerate(counts) if n in chosen and n < len(units)] or [
        (0, "s", 1)
    ]
    expected = sum(count * size for count, _, size in parts)
    assert seconds_of("".join(f"{count}{unit}" for count, unit, _ in parts)) == pytest.approx(expected)
    if len(parts) > 1:
        with pytest.raises(ValueError, match="no span"):
            seconds_of("".join(f"{count}{unit}" for count, unit, _ in reversed(parts)))


@given(st.text(max_size=2000) | st.text("0123456789. smhdw", max_size=40))
def test_any_text_is_a_span_of_zero_or_more_or_refused(written: str) -> None:
    try:
        seconds = seconds_of(written)
    except ValueError:
        return
    assert 0 <= seconds < float("inf")


def test_a_moment_is_told_from_now() -> None:
    assert (until(160, 100), until(40, 100)) == ("in 60 s", "60 s ago")
