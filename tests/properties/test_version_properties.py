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
    VersionMoved,
    VersionSeen,
    VersionSight,
    VersionState,
    naming_of,
)
from dispatcher.core.models.weighted_choice import Spread, shares

NAMES = ["m-v1", "m-v2", "m-v3", "m-v10", "m", "other"]
ENDPOINTS = ["a", "b"]
WORDS = ["1", "v2", "m-v3", "10", "m", "7", ""]
PATTERNS = [re.compile(r"m-v(?P<version>\d+)"), re.compile(r"m(-v(?P<version>\d))?"), re.compile(".*"), None]

NAME = st.sampled_from(NAMES)
SOME_NAMES = st.frozensets(NAME, max_size=3)
SOME_WORDS = st.frozensets(st.sampled_from(WORDS), max_size=2)
LABELS = st.dictionaries(st.sampled_from(["stable", "next"]), st.sampled_from(WORDS), max_size=2)
SIGHTS = st.builds(
    VersionSight,
    served=st.dictionaries(NAME, st.frozensets(st.sampled_from(ENDPOINTS), max_size=2), max_size=4),
    loading=SOME_NAMES,
    warm=st.frozensets(st.tuples(NAME, st.sampled_from(ENDPOINTS))),
    used=SOME_NAMES,
    drained=st.one_of(
        st.just(dict[str, str]()), SOME_WORDS.map(lambda words: dict.fromkeys(words, "by ada"))
    ),
    labels=LABELS,
    steered=st.booleans(),
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
    warms=st.booleans(),
)


class Follower:
    """A family, and what can be said of it by what was told alone."""

    def __init__(self, terms: FamilyTerms) -> None:
        self.family = ModelFamily(terms)
        self.now = 0.0
        self.told: dict[str, VersionState] = {}
        self.open: set[str] = set()

    def look(self, sight: VersionSight) -> None:
        self.now += 1.0
        moved = self.family.look(sight, self.now)
        seen = {each.name: each for each in self.family.versions()}
        self._steps_are_told(moved, seen)
        self._states_are_true(sight, seen)
        self._who_opens(sight, seen)
        self._what_follows(sight, seen)
        self.open = {name for name, each in seen.items() if each.state is VersionState.OPEN}

    def _steps_are_told(self, moved: list[VersionMoved], seen: dict[str, VersionSeen]) -> None:
        """In order, along the edges, each from where the one before ended."""
        open_ = set(self.open)
        after = {name for name, each in seen.items() if each.state is VersionState.OPEN}
        for each in moved:
            assert each.before is self.told.get(each.version, VersionState.ABSENT)
            assert each.state in EDGES[each.before]
            self.told[each.version] = each.state
            (open_.add if each.state is VersionState.OPEN else open_.discard)(each.version)
            if self.open and after and self.family.terms.transition is Transition.AVAILABILITY:
                assert open_, "told as if none were open in between"
        assert {name: each.state for name, each in seen.items()} == self.told
        changed = {each.version for each in moved}
        assert {name for name, each in seen.items() if each.since == self.now} == changed

    def _states_are_true(self, sight: VersionSight, seen: dict[str, VersionSeen]) -> None:
        terms = self.family.terms
        listed = {name for name, at in sight.served.items() if at and naming_of(name, terms) is not None}
        there = (VersionState.COLD, VersionState.OPEN, VersionState.DRAINING, VersionState.SPARE)
        assert {name for name, each in seen.items() if each.state in there} == listed
        for name, each in seen.items():
            match each.state:
                case VersionState.LOADING:
                    assert name in sight.loading
                case VersionState.COLD:
                    assert each.wanted
                case VersionState.OPEN:
                    assert not each.drained
                case VersionState.DRAINING:
                    assert each.used
                case VersionState.SPARE:
                    assert not each.wanted
                case VersionState.GONE:
                    assert name not in sight.loading or naming_of(name, terms) is None
            assert not (each.wanted and (each.drained or name not in listed))

    def _who_opens(self, sight: VersionSight, seen: dict[str, VersionSeen]) -> None:
        terms = self.family.terms
        open_ = {name for name, each in seen.items() if each.state is VersionState.OPEN}
        wanted = {name for name, each in seen.items() if each.wanted}
        ready = {
            name
            for name, each in seen.items()
            if each.serving
            and not each.drained
            and (not terms.warms or (each.warm if sight.steered else each.warm == each.serving))
        }
        if terms.transition is Transition.AVAILABILITY:
            assert open_ or not ready, "one could be open"
            assert wanted & ready <= open_
            assert not (wanted and wanted <= ready) or open_ == wanted, "the old one is not needed any more"
        else:
            assert open_ <= wanted
            busy = {name for name in sight.used if naming_of(name, terms) is not None} - wanted
            assert not busy or open_ <= self.open, "opened while another version drains"
            assert busy or wanted & ready <= open_
        assert open_ <= ready | self.open

    def _what_follows(self, sight: VersionSight, seen: dict[str, VersionSeen]) -> None:
        family = self.family
        open_ = {name for name, each in seen.items() if each.state is VersionState.OPEN}
        chosen = {family.choose(str(key)) for key in range(8)}
        assert chosen <= open_ if open_ else chosen == {None}
        assert chosen == {family.choose(str(key)) for key in range(8)}
        assert bool(family.why()) is not bool(open_)
        assert family.sentence().isprintable()
        assert family.sentence()
        for name, each in seen.items():
            assert family.endpoints(name) == (each.warm if family.terms.warms else frozenset())
            nowhere = family.terms.warms and not each.warm
            stays = family.terms.transition is Transition.AVAILABILITY and each.serving and not nowhere
            assert family.keeps(name) is bool(name in open_ or (stays and not each.drained))
            assert name not in open_ or not nowhere
            assert family.takes(name) is (name in open_)
        self._who_goes_by_its_own_name(sight, seen, open_)
        assert set(family.kept()) == {name for name in seen if family.keeps(name)}
        assert not family.keeps("of another model")
        cold = family.cold()
        assert len(set(cold)) == len(cold)
        for name, endpoint in cold:
            assert endpoint in seen[name].serving - seen[name].warm
            assert seen[name].wanted or name in open_
        assert cold == sorted(cold, key=lambda each: not seen[each[0]].wanted), "wanted ones first"

    def _who_goes_by_its_own_name(
        self, sight: VersionSight, seen: dict[str, VersionSeen], open_: set[str]
    ) -> None:
        """Where resources are kept nothing begins that something else waits for the end of, nor beside it."""
        family = self.family
        wanted = {name for name, each in seen.items() if each.wanted}
        busy = {name for name in sight.used if naming_of(name, family.terms) is not None} - wanted
        for name in seen:
            why = family.gives_way(name)
            assert why.isprintable()
            if family.terms.transition is Transition.AVAILABILITY or name in open_:
                assert not why
            else:
                assert bool(why) is bool(busy if name in wanted else wanted - open_)
            waits_for = family.terms.transition is Transition.RESOURCE and name in busy
            assert family.waits_for(name) is waits_for


