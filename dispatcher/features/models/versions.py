"""Versions of a model: their names, the operator's settings, and observed facts.

    absent    no endpoint lists it
    loading   no endpoint lists it, and one reports that it is loading it
    cold      listed and desired, not open yet: it waits to be warm, or for other versions to be drained
    open      requests are sent to it
    draining  it was open; it takes nothing new (except pinned work), and batch requests to it are in flight
    retiring  listed, not desired
    gone      it was listed once, and is not now

features/models/rollover.py determines the states.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES

if TYPE_CHECKING:
    from dispatcher.features.models.warmup import WarmupRequest

MAX_CACHED_NAMES = 20_000
"""Largest number of names whose match with a template is remembered."""
_DIGITS = re.compile("([0-9]+)")


class VersionState(StrEnum):
    ABSENT = "absent"
    LOADING = "loading"
    COLD = "cold"
    OPEN = "open"
    DRAINING = "draining"
    RETIRING = "retiring"
    GONE = "gone"


class Transition(StrEnum):
    """Order of steps when another version becomes desired."""

    AVAILABILITY = "availability"
    """The new version is warm before the old one closes."""
    RESOURCE = "resource"
    """The old version is drained before the new one is warmed."""


class PinScope(StrEnum):
    """Unit of work that keeps the version it was assigned."""

    REQUEST = "request"
    SEQUENCE = "sequence"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class FamilyTerms:
    """Settings of one model.

    In the settings, a version is named by its full name, by its label, or by its label with a leading v if
    the label begins with a digit.
    """

    name: str
    """Name of the model in requests."""
    template: VersionTemplate | None = None
    """Template for the names of versions. The version in a name is its label. `None` if the model's own name
    is the only version."""
    policy: VersionPolicy = field(default_factory=VersionPolicy)
    transition: Transition = Transition.AVAILABILITY
    pin: PinScope = PinScope.REQUEST
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of open versions (features/models/weighted_choice.py)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    has_warm_up: bool = False
    """True if a warm-up is configured, so that versions begin cold."""
    load_warmup: Callable[[], Awaitable[tuple[Sequence[WarmupRequest], str]]] | None = None
    """Return the warm-up requests, and why they may be out of date. `None` if the model has no warm-up."""
    is_warmup_required: bool = False
    """True if a version that answered its warm-up with errors stays cold."""


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """Facts about all models at one moment. The object is never changed."""

    served: Mapping[str, frozenset[str]]
    """Models that are ready, each with the endpoints that list it."""
    loading: Set[str] = frozenset()
    warm: Set[tuple[str, str]] = frozenset()
    """Pairs of model and endpoint."""
    used: Set[str] = frozenset()
    """Models to which requests of any replica are in flight."""
    drained: Mapping[str, str] = field(default_factory=dict)
    """Names that operators drain, as they wrote them, each with who, since when and why, as the continuation
    of a sentence ("by ada …")."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of this family that were set by a CLI command. They override labels in the settings."""
    label_origins: Mapping[str, str] = field(default_factory=dict)
    """Origin of each of these labels: who set it and when, as the continuation of a sentence."""
    is_steered: bool = False
    """True if requests can be confined to endpoints."""


@dataclass(frozen=True, slots=True)
class VersionStateChange:
    """Change of a version from one state to the next."""

    family: str
    version: str
    previous_state: VersionState
    state: VersionState


@dataclass(frozen=True, slots=True)
class VersionSnapshot:
    """One version at one moment."""

    name: str
    label: str
    state: VersionState
    state_since: float
    """Time of the last change of its state."""
    endpoints: frozenset[str]
    warm_endpoints: frozenset[str]
    """Endpoints at which the version is warm."""
    is_desired: bool
    is_drained: bool
    """True if an operator drains the version."""
    is_used: bool
    weight: float
    """Share of the work for open versions. 0 if the version takes nothing new."""
    labels: tuple[str, ...]
    """Labels that are set to the version."""
    aliases: tuple[str, ...]
    """Names by which an operator may refer to the version."""


