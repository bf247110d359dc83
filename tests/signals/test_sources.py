"""The sources that settings ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dispatcher.settings import Settings
from dispatcher.signals.sources import sources


def settings(**signals: Any) -> Settings:
    return Settings.model_validate(
        {"pool": {"name": "qwen"}, "gateway": {"url": "http://gateway"}, "signals": signals}
    )


@pytest.mark.parametrize(
    ("signals", "names"),
    [
        ({}, ["epp"]),
        ({"source": "epp", "prometheus": {"url": "http://p"}}, ["epp"]),
        ({"prometheus": {"url": "http://p"}}, ["epp", "prometheus"]),
        ({"source": "prometheus", "prometheus": {"url": "http://p"}}, ["prometheus"]),
    ],
)
def test_the_settings_say_which_sources_and_which_first(signals: dict[str, Any], names: list[str]) -> None:
    assert [source.name for source in sources(settings(**signals))] == names


def test_a_missing_authority_file_is_an_error_of_the_operating_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        sources(settings(epp={"tls": {"ca_file": str(tmp_path / "none.pem")}}))
