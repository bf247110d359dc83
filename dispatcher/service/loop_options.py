"""Builds the options of the dispatch loop from the settings."""

from __future__ import annotations

from dispatcher.features import import_modules
from dispatcher.kernel import Options
from dispatcher.kernel.options import index_options
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.settings.model import Settings


def build_options(settings: Settings, *, observe: bool) -> Options:
    """Build the options. With `observe`, the loop decides and shows everything, and changes nothing.

    Raises OSError if a file that the settings name cannot be used.
    """
    retry = settings.retry
    modules = import_modules("options").values()
    return Options(
        retry=RetryPolicy(retry.base_s, retry.max_s, retry.max_attempts),
        lease_s=settings.queue.lease_s,
        owner_timeout_s=settings.queue.effective_owner_timeout_s(),
        max_payload_bytes=settings.queue.max_payload_bytes,
        gateway_url=f"{settings.gateway.url.without_credentials}{settings.gateway.path}",
        fairness_attribute=settings.gateway.fairness_from,
        default_path=settings.gateway.path,
        observe=observe,
        of_features=index_options(*(each for module in modules for each in module.build_options(settings))),
    )
