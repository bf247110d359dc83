"""Checks of the rules by which requests are merged."""

from __future__ import annotations

from collections.abc import Iterator

from dispatcher.check.feature_check import FeatureCheck
from dispatcher.check.finding import Finding
from dispatcher.common.patterns import matches_pattern, patterns_overlap
from dispatcher.features.merging.settings import BatchingSettings
from dispatcher.settings.model import Settings


class MergingCheck(FeatureCheck):
    def check_settings(self, settings: Settings) -> Iterator[Finding]:
        """Report paths of batching rules that no request can match."""
        batching = settings.get_section(BatchingSettings)
        if batching.mode == "off" or "rules" not in batching.model_fields_set:
            return
        allowed = (*settings.gateway.allowed_paths, settings.gateway.path)
        before: list[tuple[int, str]] = []
        for number, rule in enumerate(batching.rules):
            where = f"batching.rules[{number}].paths"
            for path in rule.paths:
                taken = next((by for by, pattern in before if matches_pattern(pattern, path)), None)
                if not any(patterns_overlap(each, path) for each in allowed):
                    what = f"{path}: has no effect, because gateway.allowed_paths does not allow it"
                    yield Finding("warning", where, what)
                elif taken is not None:
                    what = f"{path}: has no effect, because batching.rules[{taken}] matches it first"
                    yield Finding("warning", where, what)
            before += [(number, path) for path in rule.paths]


CHECK = MergingCheck()
