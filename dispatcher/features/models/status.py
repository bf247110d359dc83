"""The section of /status about models and their versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from dispatcher.features.models.availability import MAX_SHOWN, ModelState
from dispatcher.features.models.registry import ModelRegistryState
from dispatcher.telemetry.status import MAX_TABLE_ROWS, FeatureSection, FeatureStatus

if TYPE_CHECKING:
    from dispatcher.features.models.availability import PoolModels
    from dispatcher.features.models.model_router import ModelRouter
    from dispatcher.features.models.rollover import ModelFamily
    from dispatcher.features.models.versions import VersionSnapshot
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
    pool, registry = model_router.pool, model_router.versions.registry or ModelRegistryState()
    section = ModelsStatus(
        model_requests=dict(model_router.request_counts), warm_ups=dict(warm_ups.result_counts)
    )
    if pool is None:
        return FeatureStatus(section)
    names = _list_names(model_router, pool)
    section = replace(
        section,
        models=[
            _build_model(model_router, pool, registry, name, now, has_counts=counts is not None)
            for name in names[:MAX_SHOWN]
        ],
        model_count=len(names),
        model_problems=[f"{endpoint}: {problem}" for endpoint, problem in pool.problems.items()],
        model_registry_problem=registry.problem or None,
    )
    what = "Labels and drains of models in the queue cannot be read and are ignored"
    return FeatureStatus(
        section,
        sentences=_explain_waiting(model_router) if counts else (),
        problems=[f"{what}: {registry.problem}"] if registry.problem else (),
    )


def _list_names(model_router: ModelRouter, pool: PoolModels) -> list[str]:
    """Return the names of the models that are known, most waited for first. The name of a version is included
    only if the settings name it or requests wait for it by this name."""
    waiting = model_router.waiting_counts
    versions = {each.name for family in model_router.versions for each in family.make_snapshots()}
    hidden = versions - pool.terms.named_models.keys() - waiting.keys()
    known = [name for name in pool.list_known() if name not in hidden]
    return sorted(known, key=lambda name: -waiting.get(name, 0))


def _explain_waiting(model_router: ModelRouter) -> list[str]:
    held_back = model_router.list_held_back()
    sentences = [
        f"{count:,} {'request waits' if count == 1 else 'requests wait'}: {why}."
        for _, count, why in held_back[:MAX_EXPLAINED]
    ]
    more = len(held_back) - MAX_EXPLAINED
    return [*sentences, f"And {more} more such models."] if more > 0 else sentences


def _build_model(
    model_router: ModelRouter,
    pool: PoolModels,
    registry: ModelRegistryState,
    name: str,
    now: float,
    *,
    has_counts: bool,
) -> ModelStatus:
    model, family = pool.make_snapshot(name, now), model_router.versions.get_family(name)
    drained = registry.drained_models.get(name)
    if family is not None:
        sentence = family.describe_state()
    else:
        why = model_router.versions.explain_giving_way(name)
        sentence = "; ".join(filter(None, [pool.describe_model(name, now), why]))
    status = ModelStatus(
        name=name,
        state=str(model.state),
        serving=model.serving_count,
        endpoints=model.endpoint_count,
        unread_count=model.unread_count,
        waiting=model_router.waiting_counts.get(name, 0) if has_counts else None,
        since_s=round(now - model.state_since, 1),
        named=model.is_named,
        denied=model.is_denied,
        drained_by=drained,
        sentence=f"drained {drained}; {sentence}" if drained else sentence,
    )
    return status if family is None else _add_family(status, family, registry, now)


def _add_family(
    model: ModelStatus, family: ModelFamily, registry: ModelRegistryState, now: float
) -> ModelStatus:
    """Return the model with the state of its versions together, and with its policy, labels and versions."""
    versions = family.make_snapshots()
    if family.has_open_version:
        state = str(ModelState.READY)
    else:
        state = str(ModelState.LOADING) if family.has_listed_version else model.state
    since = max((each.state_since for each in versions), default=None)
    labels = {label: LabelStatus(version) for label, version in family.terms.labels.items()}
    labels |= {
        label: LabelStatus(version, registry.label_origins.get((family_name, label)))
        for (family_name, label), version in registry.labels.items()
        if family_name == model.name
    }
    return replace(
        model,
        state=state,
        serving=len(frozenset().union(*(each.endpoints for each in versions if each.weight > 0))),
        since_s=model.since_s if since is None else round(now - since, 1),
        denied=False,
        policy=str(family.terms.policy),
        labels=labels,
        versions=[_build_version(each, family, registry, now) for each in versions[:MAX_VERSIONS]],
    )


def _build_version(
    version: VersionSnapshot, family: ModelFamily, registry: ModelRegistryState, now: float
) -> VersionStatus:
    drained = registry.drained_models
    return VersionStatus(
        name=version.name,
        label=version.label,
        state=str(version.state),
        since_s=round(now - version.state_since, 1),
        serving=len(version.endpoints),
        warm=len(version.warm_endpoints) if family.terms.has_warm_up else None,
        desired=version.is_desired,
        drained=version.is_drained,
        drained_by=next((drained[name] for name in version.aliases if name in drained), None),
        share=round(version.weight, 4),
        labels=list(version.labels),
    )
