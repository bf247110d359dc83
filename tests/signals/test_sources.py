"""The sources that are built from settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dispatcher.limit.budget import compute_budget
from dispatcher.limit.poll import ReadFailure
from dispatcher.settings.model import BudgetSettings, Settings
from dispatcher.signals.readings import derive_readings
from dispatcher.signals.sources import build_sources


def create_settings(**signals: Any) -> Settings:
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
def test_settings_determine_the_sources_and_their_order(signals: dict[str, Any], names: list[str]) -> None:
    assert [source.name for source in build_sources(create_settings(**signals))] == names


async def test_fixed_limit_is_the_whole_limit_whatever_the_budget_settings_are() -> None:
    configured = create_settings(source="fixed")
    configured = configured.model_copy(
        update={"budget": BudgetSettings(max_in_flight=16, reserve=0.5, upper=0.5, max_sys=4)}
    )
    (source,) = build_sources(configured)
    views = await source.poll()
    assert not isinstance(views, ReadFailure)
    policy = configured.limit_policy()
    (reading,) = derive_readings(views, configured.signals.use, policy, source.name).readings
    budget = compute_budget(reading, policy)
    assert (budget.fault, budget.headroom, policy.compute_max_limit(budget.max_sys)) == (None, 16, 16)


def test_missing_ca_file_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        build_sources(create_settings(epp={"tls": {"ca_file": str(tmp_path / "none.pem")}}))
