"""Sweeps and targets: what may be asked, and that the answer is the best of the rows that keep it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.lab.simulation.experiment import PolicyName
from dispatcher.lab.simulation.report import Row, describe_closures
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.sweep import SWEEPABLE, SweepError, choose_value, parse_sweep, parse_target


def row(**figures: Any) -> Row:
    blank: dict[str, Any] = {each.name: 0 for each in fields(Row)}
    return Row(**blank | {"policy": PolicyName.DISPATCHER, "closed_s": {}} | figures)


def test_what_was_seen_closed_at_one_moment_alone_is_not_told() -> None:
    hours = Scenario(seconds=10_800.0)
    rows = [("a", row(closed_s={"starting": 6.0})), ("b", row(closed_s={"starting": 6.0, "stale": 12.0}))]
    assert describe_closures(hours, rows) == ["b was closed: stale 12.0 s"]
    assert describe_closures(Scenario(), rows)[0] == "a was closed: starting 6.0 s"


def test_values_come_ascending_and_once() -> None:
    swept = parse_sweep("reserve=.3, 0,0.3,.05")
    assert (swept.option, swept.values) == ("reserve", [0.0, 0.05, 0.3])


@pytest.mark.parametrize("option", SWEEPABLE)
def test_each_option_changes_its_setting_and_nothing_else(option: str) -> None:
    swept = parse_sweep(f"{option}=0.5" if option != "batch-tokens" else f"{option}=50")
    changed = swept.apply_value(Scenario(), swept.values[0])
    assert changed != Scenario()
    assert swept.apply_value(changed, swept.values[0]) == changed
    different = [
        each.name
        for each in fields(Scenario)
        if getattr(changed, each.name) != getattr(Scenario(), each.name)
    ]
    assert len(different) == 1


@pytest.mark.parametrize(
    "text", ["", "reserve", "reserve=", "reserve=nan", "reserve=1", "lag=-1", "pods=1,2", "=1"]
)
def test_what_cannot_be_swept_is_refused(text: str) -> None:
    with pytest.raises(SweepError):
        parse_sweep(text)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("p99 <= 1.2", ["p99 <= 1.2"]),
        ("Latency P99<1.2 ×", ["p99 <= 1.2"]),
        ("p50 ≤ 1.1 and wait p99 <= .5 s", ["p50 <= 1.1", "wait p99 <= 0.5"]),
        ("wait<=0.01, p99 <= 2", ["wait <= 0.01", "p99 <= 2"]),
    ],
)
def test_target_is_read_as_people_write_it(text: str, read: list[str]) -> None:
    assert [str(bound) for bound in parse_target(text)] == read


@pytest.mark.parametrize(
    "text", ["", "p99", "p99 >= 1", "p98 <= 1", "p99 <= -1", "p99 <= 1 or p50 <= 1", "1.2"]
)
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(SweepError):
        parse_target(text)


ROWS = st.lists(
    st.tuples(st.floats(0, 0.99), st.floats(1, 3), st.floats(0, 2), st.floats(0, 1e4)),
    min_size=1,
    max_size=12,
)


@given(ROWS, st.floats(1, 3), st.floats(0, 2))
def test_choice_keeps_the_target_and_no_other_that_does_brings_more(
    cases: list[tuple[float, float, float, float]], ratio: float, wait_s: float
) -> None:
    rows = [
        (reserve, row(latency_p99_ratio=p99, wait_p99_less_none_s=wait, batch_tokens_per_s=tokens))
        for reserve, p99, wait, tokens in cases
    ]
    bounds = parse_target(f"p99 <= {ratio:.6f} and wait p99 <= {wait_s:.6f}")
    keeping = [
        (tokens, reserve)
        for reserve, p99, wait, tokens in cases
        if p99 <= bounds[0].maximum and wait <= bounds[1].maximum
    ]
    answer = choose_value("reserve", rows, bounds)
    if keeping:
        assert answer.value is not None
        assert (max(keeping)[0], answer.value) in keeping
        assert answer.sentence.startswith(f"choose reserve {answer.value:g}: ")
    else:
        assert answer.value is None
        assert "comes nearest" in answer.sentence


def test_without_realtime_there_is_nothing_to_judge() -> None:
    idle = row(latency_p99_ratio=None)
    answer = choose_value("reserve", [(0.1, idle)], parse_target("p99 <= 1.2"))
    assert answer.value is None
    assert "no realtime request was answered" in answer.sentence
