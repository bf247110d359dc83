"""The section of /status about models and their versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from dispatcher.features.models.registry import ModelRegistryState
from dispatcher.telemetry.status import MAX_TABLE_ROWS, FeatureSection, FeatureStatus

if TYPE_CHECKING:
    from dispatcher.features.models.model_router import ModelRouter
    from dispatcher.features.models.rollover import ModelFamily
    from dispatcher.features.models.warm_up_runner import WarmUpRunner
    from dispatcher.requests.queue_counts import QueueCounts

MAX_EXPLAINED = 3
"""Maximum number of models with a sentence about the requests that wait for them."""
MAX_VERSIONS = 20


@dataclass(frozen=True, slots=True)
class LabelStatus:
    """A label of a model."""

    version: str = ""
    by: str | None = None
    """Operator who set it. `None` if it comes from the settings."""


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version of a model."""

    name: str = ""
    label: str = ""
    """Short name of the version."""
    state: str = ""
    since_s: float = 0.0
    serving: int = 0
    """Number of endpoints that serve it."""
    warm: int | None = None
    """Number of endpoints where it is warm. `None` if the model has no warm-up."""
    desired: bool = False
    drained: bool = False
    drained_by: str | None = None
    share: float = 0.0
    """Share of the requests for the model."""
    labels: Sequence[str] = ()
    """Labels that select it."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model."""

    name: str = ""
    state: str = "unknown"
    serving: int | None = None
    """Number of endpoints that serve it, of all `endpoints`. `None`, like the next fields, if no dispatcher
    watches it."""
    endpoints: int | None = None
    unread_count: int | None = None
    """Number of endpoints whose list of models cannot be read."""
    waiting: int | None = None
    """Number of requests that wait for it. `None` if it is not known."""
    since_s: float | None = None
    named: bool | None = None
    """True if the settings name it."""
    denied: bool | None = None
    """True if a model server rejected it although it is listed."""
    drained_by: str | None = None
    sentence: str = ""
    """Explanation of the state."""
    policy: str | None = None
    """Version policy. `None` if the settings give it no versions."""
    labels: Mapping[str, LabelStatus] = field(default_factory=dict)
    versions: Sequence[VersionStatus] = ()
    """Newest version first."""


@dataclass(frozen=True, slots=True)
class ModelsStatus(FeatureSection):
    """Models that the pool serves, as this process sees them."""

    models: Sequence[ModelStatus] = ()
    """Models that are configured, were served, or have waiting requests; those with most waiting requests
    first. Empty if models are not watched."""
    model_count: int = 0
    """Number of known models. `models` has only the first ones."""
    model_requests: Mapping[str, int] = field(default_factory=dict)
    """Decisions about claimed requests that name a model in this process: `served`, `waits`, `unknown`, and
    `denied` if the model server rejected the model."""
    warm_ups: Mapping[str, int] = field(default_factory=dict)
    """Warm-ups of versions on endpoints in this process by result: `warm`, `errors`, `retry`."""
    model_problems: Sequence[str] = ()
    """Endpoints whose list of models cannot be read, with the reason."""
    model_registry_problem: str | None = None
    """Reason why the model registry in the queue cannot be read. Its contents are ignored meanwhile."""

    def get_by_model(self, field_name: str) -> Mapping[str, float]:
        """Return a numeric field of each model for which it is known."""
        values = {each.name: getattr(each, field_name) for each in self.models[:MAX_TABLE_ROWS]}
        return {name: float(value) for name, value in values.items() if value is not None}

    def get_by_version(self, field_name: str) -> Mapping[str, float]:
        """Return a numeric field of each served version for which it is known. Keys join model and version
        with a NUL byte."""
        pairs = (
            (f"{model.name}\0{each.name}", getattr(each, field_name))
            for model in self.models
            for each in model.versions
            if each.serving
        )
        return {name: float(value) for name, value in islice(pairs, MAX_TABLE_ROWS) if value is not None}


SECTION = ModelsStatus


def build_status(
    model_router: ModelRouter, warm_ups: WarmUpRunner, now: float, counts: QueueCounts | None
) -> FeatureStatus:
    """Build the status of the models, as this process sees them."""
    registry_problem = model_router.registry_problem or None
    section = ModelsStatus(
        models=[
            _add_family(
                model_router,
                ModelStatus(
                    name=model.name,
                    state=str(model.state),
                    serving=model.serving_count,
                    endpoints=model.endpoint_count,
                    unread_count=model.unread_count,
                    waiting=waiting_count if counts else None,
                    since_s=round(now - model.state_since, 1),
                    named=model.is_named,
                    denied=model.is_denied,
                    drained_by=model_router.versions.get_drain_note(model.name) or None,
                    sentence=model_router.describe_model(model.name),
                ),
                now,
            )
            for model, waiting_count in model_router.list_states()
        ],
        model_count=len(model_router.list_names()),
        model_requests=dict(model_router.request_counts),
        warm_ups=dict(warm_ups.result_counts),
        model_problems=[
            f"{endpoint}: {problem}" for endpoint, problem in model_router.endpoint_problems.items()
        ],
        model_registry_problem=registry_problem,
    )
    what = "Labels and drains of models in the queue cannot be read and are ignored"
    return FeatureStatus(
        section,
        sentences=_explain_waiting(model_router) if counts else (),
        problems=[f"{what}: {registry_problem}"] if registry_problem else (),
    )


def _explain_waiting(model_router: ModelRouter) -> list[str]:
    """Explain which models hold requests back."""
    held_back = model_router.list_held_back()
    sentences = [
        f"{count:,} {'request waits' if count == 1 else 'requests wait'}: {why}."
        for _, count, why in held_back[:MAX_EXPLAINED]
    ]
    more = len(held_back) - MAX_EXPLAINED
    return [*sentences, f"And {more} more such models."] if more > 0 else sentences


def _add_family(model_router: ModelRouter, model: ModelStatus, now: float) -> ModelStatus:
    """Return the model with its policy, labels and versions. The same if the settings give it no versions."""
    family, registry = (
        model_router.versions.get_family(model.name),
        model_router.versions.registry or ModelRegistryState(),
    )
    if family is None:
        return model
    labels = {label: LabelStatus(version) for label, version in family.terms.labels.items()}
    labels |= {
        label: LabelStatus(version, registry.label_origins.get((family_name, label)))
        for (family_name, label), version in registry.labels.items()
        if family_name == model.name
    }
    return replace(
        model,
        policy=str(family.terms.policy),
        labels=labels,
        versions=_build_versions(family, registry, now),
    )


def _build_versions(family: ModelFamily, registry: ModelRegistryState, now: float) -> list[VersionStatus]:
    """Return the newest versions first."""
    return [
        VersionStatus(
            name=each.name,
            label=each.label,
            state=str(each.state),
            since_s=round(now - each.state_since, 1),
            serving=len(each.endpoints),
            warm=len(each.warm_endpoints) if family.terms.has_warm_up else None,
            desired=each.is_desired,
            drained=each.is_drained,
            drained_by=next(
                (registry.drained_models[name] for name in each.aliases if name in registry.drained_models),
                None,
            ),
            share=round(each.weight, 4),
            labels=list(each.labels),
        )
        for each in family.make_snapshots()[:MAX_VERSIONS]
    ]
