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

from dispatcher.common.printable import truncate_text
from dispatcher.features.models.versions import (
    STATE_PATHS,
    FamilyTerms,
    Transition,
    VersionFacts,
    VersionNaming,
    VersionSnapshot,
    VersionState,
    VersionStateChange,
    match_version,
)
from dispatcher.features.models.weighted_choice import WeightedChoice, compute_shares

MAX_GONE_VERSIONS = 1000
"""Largest number of remembered versions that are gone. Those that went last are kept."""
MAX_KNOWN_NAMES = 20_000
"""Largest number of names for which a family remembers whether they match."""
_CLOSING = (VersionState.OPEN, VersionState.DRAINING)
_MAX_NAMES_SHOWN, _MAX_NAME_CHARS, _MAX_REASONS_SHOWN = 5, 100, 3


@dataclass(slots=True)
class _Version:
    naming: VersionNaming
    state_since: float
    state: VersionState = VersionState.ABSENT


class ModelFamily:
    """Versions of one model. Its size is bounded, whatever names are listed, and it never raises."""

    def __init__(self, terms: FamilyTerms) -> None:
        self.terms = terms
        self._next_terms = terms
        self._namings: dict[str, VersionNaming] = {}
        """Parsed names of versions of this model, by name."""
        self._unmatched_names: set[str] = set()
        """Names that are no versions of this model."""
        self._facts = VersionFacts({})
        self._known: dict[str, _Version] = {}
        self._gone: dict[str, None] = {}
        """Versions of `_known` that are gone, those that went last at the end."""
        self._listed: dict[str, VersionNaming] = {}
        """Listed versions, the newest first. The following collections have the same order."""
        self._drained: set[str] = set()
        self._desired: dict[str, None] = {}
        self._open: dict[str, None] = {}
        self._blocking: list[str] = []
        """Versions that must have nothing in flight before another version opens. Only for transition
        `resource`."""
        self._active: dict[str, None] = {}
        """Versions that are neither retiring nor gone."""
        self._warm_endpoints: dict[str, frozenset[str]] = {}
        self._keepable: list[str] | None = None
        self._choice = WeightedChoice({})

    # Observations.

    def reconfigure(self, terms: FamilyTerms) -> None:
        """Keep these settings for the next call of `apply_facts`."""
        self._next_terms = terms

    def apply_facts(self, facts: VersionFacts, now: float) -> list[VersionStateChange]:
        """Apply new facts. Return each new state of each version, in order.

        For transition `availability`, versions that open come before versions that close; for `resource`
        after them.
        """
        previous = self._listed
        if (self._next_terms.name, self._next_terms.template) != (self.terms.name, self.terms.template):
            self._namings, self._unmatched_names, self._listed = {}, set(), {}
        self.terms, self._facts, self._warm_endpoints, self._keepable = self._next_terms, facts, {}, None
        self._listed = self._order_listed()
        self._drained = self._match_aliases(facts.drained.keys()) if facts.drained else set()
        self._desired = dict.fromkeys(self._select_desired())
        self._blocking = []
        if self.terms.transition is Transition.RESOURCE:
            self._blocking = sorted(self._match_names(facts.used) - self._desired.keys())
        to_open = self._select_open()
        self._open = {name: None for name in self._listed if name in to_open}
        aliases = {name: self._listed[name].aliases for name in self._open}
        self._choice = WeightedChoice(compute_shares(aliases, self.terms.weights))
        changes = self._change_states(previous, now)
        self._forget_gone()
        return changes

    # Decisions about work.

    def choose_version(self, key: str) -> str | None:
        """Return the version to which work with this key is sent. `None` if none is open; `explain_closed`
        says why."""
        return self._choice.choose_name(key)

    def can_keep(self, version: str) -> bool:
        """Return whether work that was assigned to this version may still be sent to it: until the version is
        drained or gone."""
        if self.is_open(version):
            return True
        # With transition `resource` a version must be emptied, so it does not keep work that was assigned to
        # it.
        if self.terms.transition is Transition.RESOURCE or version not in self._listed:
            return False
        return version not in self._drained and (
            not self.terms.has_warm_up or bool(self._get_warm_endpoints(version))
        )

    def list_keepable(self) -> Sequence[str]:
        """Return the versions for which `can_keep` is true, newest first. The list is the same until new
        facts are applied."""
        if self._keepable is None:
            self._keepable = [name for name in self._listed if self.can_keep(name)]
        return self._keepable

    def is_open(self, version: str) -> bool:
        """Return whether new work is sent to the version."""
        return version in self._open

    def explain_wait(self, version: str) -> str:
        """Return why work that names this version must wait, as the continuation of a sentence. Empty if it
        need not wait."""
        if self.terms.transition is not Transition.RESOURCE or self.is_open(version):
            return ""
        if version in self._desired:
            return f"waits until {_describe_names(self._blocking, 'drained')}" if self._blocking else ""
        # Otherwise requests that name the old version could keep it in use, and the new one closed, for ever.
        opening = _join_names([_quote_name(name) for name in self._desired if name not in self._open])
        return f"waits for {opening}" if opening else ""

    def is_blocked_by(self, version: str) -> bool:
        """Return whether another version opens once nothing is in flight to this one."""
        return version in self._blocking

    @property
    def has_open_version(self) -> bool:
        return bool(self._open)

    @property
    def has_listed_version(self) -> bool:
        return bool(self._listed)

    def list_warm_endpoints(self, version: str) -> frozenset[str]:
        """Return the endpoints at which the version is warm. Empty if any endpoint will do, or if it is warm
        nowhere."""
        return self._get_warm_endpoints(version) if self.terms.has_warm_up else frozenset()

    def list_cold_endpoints(self) -> list[tuple[str, str]]:
        """Return versions and endpoints to be warmed now: desired versions first, then others, each group
        newest first."""
        if not self.terms.has_warm_up:
            return []
        # While an undesired version is in use, only versions that are open already are warmed at further
        # endpoints.
        names = [name for name in self._desired if not self._blocking or name in self._open]
        names += [name for name in self._open if name not in self._desired]
        return [
            (name, endpoint)
            for name in names
            for endpoint in sorted(self._get_endpoints(name) - self._get_warm_endpoints(name))
        ]

    # Descriptions.

    def make_snapshots(self) -> list[VersionSnapshot]:
        """Return all versions that are or were there, newest first."""
        known = sorted(self._known.values(), key=lambda each: each.naming.order, reverse=True)
        labels = self._merge_labels()
        return [self._make_snapshot(each, labels) for each in known]

    def explain_closed(self) -> str:
        """Return one sentence for a request that has to wait. Empty if it need not wait."""
        if self._open:
            return ""
        if self._listed:
            return self._explain_not_open()
        loading = _describe_names(self._list_in_state(VersionState.LOADING), "being loaded")
        return loading or f"no version of {_quote_name(self.terms.name)} is served"

    def describe_state(self) -> str:
        if not self._open:
            return self.explain_closed()
        parts = sorted(self._choice.shares.items(), key=lambda each: -each[1])
        if len(parts) == 1:
            open_ = _describe_names(self._open, "open")
        else:
            open_ = (
                f"open are {_join_names([f'{_quote_name(name)} with {share:.1%}' for name, share in parts])}"
            )
        cold = [
            name
            for name in self._open
            if self.terms.has_warm_up and self._get_endpoints(name) != self._get_warm_endpoints(name)
        ]
        sent_to_cold = (
            ""
            if self._facts.is_steered
            else _describe_names(cold, "also sent to endpoints that are not warm yet")
        )
        draining = _describe_names(self._list_in_state(VersionState.DRAINING), "draining")
        return "; ".join(filter(None, [open_, sent_to_cold, self._explain_not_open(), draining]))

    # Internals: which versions there are, and which of them are desired and open.

    def _match_names(self, names: Set[str]) -> set[str]:
        for name in names - self._namings.keys() - self._unmatched_names:
            naming = match_version(name, self.terms)
            if naming is None:
                self._unmatched_names.add(name)
            else:
                self._namings[name] = naming
        return names & self._namings.keys()

    def _order_listed(self) -> dict[str, VersionNaming]:
        """Return the listed versions in order. Versions that were listed before keep their order, so that
        sorting is cheap."""
        served, previous = self._facts.served, self._listed
        names = {name for name in self._match_names(served.keys()) if served[name]}
        # The same object tells callers that nothing has changed.
        if names == previous.keys():
            return previous
        added = names - previous.keys()
        namings = [self._namings[name] for name in (*added, *(name for name in previous if name in names))]
        namings.sort(key=lambda each: each.order, reverse=True)
        return {each.name: each for each in namings}

    def _match_aliases(self, words: Set[str]) -> set[str]:
        return {name for name, each in self._listed.items() if not words.isdisjoint(each.aliases)}

    def _merge_labels(self) -> dict[str, str]:
        return {**self.terms.labels, **self._facts.labels}

    def _get_policy_words(self) -> frozenset[str] | None:
        """Return the words that the policy selects versions by. `None` if it selects by age, or all."""
        policy = self.terms.policy
        if policy.label:
            return frozenset(filter(None, [self._merge_labels().get(policy.label)]))
        return frozenset(policy.specific) if policy.specific else None

    def _select_desired(self) -> list[str]:
        candidates = [name for name in self._listed if name not in self._drained]
        policy_words = self._get_policy_words()
        if policy_words is not None:
            return [name for name in candidates if not policy_words.isdisjoint(self._listed[name].aliases)]
        return candidates if self.terms.policy.everything else candidates[: max(0, self.terms.policy.latest)]

    def _select_open(self) -> set[str]:
        ready = {name for name in self._desired if self._is_ready(name)}
        if self.terms.transition is Transition.RESOURCE:
            # Nothing new opens while an undesired version is in use.
            return ready & self._open.keys() if self._blocking else ready
        if len(ready) < len(self._desired) or not self._desired:
            still_open = (name for name in self._open if name in self._listed and name not in self._drained)
            ready.update(name for name in still_open if self._is_ready(name))
        if not ready:
            candidates = (name for name in self._listed if name not in self._drained and self._is_ready(name))
            # No desired version is ready: the newest ready version is better than none.
            ready.update(islice(candidates, 1))
        return ready

    def _is_ready(self, name: str) -> bool:
        if not self.terms.has_warm_up:
            return True
        warm = self._get_warm_endpoints(name)
        # Without confinement the picker may choose any endpoint, so all must be warm before the version
        # opens.
        return (
            bool(warm) if self._facts.is_steered or name in self._open else warm == self._get_endpoints(name)
        )

    def _get_endpoints(self, name: str) -> frozenset[str]:
        return self._facts.served[name] if name in self._listed else frozenset()

    def _get_warm_endpoints(self, name: str) -> frozenset[str]:
        if name not in self._warm_endpoints and name in self._listed:
            marks = self._facts.warm
            self._warm_endpoints[name] = frozenset(
                [endpoint for endpoint in self._get_endpoints(name) if (name, endpoint) in marks]
            )
        return self._warm_endpoints.get(name, frozenset())

    # Internals: states.

    def _change_states(self, previous: Mapping[str, VersionNaming], now: float) -> list[VersionStateChange]:
        known, listed = self._known, self._listed
        loading = self._match_names(self._facts.loading)
        if listed is not previous:
            for name, naming in listed.items():
                known.setdefault(name, _Version(naming, now)).naming = naming
        for name in sorted(loading - known.keys()):
            known[name] = _Version(self._namings[name], now)
        # Most versions are retiring or gone and stay so, so only candidates for a change are visited.
        changed = sorted(listed.keys() ^ previous.keys(), reverse=True)
        candidates = dict.fromkeys([*self._active, *self._open, *self._desired, *sorted(loading), *changed])
        self._active = {}
        opening: list[VersionStateChange] = []
        other_changes: list[VersionStateChange] = []
        for name in candidates:
            version = known[name]
            state = self._compute_state(name, version.state, loading)
            if state not in (VersionState.RETIRING, VersionState.GONE):
                self._active[name] = None
            if state is version.state:
                continue
            path = STATE_PATHS[version.state, state]
            changes = [VersionStateChange(self.terms.name, name, *step) for step in pairwise(path)]
            (opening if state is VersionState.OPEN else other_changes).extend(changes)
            version.state, version.state_since = state, now
            self._gone.pop(name, None)
            if state is VersionState.GONE:
                self._gone[name] = None
        return (
            opening + other_changes
            if self.terms.transition is Transition.AVAILABILITY
            else other_changes + opening
        )

    def _compute_state(self, name: str, previous_state: VersionState, loading: Set[str]) -> VersionState:
        if name in self._open:
            return VersionState.OPEN
        if name not in self._listed:
            return VersionState.LOADING if name in loading else VersionState.GONE
        is_desired = name in self._desired
        # A version that is undesired and in use when this process first sees it closed earlier.
        has_closed = previous_state in _CLOSING or (previous_state is VersionState.ABSENT and not is_desired)
        if has_closed and name in self._facts.used:
            return VersionState.DRAINING
        return VersionState.COLD if is_desired else VersionState.RETIRING

    def _forget_gone(self) -> None:
        for name in list(islice(self._gone, max(0, len(self._gone) - MAX_GONE_VERSIONS))):
            del self._gone[name], self._known[name]
        if len(self._namings) + len(self._unmatched_names) > MAX_KNOWN_NAMES:
            served = self._facts.served
            self._namings = {name: each for name, each in self._namings.items() if name in served}
            self._unmatched_names = set(islice(self._unmatched_names & served.keys(), MAX_KNOWN_NAMES))

    # Internals: texts.

    def _make_snapshot(self, version: _Version, labels: Mapping[str, str]) -> VersionSnapshot:
        name = version.naming.name
        return VersionSnapshot(
            name=name,
            label=version.naming.label,
            state=version.state,
            state_since=version.state_since,
            endpoints=self._get_endpoints(name),
            warm_endpoints=self._get_warm_endpoints(name),
            is_desired=name in self._desired,
            is_drained=name in self._drained,
            is_used=name in self._facts.used,
            weight=self._choice.shares.get(name, 0.0),
            labels=tuple(sorted(label for label, word in labels.items() if word in version.naming.aliases)),
            aliases=version.naming.aliases,
        )

    def _list_in_state(self, state: VersionState) -> list[str]:
        return [name for name, version in self._known.items() if version.state is state]

    def _explain_not_open(self) -> str:
        """Return which desired versions are not open, or why no version is desired. Empty if all desired
        versions are open."""
        waiting = [name for name in self._desired if name not in self._open]
        if not self._desired:
            return self._explain_none_desired()
        if waiting and self._blocking:
            return f"{_describe_names(self._blocking, 'drained')} first"
        return _describe_names(waiting, "being warmed up")

    def _explain_none_desired(self) -> str:
        policy_words, label = self._get_policy_words(), self.terms.policy.label
        if label and not policy_words:
            return f"the label {_quote_name(label)} is not set"
        matching = set(self._listed) if policy_words is None else self._match_aliases(policy_words)
        if matching and matching <= self._drained:
            return self._explain_drained(sorted(matching))
        if policy_words is None:
            return "the policy asks for no version"
        who, words = f"the label {_quote_name(label)}" if label else "the policy", sorted(policy_words)
        if label and (origin := self._facts.label_origins.get(label)):
            who = f"{who}, set {origin},"
        verb, there_are = "is" if len(words) == 1 else "are", "is" if len(self._listed) == 1 else "are"
        named, names = _join_names(map(_quote_name, words)), _join_names(map(_quote_name, self._listed))
        return f"{who} asks for {named}, which {verb} not served: there {there_are} {names}"

    def _explain_drained(self, names: Iterable[str]) -> str:
        """Return who drained the versions and why. Versions with the same reason are listed together."""
        names_by_reason: dict[str, list[str]] = {}
        for name in names:
            words = self._listed[name].aliases
            reason = next(self._facts.drained[word] for word in words if word in self._facts.drained)
            names_by_reason.setdefault(reason, []).append(name)
        descriptions = [
            _describe_names(some, f"drained {reason or 'by an operator'}")
            for reason, some in names_by_reason.items()
        ]
        more = len(descriptions) - _MAX_REASONS_SHOWN
        return "; ".join(
            [*descriptions[:_MAX_REASONS_SHOWN], f"and others by {more} more"] if more > 0 else descriptions
        )


def _quote_name(name: str) -> str:
    return repr(truncate_text(name, _MAX_NAME_CHARS))


def _join_names(quoted_names: Iterable[str]) -> str:
    parts = list(quoted_names)
    more = len(parts) - _MAX_NAMES_SHOWN
    if more > 0:
        return f"{', '.join(parts[:_MAX_NAMES_SHOWN])} and {more} more"
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _describe_names(names: Iterable[str], what: str) -> str:
    """Return for example "'a' and 'b' are open". Empty if there are no names."""
    quoted_names = [_quote_name(name) for name in names]
    return (
        f"{_join_names(quoted_names)} {'is' if len(quoted_names) == 1 else 'are'} {what}"
        if quoted_names
        else ""
    )
