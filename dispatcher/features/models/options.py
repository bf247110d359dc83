"""Options of models that the loop takes from the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dispatcher.features.models.availability import ModelTerms, WhenNotServed
from dispatcher.features.models.settings import (
    ModelSettings,
    ServingSettings,
    get_models,
    is_observing_models,
)
from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.versions import FamilyTerms, PinScope, Transition
from dispatcher.features.models.warm_up_files import WarmupFile, load_warmup_files

if TYPE_CHECKING:
    from dispatcher.settings.model import Settings


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options for all models."""

    terms: ModelTerms | None = None
    """Rules for requests whose model is not served. `None` if served models are not watched."""
    families: Sequence[FamilyTerms] = ()
    """Models with versions, or with a warm-up."""
    can_steer: bool = False
    """True if requests can be confined to endpoints, by a header that the gateway reads."""
    warm_directly: bool | None = None
    """True to send warm-ups directly to the endpoints. `None` to do so if requests cannot be steered."""
    warmup_timeout_s: float = 300.0
    """Maximum time that a warm-up spends waiting for answers."""
    settings: Settings | None = None
    """Settings with which the model servers are watched. `None` if something else reports what they serve."""


def build_options(settings: Settings) -> tuple[ModelOptions]:
    """Return the options that follow from the settings. Raises OSError if a file with warm-up requests cannot
    be used."""
    serving, models = settings.get_section(ServingSettings), get_models(settings)
    files = load_warmup_files(settings)
    warm_up_by = serving.warmup.by
    terms = ModelTerms(
        {model.name: WhenNotServed(model.when_not_served) for model in models},
        WhenNotServed(serving.when_not_served),
    )
    families = [_build_family_terms(model, files.get(model.name)) for model in models if model.is_family]
    is_observing = is_observing_models(settings)
    options = ModelOptions(
        terms=terms if is_observing else None,
        families=families if is_observing else (),
        can_steer=bool(serving.subset_header),
        warm_directly=None if warm_up_by == "auto" else warm_up_by == "endpoints",
        warmup_timeout_s=serving.warmup.timeout_s,
        settings=settings,
    )
    return (options,)


def _build_family_terms(model: ModelSettings, warmup_file: WarmupFile | None) -> FamilyTerms:
    return FamilyTerms(
        name=model.name,
        template=model.version_template,
        # A model without versions is a family with one version, which is always desired.
        policy=model.policy if model.match else VersionPolicy(everything=True),
        transition=Transition(model.transition),
        pin=PinScope(model.pin),
        weights=model.weights,
        labels=model.labels,
        has_warm_up=warmup_file is not None,
        # Reading files blocks, so it must not run in the event loop.
        load_warmup=None if warmup_file is None else partial(asyncio.to_thread, warmup_file.load),
        is_warmup_required=model.warmup_required,
    )
