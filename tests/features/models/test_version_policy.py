"""Policies that select versions: their maximum count, setting and text."""

from __future__ import annotations

import pytest

from dispatcher.features.models.version_policy import VersionPolicy


@pytest.mark.parametrize(
    ("policy", "max_count", "setting", "text"),
    [
        (VersionPolicy(), 1, "latest", "latest"),
        (VersionPolicy(latest=3), 3, {"latest": 3}, '{"latest": 3}'),
        (VersionPolicy(everything=True), None, "all", "all"),
        (VersionPolicy(specific=("2", "ü")), 2, {"specific": ["2", "ü"]}, '{"specific": ["2", "ü"]}'),
        (VersionPolicy(label="stable"), 1, {"label": "stable"}, '{"label": "stable"}'),
        (VersionPolicy(latest=2, everything=True), None, "all", "all"),
        (VersionPolicy(2, True, ("1", "3")), 2, {"specific": ["1", "3"]}, '{"specific": ["1", "3"]}'),
        (VersionPolicy(2, True, ("1", "3"), "stable"), 1, {"label": "stable"}, '{"label": "stable"}'),
    ],
)
def test_policy_is_decided_by_label_before_specific_before_everything_before_latest(
    policy: VersionPolicy, max_count: int | None, setting: object, text: str
) -> None:
    assert (policy.max_count, policy.to_setting(), str(policy)) == (max_count, setting, text)
