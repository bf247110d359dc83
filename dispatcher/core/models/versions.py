"""Versions of a model: their names, what the operator decides of them, what is seen of them. Pure.

    absent    no endpoint lists it
    loading   none does, and one says that it loads it
    cold      listed and wanted, not open yet: it waits to be warm, or for others to be drained
    open      requests are sent to it
    draining  it was open; it takes nothing new (pinned work aside), and some of ours is under way to it
    spare     listed, not wanted
    gone      it was there once, and is not now

What follows is in core/models/rollover.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

from dispatcher.core.models.version_policy import VersionPolicy
from dispatcher.core.requests.lanes import MODEL_BYTES

NAMINGS_MOST = 20_000
"""Largest number of names whose match with a pattern is remembered."""
_DIGITS = re.compile("([0-9]+)")
_LITERAL = re.compile("[A-Za-z0-9_/:-]*")


class VersionState(StrEnum):
    ABSENT = "absent"
    LOADING = "loading"
    COLD = "cold"
    OPEN = "open"
    DRAINING = "draining"
    SPARE = "spare"
    GONE = "gone"


class Transition(StrEnum):
    """What comes first when another version is wanted."""

    AVAILABILITY = "availability"
    """The new one is warm before the old one closes."""
    RESOURCE = "resource"
    """The old one is drained before the new one is warmed."""


class Pin(StrEnum):
    """What keeps the version that it was given."""

    REQUEST = "request"
    SEQUENCE = "sequence"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class FamilyTerms:
    """What the operator decided of one model. Wherever a version stands, its full name means it, its label,
    and its label with a leading v where it begins with a digit."""

    name: str
    """As requests name it."""
    match: re.Pattern[str] | None = None
    """Names that it matches whole are versions, labelled by the group `version`; None: the name itself is
    the only one."""
    policy: VersionPolicy = field(default_factory=VersionPolicy)
    transition: Transition = Transition.AVAILABILITY
    pin: Pin = Pin.REQUEST
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of versions among those that are open (core/models/weighted_choice.py)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    warms: bool = False
    """A warm-up is configured: versions begin cold."""


@dataclass(frozen=True, slots=True)
class VersionSight:
    """What is known at one moment, of all models. It is not changed afterwards."""

    served: Mapping[str, frozenset[str]]
    """Models that are ready, with the endpoints that list them."""
    loading: Set[str] = frozenset()
    warm: Set[tuple[str, str]] = frozenset()
    """Model and endpoint."""
    used: Set[str] = frozenset()
    """Models to which anything of any replica is under way."""
    drained: Mapping[str, str] = field(default_factory=dict)
    """By operators, as they write them: by whom, since when and why, as a sentence goes on ("by ada …")."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of this family, set by a verb: they win over those of the settings."""
    labelled: Mapping[str, str] = field(default_factory=dict)
    """By whom, and since when, each of those is set, as a sentence goes on."""
    steered: bool = False
    """Requests can be confined to endpoints."""


@dataclass(frozen=True, slots=True)
class VersionMoved:
    """A version has come from one state to the next."""

    family: str
    version: str
    before: VersionState
    state: VersionState


@dataclass(frozen=True, slots=True)
class VersionSeen:
    """One version as people see it."""

    name: str
    label: str
    state: VersionState
    since: float
    """Time of the last change of its state."""
    serving: frozenset[str]
    warm: frozenset[str]
    """Those endpoints among them at which it is warm."""
    wanted: bool
    drained: bool
    """By an operator."""
    used: bool
    weight: float
    """Its share of what goes to the open ones; 0: it takes nothing new."""
    labels: tuple[str, ...]
    """That are set to it."""
    words: tuple[str, ...]
    """By which an operator may mean it."""


