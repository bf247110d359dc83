"""Which versions are wanted: how many, and how the settings would have it written."""

from __future__ import annotations

import pytest

from dispatcher.core.models.version_policy import VersionPolicy


@pytest.mark.parametrize(
    ("policy", "most", "written", "told"),
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
def test_the_first_that_is_set_decides_of_label_specific_everything_latest(
    policy: VersionPolicy, most: int | None, written: object, told: str
) -> None:
    assert (policy.max_count, policy.to_setting(), str(policy)) == (most, written, told)
