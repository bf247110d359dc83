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
        ("30s", 30),
        ("1.5m", 90),
        ("2 h", 7200),
        ("1d", 86_400),
        ("2w", 1_209_600),
        ("250ms", 0.25),
        (" 5min ", 300),
        ("1h30m", 5400),
        ("1d 2h 3min", 93_780),
    ],
)
def test_a_span_is_read_as_it_is_written(written: str, seconds: float) -> None:
    assert seconds_of(written) == seconds


@pytest.mark.parametrize(
    "written", ["", "soon", "-5s", "1e3s", "5 weeks", "inf", "nan", "h", "1h30", "30 1h", "9" * 400]
)
def test_what_is_no_span_is_refused_with_how_to_write_it(written: str) -> None:
    with pytest.raises(ValueError, match="write 90s, 10m, 1h30m, 8h or 1d"):
        seconds_of(written)


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


def test_a_moment_is_told_from_now() -> None:
    assert (until(160, 100), until(40, 100)) == ("in 60 s", "60 s ago")