_S = VersionState
EDGES: Mapping[VersionState, tuple[VersionState, ...]] = MappingProxyType(
    {
        _S.ABSENT: (_S.LOADING, _S.COLD, _S.SPARE),
        _S.LOADING: (_S.COLD, _S.SPARE, _S.GONE),
        _S.COLD: (_S.OPEN, _S.SPARE, _S.GONE),
        _S.OPEN: (_S.DRAINING,),
        _S.DRAINING: (_S.OPEN, _S.SPARE, _S.GONE),
        _S.SPARE: (_S.COLD, _S.GONE),
        _S.GONE: (_S.LOADING, _S.COLD, _S.SPARE),
    }
)
"""The steps that are told. Nothing else follows a state."""


def _ways() -> Mapping[tuple[VersionState, VersionState], tuple[VersionState, ...]]:
    """The shortest way from each state to each other, both with it."""
    ways: dict[tuple[VersionState, VersionState], tuple[VersionState, ...]] = {}
    for begin in VersionState:
        ways[begin, begin] = (begin,)
        reached = [begin]
        for state in reached:
            for following in EDGES[state]:
                if (begin, following) not in ways:
                    ways[begin, following] = (*ways[begin, state], following)
                    reached.append(following)
    return ways


WAYS = _ways()


@dataclass(frozen=True, slots=True)
class VersionNaming:
    """What the pattern makes of a name."""

    name: str
    label: str
    words: tuple[str, ...]
    """By which an operator may mean it."""
    order: tuple[tuple[str | int, ...], str, str]
    """Runs of digits by value; what is newer is greater."""


def naming_of(name: str, terms: FamilyTerms) -> VersionNaming | None:
    """None: it is no version of this model. A name that is too long to be waited for is none."""
    if terms.match is None and name != terms.name:
        return None
    return naming_by(name, terms.match)


@lru_cache(maxsize=NAMINGS_MOST)
def naming_by(name: str, match: re.Pattern[str] | None) -> VersionNaming | None:
    """Return the parts of a name that a pattern finds. `None` if the name does not match.

    Matching takes 15 µs and several callers ask for each new name, so the result is remembered.
    """
    if not name or len(name.encode(errors="replace")) > MODEL_BYTES:
        return None
    label: str = name
    if match is not None:
        found = match.fullmatch(name)
        if found is None:
            return None
        label = found.groupdict().get("version") or name
    parts = _DIGITS.split(label)  # text and digits in turns, so that like is compared with like
    natural = tuple(int(part) if at % 2 else part for at, part in enumerate(parts))
    return VersionNaming(name, label, words_of(name, label), (natural, label, name))


def words_of(name: str, label: str) -> tuple[str, ...]:
    """By which an operator may mean the version of that name, which is called so."""
    return tuple(dict.fromkeys((name, label, f"v{label}") if label[:1].isdigit() else (name, label)))


class Membership:
    """Of which models a name is a version. It looks at the patterns that begin as the name does, and at those
    that begin with anything: a thousand models with as many versions each cost little more than one."""

    def __init__(self, families: Iterable[FamilyTerms]) -> None:
        self._by_beginning: dict[str, list[FamilyTerms]] = {}
        for terms in families:
            self._by_beginning.setdefault(_beginning(terms), []).append(terms)
        self._lengths = sorted({len(beginning) for beginning in self._by_beginning})

    def of(self, name: str) -> list[str]:
        """By the names of the models."""
        return [
            terms.name
            for length in self._lengths
            for terms in self._by_beginning.get(name[:length], ())
            if naming_of(name, terms) is not None
        ]


def _beginning(terms: FamilyTerms) -> str:
    """The text with which each of its versions begins, as far as that is easily seen."""
    if terms.match is None:
        return terms.name
    written = terms.match.pattern
    if "|" in written or terms.match.flags & (re.IGNORECASE | re.VERBOSE):
        return ""
    literal = _LITERAL.match(written)
    text = "" if literal is None else literal[0]
    return text[:-1] if written[len(text) :][:1] in ("*", "?", "{") else text
