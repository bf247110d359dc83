"""Properties of model versions in every history of facts and settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.models.rollover import ModelFamily
from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.features.models.versions import (
    EDGES,
    FamilyTerms,
    Transition,
    VersionFacts,
    VersionSnapshot,
    VersionState,
    VersionStateChange,
    match_version,
)
from dispatcher.features.models.weighted_choice import WeightedChoice, compute_shares

NAMES = ["m-v1", "m-v2", "m-v3", "m-v10", "m", "other"]
ENDPOINTS = ["a", "b"]
ALIASES = ["1", "v2", "m-v3", "10", "m", "7", ""]
TEMPLATES = [VersionTemplate("m-v"), VersionTemplate("m-", "1"), VersionTemplate(""), None]

NAME = st.sampled_from(NAMES)
SOME_NAMES = st.frozensets(NAME, max_size=3)
SOME_ALIASES = st.frozensets(st.sampled_from(ALIASES), max_size=2)
LABELS = st.dictionaries(st.sampled_from(["stable", "next"]), st.sampled_from(ALIASES), max_size=2)
FACTS = st.builds(
    VersionFacts,
    served=st.dictionaries(NAME, st.frozensets(st.sampled_from(ENDPOINTS), max_size=2), max_size=4),
    loading=SOME_NAMES,
    warm=st.frozensets(st.tuples(NAME, st.sampled_from(ENDPOINTS))),
    used=SOME_NAMES,
    drained=st.one_of(
        st.just(dict[str, str]()), SOME_ALIASES.map(lambda aliases: dict.fromkeys(aliases, "by ada"))
    ),
    labels=LABELS,
    is_steered=st.booleans(),
)
POLICIES = st.builds(
    VersionPolicy,
    latest=st.sampled_from([1, 1, 2, 0, -1]),
    everything=st.booleans(),
    specific=st.one_of(st.just(()), st.lists(st.sampled_from(ALIASES), max_size=2).map(tuple)),
    label=st.sampled_from(["", "", "", "stable"]),
)
WEIGHTS = st.dictionaries(st.sampled_from(ALIASES), st.floats(), max_size=3)
TERMS = st.builds(
    FamilyTerms,
    name=st.just("m"),
    template=st.sampled_from([*TEMPLATES[:1] * 3, *TEMPLATES]),
    policy=POLICIES,
    transition=st.sampled_from(Transition),
    weights=WEIGHTS,
    labels=LABELS,
    has_warm_up=st.booleans(),
)


class FamilyChecker:
    """Model family that is checked after each change, with the states that its reports imply."""

    def __init__(self, terms: FamilyTerms) -> None:
        self.family = ModelFamily(terms)
        self.now = 0.0
        self.reported_states: dict[str, VersionState] = {}
        self.open_versions: set[str] = set()

    def apply_facts(self, facts: VersionFacts) -> None:
        self.now += 1.0
        changes = self.family.apply_facts(facts, self.now)
        snapshots = {each.name: each for each in self.family.make_snapshots()}
        self._check_reported_changes(changes, snapshots)
        self._check_states(facts, snapshots)
        self._check_open_versions(facts, snapshots)
        self._check_decisions(facts, snapshots)
        self.open_versions = {name for name, each in snapshots.items() if each.state is VersionState.OPEN}

    def _check_reported_changes(
        self, changes: list[VersionStateChange], snapshots: dict[str, VersionSnapshot]
    ) -> None:
        """Check that changes are reported in order and along the edges."""
        open_versions = set(self.open_versions)
        open_after = {name for name, each in snapshots.items() if each.state is VersionState.OPEN}
        for each in changes:
            assert each.previous_state is self.reported_states.get(each.version, VersionState.ABSENT)
            assert each.state in EDGES[each.previous_state]
            self.reported_states[each.version] = each.state
            (open_versions.add if each.state is VersionState.OPEN else open_versions.discard)(each.version)
            if self.open_versions and open_after and self.family.terms.transition is Transition.AVAILABILITY:
                assert open_versions, "the reports leave no version open in between"
        assert {name: each.state for name, each in snapshots.items()} == self.reported_states
        changed = {each.version for each in changes}
        assert {name for name, each in snapshots.items() if each.state_since == self.now} == changed

    def _check_states(self, facts: VersionFacts, snapshots: dict[str, VersionSnapshot]) -> None:
        terms = self.family.terms
        listed = {name for name, at in facts.served.items() if at and match_version(name, terms) is not None}
        listed_states = (VersionState.COLD, VersionState.OPEN, VersionState.DRAINING, VersionState.RETIRING)
        assert {name for name, each in snapshots.items() if each.state in listed_states} == listed
        for name, each in snapshots.items():
            match each.state:
                case VersionState.LOADING:
                    assert name in facts.loading
                case VersionState.COLD:
                    assert each.is_desired
                case VersionState.OPEN:
                    assert not each.is_drained
                case VersionState.DRAINING:
                    assert each.is_used
                case VersionState.RETIRING:
                    assert not each.is_desired
                case VersionState.GONE:
                    assert name not in facts.loading or match_version(name, terms) is None
            assert not (each.is_desired and (each.is_drained or name not in listed))

    def _check_open_versions(self, facts: VersionFacts, snapshots: dict[str, VersionSnapshot]) -> None:
        terms = self.family.terms
        open_versions = {name for name, each in snapshots.items() if each.state is VersionState.OPEN}
        desired = {name for name, each in snapshots.items() if each.is_desired}
        ready = {
            name
            for name, each in snapshots.items()
            if each.endpoints
            and not each.is_drained
            and (
                not terms.has_warm_up
                or (each.warm_endpoints if facts.is_steered else each.warm_endpoints == each.endpoints)
            )
        }
        if terms.transition is Transition.AVAILABILITY:
            assert open_versions or not ready, "no version is open although one is ready"
            assert desired & ready <= open_versions
            assert not (desired and desired <= ready) or open_versions == desired, (
                "the old version is still open although all desired ones are ready"
            )
        else:
            assert open_versions <= desired
            blocking = {name for name in facts.used if match_version(name, terms) is not None} - desired
            assert not blocking or open_versions <= self.open_versions, (
                "a version opened while another one drains"
            )
            assert blocking or desired & ready <= open_versions
        assert open_versions <= ready | self.open_versions

    def _check_decisions(self, facts: VersionFacts, snapshots: dict[str, VersionSnapshot]) -> None:
        family = self.family
        open_versions = {name for name, each in snapshots.items() if each.state is VersionState.OPEN}
        chosen = {family.choose_version(str(key)) for key in range(8)}
        assert chosen <= open_versions if open_versions else chosen == {None}
        assert chosen == {family.choose_version(str(key)) for key in range(8)}
        assert bool(family.explain_closed()) is not bool(open_versions)
        assert family.describe_state().isprintable()
        assert family.describe_state()
        for name, each in snapshots.items():
            assert family.list_warm_endpoints(name) == (
                each.warm_endpoints if family.terms.has_warm_up else frozenset()
            )
            is_warm_nowhere = family.terms.has_warm_up and not each.warm_endpoints
            is_kept = (
                family.terms.transition is Transition.AVAILABILITY and each.endpoints and not is_warm_nowhere
            )
            assert family.can_keep(name) is bool(name in open_versions or (is_kept and not each.is_drained))
            assert name not in open_versions or not is_warm_nowhere
            assert family.is_open(name) is (name in open_versions)
        self._check_requests_that_name_a_version(facts, snapshots, open_versions)
        assert set(family.list_keepable()) == {name for name in snapshots if family.can_keep(name)}
        assert not family.can_keep("of another model")
        cold = family.list_cold_endpoints()
        assert len(set(cold)) == len(cold)
        for name, endpoint in cold:
            assert endpoint in snapshots[name].endpoints - snapshots[name].warm_endpoints
            assert snapshots[name].is_desired or name in open_versions
        assert cold == sorted(cold, key=lambda each: not snapshots[each[0]].is_desired), (
            "desired versions come first"
        )

    def _check_requests_that_name_a_version(
        self, facts: VersionFacts, snapshots: dict[str, VersionSnapshot], open_versions: set[str]
    ) -> None:
        """Check that with `resource` no request delays a version that others wait for, or runs beside it."""
        family = self.family
        desired = {name for name, each in snapshots.items() if each.is_desired}
        blocking = {name for name in facts.used if match_version(name, family.terms) is not None} - desired
        for name in snapshots:
            why = family.explain_wait(name)
            assert why.isprintable()
            if family.terms.transition is Transition.AVAILABILITY or name in open_versions:
                assert not why
            else:
                assert bool(why) is bool(blocking if name in desired else desired - open_versions)
            is_blocking = family.terms.transition is Transition.RESOURCE and name in blocking
            assert family.is_blocked_by(name) is is_blocking


@pytest.mark.timeout(900)  # with thousands of examples on a busy machine
@given(TERMS, st.lists(st.one_of(FACTS, FACTS, FACTS, TERMS), max_size=12))
def test_states_and_decisions_are_consistent_in_every_history(
    terms: FamilyTerms, history: list[VersionFacts | FamilyTerms]
) -> None:
    checker = FamilyChecker(terms)
    for step in history:
        if isinstance(step, FamilyTerms):
            checker.family.reconfigure(step)
        else:
            checker.apply_facts(step)


@pytest.mark.timeout(900)  # with thousands of examples on a busy machine
@given(TERMS, st.lists(FACTS, min_size=1, max_size=6))
def test_desired_versions_are_open_in_the_end(terms: FamilyTerms, history: list[VersionFacts]) -> None:
    """Once all cold endpoints are warm and nothing is in flight, exactly the desired versions are open.

    If none is desired, others may be open, but only with `availability`.
    """
    checker = FamilyChecker(terms)
    for facts in history:
        checker.apply_facts(facts)
    facts, family = replace(history[-1], used=frozenset()), checker.family
    checker.apply_facts(facts)
    for _ in range(2):
        facts = replace(facts, warm={*facts.warm, *family.list_cold_endpoints()})
        checker.apply_facts(facts)
    assert family.list_cold_endpoints() == []
    desired = {each.name for each in family.make_snapshots() if each.is_desired}
    if desired:
        assert checker.open_versions == desired
    elif terms.transition is Transition.RESOURCE:
        assert checker.open_versions == set()


@given(TERMS, st.lists(st.tuples(st.text(), st.booleans()), max_size=20), st.text())
def test_any_name_is_accepted_without_an_error(
    terms: FamilyTerms, names: list[tuple[str, bool]], key: str
) -> None:
    checker = FamilyChecker(replace(terms, template=VersionTemplate("")))
    served = {name: frozenset({"a"}) for name, _ in names}
    used = frozenset(name for name, is_used in names if is_used)
    checker.apply_facts(VersionFacts(served, used=used, warm={(name, "a") for name in used}))
    checker.apply_facts(VersionFacts({}, loading=used, drained=dict.fromkeys(used, key)))
    assert checker.family.choose_version(key) is None


WEIGHTS_BY_NAME = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 1), min_size=1)
KEYS = [f"key-{number}" for number in range(10_000)]


def choose_for_keys(weights: dict[str, float], keys: list[str] = KEYS) -> dict[str, str | None]:
    choice = WeightedChoice(compute_shares({name: (name,) for name in weights}, weights))
    return {key: choice.choose_name(key) for key in keys}


def test_choices_are_distributed_by_the_weights() -> None:
    """The counts are within three standard deviations, always for the same keys."""
    for weights in ({"a": 1.0, "b": 1.0}, {"a": 0.95, "v3": 0.05}, {"a": 0.2, "b": 0.3, "c": 0.5}):
        counts, total = Counter(choose_for_keys(weights).values()), sum(weights.values())
        for name, weight in weights.items():
            share = weight / total
            assert abs(counts[name] - share * len(KEYS)) < 3 * sqrt(len(KEYS) * share * (1 - share))


@given(WEIGHTS_BY_NAME, st.floats(0.05, 1))
def test_new_version_takes_keys_from_others_and_moves_none_between_them(
    weights: dict[str, float], weight: float
) -> None:
    keys = KEYS[:100]
    before, after = choose_for_keys(weights, keys), choose_for_keys({**weights, "new": weight}, keys)
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if after[key] == "new"}


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(), max_size=4), st.sets(st.sampled_from("abcdef"))
)
def test_shares_are_between_0_and_1_and_sum_to_1(weights: dict[str, float], names: set[str]) -> None:
    shares = compute_shares({name: (name,) for name in sorted(names)}, weights)
    assert shares.keys() == names
    assert all(0 <= share <= 1 for share in shares.values())
    assert not names or abs(sum(shares.values()) - 1) < 1e-9
    assert (WeightedChoice(shares).choose_name("key") or "") in (names or {""})
