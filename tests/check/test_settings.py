"""Doubts about a valid configuration: settings that have no effect, or are seldom intended."""

from __future__ import annotations

import pytest

from dispatcher.check.settings import find_doubts
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings


@pytest.mark.parametrize(
    ("signals", "is_doubtful"),
    [
        ("{}", True),
        ("{vllm: {urls: ['http://a']}}", False),
        ("{source: fixed}", False),
    ],
)
def test_missing_objective_is_doubtful_only_in_an_inference_pool(signals: str, *, is_doubtful: bool) -> None:
    text = f"gateway: {{url: http://gw}}\nbudget: {{max_in_flight: 4}}\nsignals: {signals}\n"
    settings = parse_settings(text, {})
    assert isinstance(settings, Settings)
    assert [finding.where for finding in find_doubts(settings)] == ["gateway.objective"] * is_doubtful
