"""Builds the options of the dispatch loop from the settings."""

from __future__ import annotations

import asyncio
from functools import partial

from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.models.availability import ModelTerms, WhenAbsent
from dispatcher.core.models.version_policy import VersionPolicy
from dispatcher.core.models.versions import FamilyTerms, Pin, Transition
from dispatcher.dispatch import Options, SequenceOptions
from dispatcher.dispatch.options import FamilyOptions, VersionOptions
from dispatcher.settings import Settings
from dispatcher.settings.models import ModelSettings
from dispatcher.settings.warmups import WarmupFiles


def options_of(settings: Settings, warmups: WarmupFiles, *, observe: bool) -> Options:
    """Build the options. `warmups` are the warm-up files that the settings name. With `observe`, the loop
    decides and shows everything, and changes nothing."""
    retry, sequences = settings.retry, settings.sequences
    return Options(
        retry=RetryPolicy(retry.base_s, retry.max_s, retry.max_attempts, retry.max_deliveries),
        lease_s=settings.queue.lease_s,
        owner_timeout_s=settings.queue.timeout_s(),
        max_payload_bytes=settings.queue.max_payload_bytes,
        gateway=f"{settings.gateway.url.bare}{settings.gateway.path}",
        tenant_from=settings.gateway.fairness_from,
        path=settings.gateway.path,
        batching=settings.batching.in_force(),
        sequences=SequenceOptions(
            terms=sequences.terms(),
            header=sequences.header,
            id_header=sequences.session_id_header,
            carry=sequences.carries(),
            max_carry_bytes=sequences.max_carry_bytes,
        ),
        models=_model_terms(settings),
        versions=_versions(settings, warmups),
        observe=observe,
    )


def _model_terms(settings: Settings) -> ModelTerms | None:
    """Return the rules for models that are not served. `None` if served models are not watched."""
    if not settings.observes_models:
        return None
    named = {model.name: WhenAbsent(model.absent) for model in settings.models}
    return ModelTerms(named, WhenAbsent(settings.serving.absent))


def _versions(settings: Settings, warmups: WarmupFiles) -> VersionOptions:
    serving = settings.serving
    families = [_family(model, warmups) for model in settings.models if model.is_family]
    by = serving.warmup.by
    return VersionOptions(
        families=families if settings.observes_models else (),
        steered=bool(serving.subset_header),
        straight=None if by == "auto" else by == "endpoints",
        warm_s=serving.warmup.timeout_s,
    )


def _family(model: ModelSettings, warmups: WarmupFiles) -> FamilyOptions:
    terms = FamilyTerms(
        name=model.name,
        match=model.pattern,
        # A model without versions is a family with one version, which is always desired.
        policy=model.policy if model.match else VersionPolicy(everything=True),
        transition=Transition(model.transition),
        pin=Pin(model.pin),
        weights=model.weights,
        labels=model.labels,
        warms=bool(model.warmup),
    )
    # Reading files blocks, so it must not run in the event loop.
    read = partial(asyncio.to_thread, warmups.requests, model.name) if model.warmup else None
    return FamilyOptions(terms, read, model.warmup_required)
