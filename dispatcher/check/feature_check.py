"""Interface of the checks of a feature, which are in `features/<name>/check.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dispatcher.features import import_modules

if TYPE_CHECKING:
    from dispatcher.check.addresses import Address
    from dispatcher.check.finding import Finding, Probe
    from dispatcher.settings.model import Settings
    from dispatcher.settings.values import SecretUrl
    from dispatcher.telemetry.status import Status


class FeatureCheck:
    """Checks of a feature. Each method has a default that finds nothing."""

    def check_settings(self, settings: Settings) -> Iterable[Finding]:
        """Report settings that are valid but probably not intended, and those that are derived from
        others."""
        return ()

    def check_files(self, settings: Settings) -> Iterable[Finding]:
        """Report whether the files that settings of the feature name can be used."""
        return ()

    def find_only_model(self, settings: Settings) -> str:
        """Return the name of the model that the settings name. Empty if it is not exactly one."""
        return ""

    def list_urls(self, settings: Settings) -> Sequence[SecretUrl]:
        """Return the URLs of servers that the feature connects to."""
        return ()

    def build_probes(self, settings: Settings, unreachable: Mapping[Address, str]) -> Mapping[str, Probe]:
        """Return the probes of these servers by setting. Everything that they need is imported here."""
        return {}

    def report_status(self, status: Status) -> Iterable[Finding]:
        """Report what a running dispatcher has found out."""
        return ()

    async def probe_model(self, settings: Settings, model: str, seconds: float) -> Iterable[Finding]:
        """Check a model by calls to the gateway, for up to `seconds` each."""
        return ()


def list_feature_checks() -> list[FeatureCheck]:
    """Return `CHECK` of each feature that has one, in the alphabetical order of the features."""
    return [module.CHECK for _, module in sorted(import_modules("check").items())]
