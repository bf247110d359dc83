"""Report whether slices of models are equal to whole generations, as a running dispatcher has found out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dispatcher.check.feature_check import FeatureCheck
from dispatcher.check.finding import Finding
from dispatcher.features.slices.settings import SlicingSettings
from dispatcher.features.slices.status import SlicedModelStatus, SlicingStatus
from dispatcher.settings.model import Settings
from dispatcher.telemetry.status import Status

WHERE = "slicing"
MAX_MODELS = 8
"""Number of models that are reported."""


class SlicesCheck(FeatureCheck):
    def report_status(self, status: Status) -> Iterator[Finding]:
        """Return the verdicts of a running dispatcher."""
        section = status.get_section(SlicingStatus)
        models = section.sliced_models
        if not models and section.slicing_mode not in ("", "off"):
            what = "no model was checked yet: the dispatcher checks one before its first long generation"
            yield Finding("ok", WHERE, what)
        for model in models[:MAX_MODELS]:
            yield report_model(model)
        if len(models) > MAX_MODELS:
            yield Finding("ok", WHERE, f"{len(models) - MAX_MODELS} more models: see `status --json`")

    async def probe_model(self, settings: Settings, model: str, seconds: float) -> Iterable[Finding]:
        """Check whether slices of a model are equal, as the dispatcher does before it slices."""
        if settings.get_section(SlicingSettings).mode == "off":
            return ()
        from dispatcher.features.slices.check_probe import check_paths  # its client is slow to import

        try:
            checked = await check_paths(settings, model, seconds)
        except OSError as error:
            return [Finding("failed", WHERE, f"the check cannot start: {error}")]
        return [
            Finding("warning", WHERE, each) if isinstance(each, str) else report_model(each)
            for each in checked
        ]


CHECK = SlicesCheck()


def report_model(model: SlicedModelStatus) -> Finding:
    is_ok = not model.whole_reason or model.verdict == "unchecked"
    return Finding("ok" if is_ok else "warning", WHERE, f"{model.name}: {model.sentence}")
