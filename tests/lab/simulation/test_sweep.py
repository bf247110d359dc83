"""Sweeps and targets: parsing, and the choice of the best value that meets the target."""

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


def make_row(**figures: Any) -> Row:
    blank: dict[str, Any] = {field.name: 0 for field in fields(Row)}
    return Row(**blank | {"policy": PolicyName.DISPATCHER, "closed_s": {}} | figures)


def test_short_closure_is_left_out_in_a_long_simulation() -> None:
    long_scenario = Scenario(seconds=10_800.0)
    rows = [
        ("a", make_row(closed_s={"starting": 6.0})),
        ("b", make_row(closed_s={"starting": 6.0, "stale": 12.0})),
    ]
    assert describe_closures(long_scenario, rows) == ["b was closed: stale 12.0 s"]
    assert describe_closures(Scenario(), rows)[0] == "a was closed: starting 6.0 s"


def test_values_of_a_sweep_are_sorted_and_unique() -> None:
    sweep = parse_sweep("reserve=.3, 0,0.3,.05")
    assert (sweep.option, sweep.values) == ("reserve", [0.0, 0.05, 0.3])


@pytest.mark.parametrize("option", SWEEPABLE)
def test_each_sweep_option_changes_only_its_setting(option: str) -> None:
    sweep = parse_sweep(f"{option}=0.5" if option != "batch_tokens" else f"{option}=50")
    changed = sweep.apply_value(Scenario(), sweep.values[0])
    assert changed != Scenario()
    assert sweep.apply_value(changed, sweep.values[0]) == changed
    different = [
        field.name
        for field in fields(Scenario)
        if getattr(changed, field.name) != getattr(Scenario(), field.name)
    ]
    assert len(different) == 1


@pytest.mark.parametrize(
    "text", ["", "reserve", "reserve=", "reserve=nan", "reserve=1", "lag=-1", "pods=1,2", "=1"]
)
def test_invalid_sweep_is_rejected(text: str) -> None:
    with pytest.raises(SweepError):
        parse_sweep(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p99 <= 1.2", ["p99 <= 1.2"]),
        ("Latency P99<1.2 ×", ["p99 <= 1.2"]),
        ("p50 ≤ 1.1 and wait p99 <= .5 s", ["p50 <= 1.1", "wait p99 <= 0.5"]),
        ("wait<=0.01, p99 <= 2", ["wait <= 0.01", "p99 <= 2"]),
    ],
)
def test_target_is_parsed_in_common_spellings(text: str, expected: list[str]) -> None:
    assert [str(bound) for bound in parse_target(text)] == expected


@pytest.mark.parametrize(
    "text", ["", "p99", "p99 >= 1", "p98 <= 1", "p99 <= -1", "p99 <= 1 or p50 <= 1", "1.2"]
)
def test_invalid_target_is_rejected(text: str) -> None:
    with pytest.raises(SweepError):
        parse_target(text)


ROWS = st.lists(
    st.tuples(st.floats(0, 0.99), st.floats(1, 3), st.floats(0, 2), st.floats(0, 1e4)),
    min_size=1,
    max_size=12,
)


@given(ROWS, st.floats(1, 3), st.floats(0, 2))
def test_choice_is_the_best_value_that_meets_the_target(
    cases: list[tuple[float, float, float, float]], ratio: float, wait_s: float
) -> None:
    rows = [
        (reserve, make_row(latency_p99_ratio=p99, wait_p99_less_none_s=wait, batch_tokens_per_s=tokens))
        for reserve, p99, wait, tokens in cases
    ]
    bounds = parse_target(f"p99 <= {ratio:.6f} and wait p99 <= {wait_s:.6f}")
    meeting_target = [
        (tokens, reserve)
        for reserve, p99, wait, tokens in cases
        if p99 <= bounds[0].maximum and wait <= bounds[1].maximum
    ]
    answer = choose_value("reserve", rows, bounds)
    if meeting_target:
        assert answer.value is not None
        assert (max(meeting_target)[0], answer.value) in meeting_target
        assert answer.sentence.startswith(f"choose reserve {answer.value:g}: ")
    else:
        assert answer.value is None
        assert "comes nearest" in answer.sentence


def test_no_value_is_chosen_without_realtime_requests() -> None:
    idle = make_row(latency_p99_ratio=None)
    answer = choose_value("reserve", [(0.1, idle)], parse_target("p99 <= 1.2"))
    assert answer.value is None
    assert "no realtime request was answered" in answer.sentence