_S = VersionState
EDGES: Mapping[VersionState, tuple[VersionState, ...]] = MappingProxyType(
    {
        _S.ABSENT: (_S.LOADING, _S.COLD, _S.RETIRING),
        _S.LOADING: (_S.COLD, _S.RETIRING, _S.GONE),
        _S.COLD: (_S.OPEN, _S.RETIRING, _S.GONE),
        _S.OPEN: (_S.DRAINING,),
        _S.DRAINING: (_S.OPEN, _S.RETIRING, _S.GONE),
        _S.RETIRING: (_S.COLD, _S.GONE),
        _S.GONE: (_S.LOADING, _S.COLD, _S.RETIRING),
    }
)
"""Possible changes from each state. Each change is reported."""


def _compute_state_paths() -> Mapping[tuple[VersionState, VersionState], tuple[VersionState, ...]]:
    """Return the shortest path from each state to each other one, including both."""
    paths: dict[tuple[VersionState, VersionState], tuple[VersionState, ...]] = {}
    for begin in VersionState:
        paths[begin, begin] = (begin,)
        reached = [begin]
        # Breadth-first search: `reached` grows during the iteration.
        for state in reached:
            for following in EDGES[state]:
                if (begin, following) not in paths:
                    paths[begin, following] = (*paths[begin, state], following)
                    reached.append(following)
    return paths


STATE_PATHS = _compute_state_paths()


@dataclass(frozen=True, slots=True)
class VersionNaming:
    """Parts of a version's name."""

    name: str
    label: str
    aliases: tuple[str, ...]
    """Names by which an operator may refer to the version."""
    order: tuple[tuple[str | int, ...], str, str]
    """Sort key: a newer version is greater. Runs of digits compare as numbers."""


def match_version(name: str, terms: FamilyTerms) -> VersionNaming | None:
    """Return the parts of a name. `None` if it is not a version of this model, or too long to be waited
    for."""
    if terms.template is None and name != terms.name:
        return None
    return parse_version(name, terms.template)


@lru_cache(maxsize=MAX_CACHED_NAMES)
def parse_version(name: str, template: VersionTemplate | None) -> VersionNaming | None:
    """Return the parts of a name. `None` if the name does not match the template.

    This takes microseconds and several callers ask for each new name, so the result is remembered.
    """
    if not name or len(name.encode(errors="replace")) > MAX_MODEL_NAME_BYTES:
        return None
    label = name if template is None else template.extract_version(name)
    if label is None:
        return None
    parts = _DIGITS.split(label)  # texts and digits alternate, so equal positions have equal types
    natural = tuple(int(part) if at % 2 else part for at, part in enumerate(parts))
    return VersionNaming(name, label, list_aliases(name, label), (natural, label, name))


def list_aliases(name: str, label: str) -> tuple[str, ...]:
    """Return the names by which an operator may refer to a version."""
    return tuple(dict.fromkeys((name, label, f"v{label}") if label[:1].isdigit() else (name, label)))


class FamilyIndex:
    """Find the models that have a version with this name.

    Only templates are tried that begin like the name. With a thousand models with as many versions each, a
    lookup costs little more than with one.
    """

    def __init__(self, families: Iterable[FamilyTerms]) -> None:
        self._terms_by_prefix: dict[str, list[FamilyTerms]] = {}
        for terms in families:
            prefix = terms.name if terms.template is None else terms.template.prefix
            self._terms_by_prefix.setdefault(prefix, []).append(terms)
        self._prefix_lengths = sorted({len(prefix) for prefix in self._terms_by_prefix})

    def find_families(self, name: str) -> list[str]:
        return [
            terms.name
            for length in self._prefix_lengths
            for terms in self._terms_by_prefix.get(name[:length], ())
            if match_version(name, terms) is not None
        ]
