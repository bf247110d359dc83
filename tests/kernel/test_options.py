"""Options of the loop, and those of features in them."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.kernel.options import Options
from dispatcher.requests.outcomes.outcome import RetryPolicy


@dataclass(frozen=True)
class FirstOptions:
    size: int = 1


@dataclass(frozen=True)
class SecondOptions:
    size: int = 2


def test_options_of_a_feature_are_found_by_their_class() -> None:
    options = Options(
        RetryPolicy(), of_features={FirstOptions: FirstOptions(5), SecondOptions: SecondOptions(6)}
    )
    assert options.of(FirstOptions).size == 5
    assert options.of(SecondOptions).size == 6


def test_feature_without_options_uses_its_defaults() -> None:
    assert Options(RetryPolicy()).of(SecondOptions).size == 2