@pytest.mark.timeout(900)  # with thousands of examples on a busy machine
@given(TERMS, st.lists(st.one_of(SIGHTS, SIGHTS, SIGHTS, TERMS), max_size=12))
def test_laws_hold_over_every_history(terms: FamilyTerms, history: list[VersionSight | FamilyTerms]) -> None:
    follower = Follower(terms)
    for step in history:
        if isinstance(step, FamilyTerms):
            follower.family.reconfigure(step)
        else:
            follower.look(step)


@pytest.mark.timeout(900)  # with thousands of examples on a busy machine
@given(TERMS, st.lists(SIGHTS, min_size=1, max_size=6))
def test_what_is_wanted_opens_in_the_end(terms: FamilyTerms, history: list[VersionSight]) -> None:
    """Once what is to be warmed is warm and what is to be drained is drained, exactly the wanted are open;
    others where none is wanted, under availability alone."""
    follower = Follower(terms)
    for sight in history:
        follower.look(sight)
    sight, family = replace(history[-1], used=frozenset()), follower.family
    follower.look(sight)
    for _ in range(2):
        sight = replace(sight, warm={*sight.warm, *family.cold()})
        follower.look(sight)
    assert family.cold() == []
    wanted = {each.name for each in family.versions() if each.wanted}
    if wanted:
        assert follower.open == wanted
    elif terms.transition is Transition.RESOURCE:
        assert follower.open == set()


@given(TERMS, st.lists(st.tuples(st.text(), st.booleans()), max_size=20), st.text())
def test_no_name_is_too_strange(terms: FamilyTerms, names: list[tuple[str, bool]], key: str) -> None:
    follower = Follower(replace(terms, match=re.compile("(?s:.*?)(?P<version>[0-9٣x]*)")))
    served = {name: frozenset({"a"}) for name, _ in names}
    used = frozenset(name for name, is_used in names if is_used)
    follower.look(VersionSight(served, used=used, warm={(name, "a") for name in used}))
    follower.look(VersionSight({}, loading=used, drained=dict.fromkeys(used, key)))
    assert follower.family.choose(key) is None


SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 1), min_size=1)
KEYS = [f"key-{number}" for number in range(10_000)]


def chosen(weights: dict[str, float], keys: list[str] = KEYS) -> dict[str, str | None]:
    spread = Spread(shares({name: (name,) for name in weights}, weights))
    return {key: spread.chosen(key) for key in keys}


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
    found = shares({name: (name,) for name in sorted(names)}, weights)
    assert found.keys() == names
    assert all(0 <= share <= 1 for share in found.values())
    assert not names or abs(sum(found.values()) - 1) < 1e-9
    assert (Spread(found).chosen("key") or "") in (names or {""})
