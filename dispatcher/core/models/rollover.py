"""Versions of one model: which of them take work, and to which one a request is sent.

A version is desired if the policy selects it among the listed versions and no operator drains it. It is ready
if it is warm: at one endpoint if requests can be confined to warm endpoints, otherwise at each endpoint that
lists it, or at any one once it is open. Without a configured warm-up, every version is ready.

    availability  The desired versions that are ready are open. Until all desired versions are ready, the
                  versions that were open before stay open. If there are none, the newest version that is
                  ready is open, so that one is open as long as one is warm.
    resource      A version that is no longer desired closes at once. A desired version is warmed and opened
                  only when no replica has requests in flight to an undesired version. In between, no version
                  may be open. Requests that name a version count as well, and wait: for an undesired version
                  until all desired ones are open, as otherwise nothing else might ever begin; for a desired
                  version until nothing is in flight to an undesired one.

The result does not depend on when facts are applied, except for the versions that were open before and the
steps that are reported. Two replicas with the same facts make the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice, pairwise

from dispatcher.core.models.versions import (
    WAYS,
    FamilyTerms,
    Transition,
    VersionMoved,
    VersionNaming,
    VersionSeen,
    VersionSight,
    VersionState,
    naming_of,
)
from dispatcher.core.models.weighted_choice import Spread, shares
from dispatcher.core.printable import shortened

GONE_MOST = 1000
"""Largest number of remembered versions that are gone. Those that went last are kept."""
NAMINGS_MOST = 20_000
"""Largest number of names for which a family remembers whether they match."""
_CLOSING = (VersionState.OPEN, VersionState.DRAINING)
_NAMES_TOLD, _NAME_CHARS, _WHO_TOLD = 5, 100, 3


@dataclass(slots=True)
class _Version:
    naming: VersionNaming
    since: float
    state: VersionState = VersionState.ABSENT


class ModelFamily:
    """Versions of one model. Its size is bounded, whatever names are listed, and it never raises."""

    def __init__(self, terms: FamilyTerms) -> None:
        self.terms = terms
        self._next = terms
        self._namings: dict[str, VersionNaming] = {}
        """Parsed names of versions of this model, by name."""
        self._others: set[str] = set()
        """Names that are no versions of this model."""
        self._sight = VersionSight({})
        self._known: dict[str, _Version] = {}
        self._gone: dict[str, None] = {}
        """Versions of `_known` that are gone, those that went last at the end."""
        self._listed: dict[str, VersionNaming] = {}
        """Listed versions, the newest first. The following collections have the same order."""
        self._drained: set[str] = set()
        self._wanted: dict[str, None] = {}
        self._open: dict[str, None] = {}
        self._blocking: list[str] = []
        """Versions that must have nothing in flight before another version opens. Only for transition
        `resource`."""
        self._lively: dict[str, None] = {}
        """Versions that are neither retiring nor gone."""
        self._warm: dict[str, frozenset[str]] = {}
        self._kept: list[str] | None = None
        self._spread = Spread({})

    # Observations.

    def reconfigure(self, terms: FamilyTerms) -> None:
        """Apply these settings when facts are applied next."""
        self._next = terms

    def look(self, sight: VersionSight, now: float) -> list[VersionMoved]:
        """Apply new facts. Return each new state of each version, in order.

        For transition `availability`, versions that open come before versions that close; for `resource`
        after them.
        """
        before = self._listed
        if (self._next.name, self._next.match) != (self.terms.name, self.terms.match):
            self._namings, self._others, self._listed = {}, set(), {}
        self.terms, self._sight, self._warm, self._kept = self._next, sight, {}, None
        self._listed = self._list()
        self._drained = self._mean(sight.drained.keys()) if sight.drained else set()
        self._wanted = dict.fromkeys(self._policy())
        self._blocking = []
        if self.terms.transition is Transition.RESOURCE:
            self._blocking = sorted(self._ours(sight.used) - self._wanted.keys())
        opened = self._opened()
        self._open = {name: None for name in self._listed if name in opened}
        words = {name: self._listed[name].words for name in self._open}
        self._spread = Spread(shares(words, self.terms.weights))
        moved = self._move(before, now)
        self._forget()
        return moved

    # Decisions about work.

    def choose(self, key: str) -> str | None:
        """Return the version to which work with this key is sent. `None` if none is open; `explain_closed`
        says why."""
        return self._spread.chosen(key)

    def keeps(self, version: str) -> bool:
        """Return whether work that was assigned to this version may still be sent to it: until the version is
        drained or gone."""
        if self.takes(version):
            return True
        # With transition `resource` a version must be emptied, so it does not keep work that was assigned to
        # it.
        if self.terms.transition is Transition.RESOURCE or version not in self._listed:
            return False
        return version not in self._drained and (not self.terms.warms or bool(self._warm_at(version)))

    def kept(self) -> Sequence[str]:
        """Return the versions for which `can_keep` is true, newest first. The list is the same until new
        facts are applied."""
        if self._kept is None:
            self._kept = [name for name in self._listed if self.keeps(name)]
        return self._kept

    def takes(self, version: str) -> bool:
        """Return whether new work is sent to the version."""
        return version in self._open

    def gives_way(self, version: str) -> str:
        """Return why work that names this version must wait, as the continuation of a sentence. Empty if it
        need not wait."""
        if self.terms.transition is not Transition.RESOURCE or self.takes(version):
            return ""
        if version in self._wanted:
            return f"waits: {_are(self._blocking, 'drained')} first" if self._blocking else ""
        # Otherwise requests that name the old version could keep it in use, and the new one closed, for ever.
        coming = _several([_told(name) for name in self._wanted if name not in self._open])
        return f"gives way to {coming}" if coming else ""

    def waits_for(self, version: str) -> bool:
        """Return whether another version opens once nothing is in flight to this one."""
        return version in self._blocking

    @property
    def opened(self) -> bool:
        """True if some version takes work."""
        return bool(self._open)

    @property
    def listed(self) -> bool:
        """True if some version is listed."""
        return bool(self._listed)

    def endpoints(self, version: str) -> frozenset[str]:
        """Return the endpoints at which the version is warm. Empty if any endpoint will do, or if it is warm
        nowhere."""
        return self._warm_at(version) if self.terms.warms else frozenset()

    def cold(self) -> list[tuple[str, str]]:
        """Return versions and endpoints to be warmed now: desired versions first, then others, each group
        newest first."""
        if not self.terms.warms:
            return []
        # While an undesired version is in use, only versions that are open already are warmed at further
        # endpoints.
        names = [name for name in self._wanted if not self._blocking or name in self._open]
        names += [name for name in self._open if name not in self._wanted]
        return [(name, each) for name in names for each in sorted(self._at(name) - self._warm_at(name))]

    # Descriptions.

    def versions(self) -> list[VersionSeen]:
        """Return all versions that are or were there, newest first."""
        known = sorted(self._known.values(), key=lambda each: each.naming.order, reverse=True)
        labels = self._labels()
        return [self._seen(each, labels) for each in known]

    def meant(self, word: str) -> list[str]:
        """Return the full names of the listed versions that have this alias, newest first."""
        return [name for name, each in self._listed.items() if word in each.words]

    def why(self) -> str:
        """Return one sentence for a request that has to wait. Empty if it need not wait."""
        if self._open:
            return ""
        if self._listed:
            return self._why_not_open()
        loading = _are(self._in(VersionState.LOADING), "being loaded")
        return loading or f"no version of {_told(self.terms.name)} is served"

    def sentence(self) -> str:
        """Return a description of the present state."""
        if not self._open:
            return self.why()
        parts = sorted(self._spread.shares.items(), key=lambda each: -each[1])
        if len(parts) == 1:
            open_ = _are(self._open, "open")
        else:
            open_ = f"open are {_several([f'{_told(name)} with {share:.1%}' for name, share in parts])}"
        cold = [name for name in self._open if self.terms.warms and self._at(name) != self._warm_at(name)]
        exposed = "" if self._sight.steered else _are(cold, "also sent to endpoints that are not warm yet")
        draining = _are(self._in(VersionState.DRAINING), "draining")
        return "; ".join(filter(None, [open_, exposed, self._why_not_open(), draining]))

    # Internals: which versions there are, and which of them are desired and open.

    def _ours(self, names: Set[str]) -> set[str]:
        """Return the names that are versions of this model."""
        for name in names - self._namings.keys() - self._others:
            naming = naming_of(name, self.terms)
            if naming is None:
                self._others.add(name)
            else:
                self._namings[name] = naming
        return names & self._namings.keys()

    def _list(self) -> dict[str, VersionNaming]:
        """Return the listed versions in order. Versions that were listed before keep their order, so that
        sorting is cheap."""
        served, before = self._sight.served, self._listed
        names = {name for name in self._ours(served.keys()) if served[name]}
        # The same object tells callers that nothing has changed.
        if names == before.keys():
            return before
        came = names - before.keys()
        namings = [self._namings[name] for name in (*came, *(name for name in before if name in names))]
        namings.sort(key=lambda each: each.order, reverse=True)
        return {each.name: each for each in namings}

    def _mean(self, words: Set[str]) -> set[str]:
        return {name for name, each in self._listed.items() if not words.isdisjoint(each.words)}

    def _labels(self) -> dict[str, str]:
        return {**self.terms.labels, **self._sight.labels}

    def _asked(self) -> frozenset[str] | None:
        """Return the words by which the policy selects versions. `None` if it selects by age, or all."""
        policy = self.terms.policy
        if policy.label:
            return frozenset(filter(None, [self._labels().get(policy.label)]))
        return frozenset(policy.specific) if policy.specific else None

    def _policy(self) -> list[str]:
        there = [name for name in self._listed if name not in self._drained]
        asked = self._asked()
        if asked is not None:
            return [name for name in there if not asked.isdisjoint(self._listed[name].words)]
        return there if self.terms.policy.everything else there[: max(0, self.terms.policy.latest)]

    def _opened(self) -> set[str]:
        ready = {name for name in self._wanted if self._ready(name)}
        if self.terms.transition is Transition.RESOURCE:
            # Nothing new opens while an undesired version is in use.
            return ready & self._open.keys() if self._blocking else ready
        if len(ready) < len(self._wanted) or not self._wanted:
            there = (name for name in self._open if name in self._listed and name not in self._drained)
            ready.update(name for name in there if self._ready(name))
        if not ready:
            others = (name for name in self._listed if name not in self._drained and self._ready(name))
            # No desired version is ready: the newest ready version is better than none.
            ready.update(islice(others, 1))
        return ready

    def _ready(self, name: str) -> bool:
        if not self.terms.warms:
            return True
        warm = self._warm_at(name)
        # Without confinement the picker may choose any endpoint, so all must be warm before the version
        # opens.
        return bool(warm) if self._sight.steered or name in self._open else warm == self._at(name)

    def _at(self, name: str) -> frozenset[str]:
        return self._sight.served[name] if name in self._listed else frozenset()

    def _warm_at(self, name: str) -> frozenset[str]:
        if name not in self._warm and name in self._listed:
            marks = self._sight.warm
            self._warm[name] = frozenset([each for each in self._at(name) if (name, each) in marks])
        return self._warm.get(name, frozenset())

    # Internals: states.

    def _move(self, before: Mapping[str, VersionNaming], now: float) -> list[VersionMoved]:
        known, listed = self._known, self._listed
        loading = self._ours(self._sight.loading)
        if listed is not before:
            for name, naming in listed.items():
                known.setdefault(name, _Version(naming, now)).naming = naming
        for name in sorted(loading - known.keys()):
            known[name] = _Version(self._namings[name], now)
        # Most versions are retiring or gone and stay so, so only candidates for a change are visited.
        changed = sorted(listed.keys() ^ before.keys(), reverse=True)
        at_work = dict.fromkeys([*self._lively, *self._open, *self._wanted, *sorted(loading), *changed])
        self._lively = {}
        opens: list[VersionMoved] = []
        others: list[VersionMoved] = []
        for name in at_work:
            version = known[name]
            state = self._state(name, version.state, loading)
            if state not in (VersionState.SPARE, VersionState.GONE):
                self._lively[name] = None
            if state is version.state:
                continue
            way = WAYS[version.state, state]
            moves = [VersionMoved(self.terms.name, name, *step) for step in pairwise(way)]
            (opens if state is VersionState.OPEN else others).extend(moves)
            version.state, version.since = state, now
            self._gone.pop(name, None)
            if state is VersionState.GONE:
                self._gone[name] = None
        return opens + others if self.terms.transition is Transition.AVAILABILITY else others + opens

    def _state(self, name: str, before: VersionState, loading: Set[str]) -> VersionState:
        if name in self._open:
            return VersionState.OPEN
        if name not in self._listed:
            return VersionState.LOADING if name in loading else VersionState.GONE
        wanted = name in self._wanted
        # A version that is undesired and in use when this process first sees it closed earlier.
        closed = before in _CLOSING or (before is VersionState.ABSENT and not wanted)
        if closed and name in self._sight.used:
            return VersionState.DRAINING
        return VersionState.COLD if wanted else VersionState.SPARE

    def _forget(self) -> None:
        for name in list(islice(self._gone, max(0, len(self._gone) - GONE_MOST))):
            del self._gone[name], self._known[name]
        if len(self._namings) + len(self._others) > NAMINGS_MOST:
            served = self._sight.served
            self._namings = {name: each for name, each in self._namings.items() if name in served}
            self._others = set(islice(self._others & served.keys(), NAMINGS_MOST))

    # Internals: texts.

    def _seen(self, version: _Version, labels: Mapping[str, str]) -> VersionSeen:
        name = version.naming.name
        return VersionSeen(
            name=name,
            label=version.naming.label,
            state=version.state,
            since=version.since,
            serving=self._at(name),
            warm=self._warm_at(name),
            wanted=name in self._wanted,
            drained=name in self._drained,
            used=name in self._sight.used,
            weight=self._spread.shares.get(name, 0.0),
            labels=tuple(sorted(label for label, word in labels.items() if word in version.naming.words)),
            words=version.naming.words,
        )

    def _in(self, state: VersionState) -> list[str]:
        return [name for name, version in self._known.items() if version.state is state]

    def _why_not_open(self) -> str:
        """Return which desired versions are not open, or why no version is desired. Empty if all desired
        versions are open."""
        waiting = [name for name in self._wanted if name not in self._open]
        if not self._wanted:
            return self._why_unwanted()
        if waiting and self._blocking:
            return f"{_are(self._blocking, 'drained')} first"
        return _are(waiting, "being warmed up")

    def _why_unwanted(self) -> str:
        asked, label = self._asked(), self.terms.policy.label
        if label and not asked:
            return f"the label {_told(label)} is not set"
        meant = set(self._listed) if asked is None else self._mean(asked)
        if meant and meant <= self._drained:
            return self._why_drained(sorted(meant))
        if asked is None:
            return "the policy asks for no version"
        who, words = f"the label {_told(label)}" if label else "the policy", sorted(asked)
        if label and (by := self._sight.labelled.get(label)):
            who = f"{who}, set {by},"
        are, there = "is" if len(words) == 1 else "are", "is" if len(self._listed) == 1 else "are"
        named, names = _several(map(_told, words)), _several(map(_told, self._listed))
        return f"{who} asks for {named}, which {are} not served: there {there} {names}"

    def _why_drained(self, names: Iterable[str]) -> str:
        """Return who drained the versions and why. Versions with the same reason are listed together."""
        by: dict[str, list[str]] = {}
        for name in names:
            words = self._listed[name].words
            said = next(self._sight.drained[word] for word in words if word in self._sight.drained)
            by.setdefault(said, []).append(name)
        told = [_are(some, f"drained {said or 'by an operator'}") for said, some in by.items()]
        more = len(told) - _WHO_TOLD
        return "; ".join([*told[:_WHO_TOLD], f"and others by {more} more"] if more > 0 else told)


def _told(name: str) -> str:
    return repr(shortened(name, _NAME_CHARS))


def _several(told: Iterable[str]) -> str:
    parts = list(told)
    more = len(parts) - _NAMES_TOLD
    if more > 0:
        return f"{', '.join(parts[:_NAMES_TOLD])} and {more} more"
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _are(names: Iterable[str], what: str) -> str:
    """Return for example "'a' and 'b' are open". Empty if there are no names."""
    told = [_told(name) for name in names]
    return f"{_several(told)} {'is' if len(told) == 1 else 'are'} {what}" if told else ""
