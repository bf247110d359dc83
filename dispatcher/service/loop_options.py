"""Builds the options of the dispatch loop from the settings."""

from __future__ import annotations

import asyncio
from functools import partial

from dispatcher.features import import_modules
from dispatcher.features.models.availability import ModelTerms, WhenNotServed
from dispatcher.features.models.settings import (
    ModelSettings,
    ServingSettings,
    get_models,
    is_observing_models,
)
from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.versions import FamilyTerms, PinScope, Transition
from dispatcher.features.models.warm_up_files import WarmupFiles
from dispatcher.kernel import Options
from dispatcher.kernel.options import FamilyOptions, VersionOptions, index_options
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.settings.model import Settings


def build_options(settings: Settings, warmups: WarmupFiles, *, observe: bool) -> Options:
    """Build the options. `warmups` are the warm-up files that the settings name. With `observe`, the loop
    decides and shows everything, and changes nothing."""
    retry = settings.retry
    return Options(
        retry=RetryPolicy(retry.base_s, retry.max_s, retry.max_attempts),
        lease_s=settings.queue.lease_s,
        owner_timeout_s=settings.queue.effective_owner_timeout_s(),
        max_payload_bytes=settings.queue.max_payload_bytes,
        gateway_url=f"{settings.gateway.url.without_credentials}{settings.gateway.path}",
        tenant_attribute=settings.gateway.fairness_from,
        default_path=settings.gateway.path,
        model_terms=_build_model_terms(settings),
        versions=_build_version_options(settings, warmups),
        observe=observe,
        of_features=index_options(*_build_feature_options(settings)),
    )


def _build_feature_options(settings: Settings) -> list[object]:
    modules = import_modules("settings").values()
    return [each for module in modules for each in module.build_options(settings)]


def _build_model_terms(settings: Settings) -> ModelTerms | None:
    """Return the rules for models that are not served. `None` if served models are not watched."""
    if not is_observing_models(settings):
        return None
    named = {model.name: WhenNotServed(model.when_not_served) for model in get_models(settings)}
    return ModelTerms(named, WhenNotServed(settings.get_section(ServingSettings).when_not_served))


def _build_version_options(settings: Settings, warmups: WarmupFiles) -> VersionOptions:
    serving = settings.get_section(ServingSettings)
    families = [_build_family_options(model, warmups) for model in get_models(settings) if model.is_family]
    warm_up_by = serving.warmup.by
    return VersionOptions(
        families=families if is_observing_models(settings) else (),
        can_steer=bool(serving.subset_header),
        warm_directly=None if warm_up_by == "auto" else warm_up_by == "endpoints",
        warmup_timeout_s=serving.warmup.timeout_s,
    )


def _build_family_options(model: ModelSettings, warmups: WarmupFiles) -> FamilyOptions:
    terms = FamilyTerms(
        name=model.name,
        template=model.version_template,
        # A model without versions is a family with one version, which is always desired.
        policy=model.policy if model.match else VersionPolicy(everything=True),
        transition=Transition(model.transition),
        pin=PinScope(model.pin),
        weights=model.weights,
        labels=model.labels,
        has_warm_up=bool(model.warmup),
    )
    # Reading files blocks, so it must not run in the event loop.
    load_warmup = partial(asyncio.to_thread, warmups.requests_for, model.name) if model.warmup else None
    return FamilyOptions(terms, load_warmup, model.warmup_required)
