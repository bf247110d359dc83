"""Check the model servers of `serving.urls`: each is asked once for its models, as the dispatcher does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dispatcher.check.addresses import Address, explain_all_unreachable, list_addresses
from dispatcher.check.finding import Finding, Findings, Probe, make_known_probe
from dispatcher.core.printable import truncate_text
from dispatcher.settings import SecretUrl, Settings
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER

if TYPE_CHECKING:
    from dispatcher.core.models.availability import Listing

_WHERE = "serving.urls"
_HINT = "serving.urls, which names the list of each model server: http://HOST:PORT/v1/models"
_NAMES_CHARS = 100


def list_urls(settings: Settings) -> tuple[SecretUrl, ...]:
    """Return the URLs of the model servers that the dispatcher asks for their models."""
    return settings.serving_with_servers.urls if settings.observes_models else ()


def build_probe(settings: Settings, unreachable: Mapping[Address, str]) -> Probe:
    """Return the probe of all these model servers. If all are unreachable, the probe only reports that."""
    why = explain_all_unreachable(list_addresses(list_urls(settings)), unreachable)
    if why is not None:
        return make_known_probe(Finding("failed", _WHERE, why, _HINT))
    from dispatcher.signals.models.watch import ModelWatch  # its client library is slow to import

    watch = ModelWatch(settings, lambda _: None, access=NO_CLUSTER)

    async def ask_servers() -> Findings:
        return [_report_listing(listing) for listing in await watch.ask_once()]

    return ask_servers


def _report_listing(listing: Listing) -> Finding:
    if listing.models is None:
        return Finding("failed", _WHERE, f"{listing.endpoint}: {listing.problem}", _HINT)
    names = truncate_text(", ".join(listing.models), _NAMES_CHARS)
    return Finding("ok", _WHERE, f"{listing.endpoint}: serves {names or 'no model'}")
