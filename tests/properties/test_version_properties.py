"""The laws of versions, for every history of what is seen and what the operator decides."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.models.rollover import ModelFamily
from dispatcher.core.models.version_policy import VersionPolicy
from dispatcher.core.models.versions import (
    EDGES,
    FamilyTerms,
    Transition,
    VersionFacts,
    VersionSnapshot,
    VersionState,
    VersionStateChange,
    match_version,
)
from dispatcher.core.models.weighted_choice import WeightedChoice, compute_shares

NAMES = ["m-v1", "m-v2", "m-v3", "m-v10", "m", "other"]
ENDPOINTS = ["a", "b"]
WORDS = ["1", "v2", "m-v3", "10", "m", "7", ""]
PATTERNS = [re.compile(r"m-v(?P<version>\d+)"), re.compile(r"m(-v(?P<version>\d))?"), re.compile(".*"), None]

NAME = st.sampled_from(NAMES)
SOME_NAMES = st.frozensets(NAME, max_size=3)
SOME_WORDS = st.frozensets(st.sampled_from(WORDS), max_size=2)
LABELS = st.dictionaries(st.sampled_from(["stable", "next"]), st.sampled_from(WORDS), max_size=2)
SIGHTS = st.builds(
    VersionFacts,
    served=st.dictionaries(NAME, st.frozensets(st.sampled_from(ENDPOINTS), max_size=2), max_size=4),
    loading=SOME_NAMES,
    warm=st.frozensets(st.tuples(NAME, st.sampled_from(ENDPOINTS))),
    used=SOME_NAMES,
    drained=st.one_of(
        st.just(dict[str, str]()), SOME_WORDS.map(lambda words: dict.fromkeys(words, "by ada"))
    ),
    labels=LABELS,
    is_steered=st.booleans(),
)
POLICIES = st.builds(
    VersionPolicy,
    latest=st.sampled_from([1, 1, 2, 0, -1]),
    everything=st.booleans(),
    specific=st.one_of(st.just(()), st.lists(st.sampled_from(WORDS), max_size=2).map(tuple)),
    label=st.sampled_from(["", "", "", "stable"]),
)
WEIGHTS = st.dictionaries(st.sampled_from(WORDS), st.floats(), max_size=3)
TERMS = st.builds(
    FamilyTerms,
    name=st.just("m"),
    match=st.sampled_from([*PATTERNS[:1] * 3, *PATTERNS]),
    policy=POLICIES,
    transition=st.sampled_from(Transition),
    weights=WEIGHTS,
    labels=LABELS,
    has_warm_up=st.booleans(),
)


class Follower:
    """A family, and what can be said of it by what was told alone."""

    def __init__(self, terms: FamilyTerms) -> None:
        self.family = ModelFamily(terms)
        self.now = 0.0
        self.told: dict[str, VersionState] = {}
        self.open: set[str] = set()

    def look(self, sight: VersionFacts) -> None:
        self.now += 1.0
        moved = self.family.apply_facts(sight, self.now)
        seen = {each.name: each for each in self.family.make_snapshots()}
        self._steps_are_told(moved, seen)
        self._states_are_true(sight, seen)
        self._who_opens(sight, seen)
        self._what_follows(sight, seen)
        self.open = {name for name, each in seen.items() if each.state is VersionState.OPEN}

    def _steps_are_told(self, moved: list[VersionStateChange], seen: dict[str, VersionSnapshot]) -> None:
        """In order, along the edges, each from where the one before ended."""
        open_ = set(self.open)
        after = {name for name, each in seen.items() if each.state is VersionState.OPEN}
        for each in moved:
            assert each.previous_state is self.told.get(each.version, VersionState.ABSENT)
            assert each.state in EDGES[each.previous_state]
            self.told[each.version] = each.state
            (open_.add if each.state is VersionState.OPEN else open_.discard)(each.version)
            if self.open and after and self.family.terms.transition is Transition.AVAILABILITY:
                assert open_, "told as if none were open in between"
        assert {name: each.state for name, each in seen.items()} == self.told
        changed = {each.version for each in moved}
        assert {name for name, each in seen.items() if each.state_since == self.now} == changed

    def _states_are_true(self, sight: VersionFacts, seen: dict[str, VersionSnapshot]) -> None:
        terms = self.family.terms
        listed = {name for name, at in sight.served.items() if at and match_version(name, terms) is not None}
        there = (VersionState.COLD, VersionState.OPEN, VersionState.DRAINING, VersionState.RETIRING)
        assert {name for name, each in seen.items() if each.state in there} == listed
        for name, each in seen.items():
            match each.state:
                case VersionState.LOADING:
                    assert name in sight.loading
                case VersionState.COLD:
                    assert each.is_desired
                case VersionState.OPEN:
                    assert not each.is_drained
                case VersionState.DRAINING:
                    assert each.is_used
                case VersionState.RETIRING:
                    assert not each.is_desired
                case VersionState.GONE:
                    assert name not in sight.loading or match_version(name, terms) is None
            assert not (each.is_desired and (each.is_drained or name not in listed))

    def _who_opens(self, sight: VersionFacts, seen: dict[str, VersionSnapshot]) -> None:
        terms = self.family.terms
        open_ = {name for name, each in seen.items() if each.state is VersionState.OPEN}
        wanted = {name for name, each in seen.items() if each.is_desired}
        ready = {
            name
            for name, each in seen.items()
            if each.endpoints
            and not each.is_drained
            and (
                not terms.has_warm_up
                or (each.warm_endpoints if sight.is_steered else each.warm_endpoints == each.endpoints)
            )
        }
        if terms.transition is Transition.AVAILABILITY:
            assert open_ or not ready, "one could be open"
            assert wanted & ready <= open_
            assert not (wanted and wanted <= ready) or open_ == wanted, "the old one is not needed any more"
        else:
            assert open_ <= wanted
            busy = {name for name in sight.used if match_version(name, terms) is not None} - wanted
            assert not busy or open_ <= self.open, "opened while another version drains"
            assert busy or wanted & ready <= open_
        assert open_ <= ready | self.open

    def _what_follows(self, sight: VersionFacts, seen: dict[str, VersionSnapshot]) -> None:
        family = self.family
        open_ = {name for name, each in seen.items() if each.state is VersionState.OPEN}
        chosen = {family.choose_version(str(key)) for key in range(8)}
        assert chosen <= open_ if open_ else chosen == {None}
        assert chosen == {family.choose_version(str(key)) for key in range(8)}
        assert bool(family.explain_closed()) is not bool(open_)
        assert family.describe_state().isprintable()
        assert family.describe_state()
        for name, each in seen.items():
            assert family.list_warm_endpoints(name) == (
                each.warm_endpoints if family.terms.has_warm_up else frozenset()
            )
            nowhere = family.terms.has_warm_up and not each.warm_endpoints
            stays = family.terms.transition is Transition.AVAILABILITY and each.endpoints and not nowhere
            assert family.can_keep(name) is bool(name in open_ or (stays and not each.is_drained))
            assert name not in open_ or not nowhere
            assert family.is_open(name) is (name in open_)
        self._who_goes_by_its_own_name(sight, seen, open_)
        assert set(family.list_keepable()) == {name for name in seen if family.can_keep(name)}
        assert not family.can_keep("of another model")
        cold = family.list_cold_endpoints()
        assert len(set(cold)) == len(cold)
        for name, endpoint in cold:
            assert endpoint in seen[name].endpoints - seen[name].warm_endpoints
            assert seen[name].is_desired or name in open_
        assert cold == sorted(cold, key=lambda each: not seen[each[0]].is_desired), "wanted ones first"

    def _who_goes_by_its_own_name(
        self, sight: VersionFacts, seen: dict[str, VersionSnapshot], open_: set[str]
    ) -> None:
        """Where resources are kept nothing begins that something else waits for the end of, nor beside it."""
        family = self.family
        wanted = {name for name, each in seen.items() if each.is_desired}
        busy = {name for name in sight.used if match_version(name, family.terms) is not None} - wanted
        for name in seen:
            why = family.explain_wait(name)
            assert why.isprintable()
            if family.terms.transition is Transition.AVAILABILITY or name in open_:
                assert not why
            else:
                assert bool(why) is bool(busy if name in wanted else wanted - open_)
            waits_for = family.terms.transition is Transition.RESOURCE and name in busy
            assert family.is_blocked_by(name) is waits_for


@pytest.mark.timeout(900)  # with thousands of examples on a busy machine
@given(TERMS, st.lists(st.one_of(SIGHTS, SIGHTS, SIGHTS, TERMS), max_size=12))
def test_laws_hold_over_every_history(terms: FamilyTerms, history: list[VersionFacts | FamilyTerms]) -> None:
    follower = Follower(terms)
    for step in history:
        if isinstance(step, FamilyTerms):
            follower.family.reconfigure(step)
        else:
            follower.look(step)


@pytest.mark.timeout(900)  # with thousands of examples on a busy machine
@given(TERMS, st.lists(SIGHTS, min_size=1, max_size=6))
def test_what_is_wanted_opens_in_the_end(terms: FamilyTerms, history: list[VersionFacts]) -> None:
    """Once what is to be warmed is warm and what is to be drained is drained, exactly the wanted are open;
    others where none is wanted, under availability alone."""
    follower = Follower(terms)
    for sight in history:
        follower.look(sight)
    sight, family = replace(history[-1], used=frozenset()), follower.family
    follower.look(sight)
    for _ in range(2):
        sight = replace(sight, warm={*sight.warm, *family.list_cold_endpoints()})
        follower.look(sight)
    assert family.list_cold_endpoints() == []
    wanted = {each.name for each in family.make_snapshots() if each.is_desired}
    if wanted:
        assert follower.open == wanted
    elif terms.transition is Transition.RESOURCE:
        assert follower.open == set()


@given(TERMS, st.lists(st.tuples(st.text(), st.booleans()), max_size=20), st.text())
def test_no_name_is_too_strange(terms: FamilyTerms, names: list[tuple[str, bool]], key: str) -> None:
    follower = Follower(replace(terms, match=re.compile("(?s:.*?)(?P<version>[0-9٣x]*)")))
    served = {name: frozenset({"a"}) for name, _ in names}
    used = frozenset(name for name, is_used in names if is_used)
    follower.look(VersionFacts(served, used=used, warm={(name, "a") for name in used}))
    follower.look(VersionFacts({}, loading=used, drained=dict.fromkeys(used, key)))
    assert follower.family.choose_version(key) is None


SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 1), min_size=1)
KEYS = [f"key-{number}" for number in range(10_000)]


def chosen(weights: dict[str, float], keys: list[str] = KEYS) -> dict[str, str | None]:
    spread = WeightedChoice(compute_shares({name: (name,) for name in weights}, weights))
    return {key: spread.choose_name(key) for key in keys}


def test_shares_follow_weights() -> None:
    """Within three standard deviations, which a fixed set of keys is or is not for good."""
    for weights in ({"a": 1.0, "b": 1.0}, {"a": 0.95, "v3": 0.05}, {"a": 0.2, "b": 0.3, "c": 0.5}):
        counts, total = Counter(chosen(weights).values()), sum(weights.values())
        for name, weight in weights.items():
            share = weight / total
            assert abs(counts[name] - share * len(KEYS)) < 3 * sqrt(len(KEYS) * share * (1 - share))


@given(SHARES, st.floats(0.05, 1))
def test_what_opens_takes_from_others_and_moves_nothing_between_them(
    weights: dict[str, float], weight: float
) -> None:
    keys = KEYS[:100]
    before, after = chosen(weights, keys), chosen({**weights, "new": weight}, keys)
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if after[key] == "new"}


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(), max_size=4), st.sets(st.sampled_from("abcdef"))
)
def test_shares_are_shares(weights: dict[str, float], names: set[str]) -> None:
    found = compute_shares({name: (name,) for name in sorted(names)}, weights)
    assert found.keys() == names
    assert all(0 <= share <= 1 for share in found.values())
    assert not names or abs(sum(found.values()) - 1) < 1e-9
    assert (WeightedChoice(found).choose_name("key") or "") in (names or {""})
