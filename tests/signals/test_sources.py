"""The sources that settings ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dispatcher.core.limit.budget import compute_budget
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.settings import Settings
from dispatcher.settings.model import BudgetSettings
from dispatcher.signals.readings import derive_readings
from dispatcher.signals.sources import build_sources


def settings(**signals: Any) -> Settings:
    return Settings.model_validate(
        {
            "pool": {"name": "qwen"},
            "gateway": {"url": "http://gateway"},
            "signals": signals,
            "budget": {"max_in_flight": 16},
        }
    )


@pytest.mark.parametrize(
    ("signals", "names"),
    [
        ({}, ["epp"]),
        ({"source": "epp", "prometheus": {"url": "http://p"}}, ["epp"]),
        ({"prometheus": {"url": "http://p"}}, ["epp", "prometheus"]),
        ({"source": "prometheus", "prometheus": {"url": "http://p"}}, ["prometheus"]),
        ({"source": "fixed"}, ["fixed"]),
    ],
)
def test_the_settings_say_which_sources_and_which_first(signals: dict[str, Any], names: list[str]) -> None:
    assert [source.name for source in build_sources(settings(**signals))] == names


async def test_a_fixed_limit_is_all_of_an_empty_pool_whatever_else_the_budget_says() -> None:
    given = settings(source="fixed")
    given = given.model_copy(
        update={"budget": BudgetSettings(max_in_flight=16, reserve=0.5, upper=0.5, max_sys=4)}
    )
    (source,) = build_sources(given)
    seen = await source.poll()
    assert not isinstance(seen, ReadFailure)
    policy = given.limit_policy()
    (reading,) = derive_readings(seen, given.signals.use, policy, source.name).readings
    budget = compute_budget(reading, policy)
    assert (budget.fault, budget.headroom, policy.compute_max_limit(budget.max_sys)) == (None, 16, 16)


def test_a_missing_authority_file_is_an_error_of_the_operating_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        build_sources(settings(epp={"tls": {"ca_file": str(tmp_path / "none.pem")}}))
