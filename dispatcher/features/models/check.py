"""Checks of models: their settings, their warm-up files, and the model servers of `serving.urls`.

Each server is asked once for its models, as the dispatcher does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dispatcher.check.addresses import Address, explain_all_unreachable, list_addresses
from dispatcher.check.feature_check import FeatureCheck
from dispatcher.check.finding import Finding, Findings, Probe, make_known_probe
from dispatcher.common.printable import truncate_text
from dispatcher.features.models.settings import (
    ServingSettings,
    find_serving,
    get_models,
    is_observing_models,
)
from dispatcher.settings.model import Settings
from dispatcher.settings.values import SecretUrl
from dispatcher.settings.yaml_source import Problem
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER

if TYPE_CHECKING:
    from dispatcher.features.models.availability import Listing

_WHERE = "serving.urls"
_HINT = "serving.urls, which names the list of each model server: http://HOST:PORT/v1/models"
_NAMES_CHARS = 100


class ModelsCheck(FeatureCheck):
    def check_settings(self, settings: Settings) -> Iterator[Finding]:
        """Report settings of versions and warm-ups that have no effect, and derived addresses."""
        models, serving = get_models(settings), settings.get_section(ServingSettings)
        for at, model in enumerate(models):
            where = f"models[{at}]"
            if model.weights and model.policy.max_count == 1:
                what = (
                    f"have no effect, because the policy {model.policy} uses one version: set policy to all, "
                    "or to the versions that share the requests"
                )
                yield Finding("warning", f"{where}.weights", what)
            unset = model.policy.label and model.policy.label not in model.labels
            if unset:
                what = (
                    f"the label {model.policy.label!r} is not in labels: no version is used until "
                    "`models label` sets it"
                )
                yield Finding("warning", f"{where}.policy", what)
        if serving.subset_header and not any(model.warmup for model in models):
            what = "has no effect, because no model has a warm-up, so that every server may be used"
            yield Finding("warning", "serving.subset_header", what)
        asked_urls = find_serving(settings).urls
        if is_observing_models(settings) and asked_urls != serving.urls:
            many = len(asked_urls)
            servers, verb = ("model server", "is") if many == 1 else ("model servers", "are")
            what = f"not set, so the {many} {servers} of signals.vllm.urls {verb} asked"
            yield Finding("ok", "serving.urls", what)

    def check_files(self, settings: Settings) -> Iterator[Finding]:
        if not any(model.warmup for model in get_models(settings)):
            return
        # Imported here because few configurations have warm-ups, and the import is slow.
        from dispatcher.features.models.warm_up_files import find_warmup_files

        for file in find_warmup_files(settings).values():
            found = file.read()
            if isinstance(found, Problem):
                yield Finding("failed", found.where, found.what)
            else:
                calls = sum(each.repeat for each in found)
                what = f"{file.path}: {len(found):,} requests, {calls:,} calls for each server"
                yield Finding("ok", file.setting, what)

    def find_only_model(self, settings: Settings) -> str:
        models = get_models(settings)
        # A model with `match` is a family: producers use its name, but servers know only its versions.
        return models[0].name if len(models) == 1 and not models[0].match else ""

    def list_urls(self, settings: Settings) -> Sequence[SecretUrl]:
        """Return the URLs of the model servers that the dispatcher asks for their models."""
        return find_serving(settings).urls if is_observing_models(settings) else ()

    def build_probes(self, settings: Settings, unreachable: Mapping[Address, str]) -> Mapping[str, Probe]:
        """Return the probe of all these model servers. If all are unreachable, the probe only reports
        that."""
        urls = self.list_urls(settings)
        if not urls:
            return {}
        why = explain_all_unreachable(list_addresses(urls), unreachable)
        if why is not None:
            return {_WHERE: make_known_probe(Finding("failed", _WHERE, why, _HINT))}
        from dispatcher.features.models.watch import ModelWatch  # its client library is slow to import

        watch = ModelWatch(settings, lambda _: None, access=NO_CLUSTER)

        async def ask_servers() -> Findings:
            return [_report_listing(listing) for listing in await watch.ask_once()]

        return {_WHERE: ask_servers}


CHECK = ModelsCheck()


def _report_listing(listing: Listing) -> Finding:
    if listing.models is None:
        return Finding("failed", _WHERE, f"{listing.endpoint}: {listing.problem}", _HINT)
    names = truncate_text(", ".join(listing.models), _NAMES_CHARS)
    return Finding("ok", _WHERE, f"{listing.endpoint}: serves {names or 'no model'}")
