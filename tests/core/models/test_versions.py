"""Which versions of a model take work: a table of cases, each by its name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from dispatcher.core.models.rollover import MAX_GONE_VERSIONS, MAX_KNOWN_NAMES, ModelFamily
from dispatcher.core.models.version_policy import VersionPolicy
from dispatcher.core.models.versions import (
    STATE_PATHS,
    FamilyIndex,
    FamilyTerms,
    Transition,
    VersionFacts,
    VersionState,
    match_version,
    parse_version,
)
from dispatcher.core.requests.lanes import MAX_MODEL_NAME_BYTES

NUMBERED = re.compile(r"qwen-v(?P<version>\d+)")
RESOURCE = Transition.RESOURCE


def terms(
    policy: VersionPolicy | None = None, match: re.Pattern[str] | None = NUMBERED, **more: Any
) -> FamilyTerms:
    return FamilyTerms("qwen", match, policy or VersionPolicy(), **more)


class Rollout:
    """A family `qwen` of numbered versions, and a pool in words: `v1="a b*"` are the endpoints that list it,
    with a star where it is warm."""

    steered = True

    def __init__(self, policy: VersionPolicy | None = None, **more: Any) -> None:
        self.terms = terms(policy, **more)
        self.family = ModelFamily(self.terms)
        self.now = 0.0
        self.labels: dict[str, str] = {}
        """Set by verbs."""

    def look(self, *used: str, drained: str | Mapping[str, str] = "", by: str = "by ada", **said: str) -> str:
        """What was told, as `v1 open`."""
        self.now += 1.0
        served: dict[str, frozenset[str]] = {}
        warm: set[tuple[str, str]] = set()
        loading = {full(name) for name, words in said.items() if words == "loading"}
        for name, words in said.items():
            if words not in ("loading", ""):
                served[full(name)] = frozenset(word.rstrip("*") for word in words.split())
                warm |= {(full(name), word[:-1]) for word in words.split() if word.endswith("*")}
        moved = self.family.apply_facts(
            VersionFacts(
                served,
                loading=loading,
                warm=warm,
                used={full(name) for name in used},
                drained=dict.fromkeys(drained.split(), by) if isinstance(drained, str) else drained,
                labels=self.labels,
                label_origins=dict.fromkeys(self.labels, "by bob since noon"),
                is_steered=self.steered,
            ),
            self.now,
        )
        return ", ".join(f"{each.version.removeprefix('qwen-')} {each.state}" for each in moved)

    def reconfigure(self, policy: VersionPolicy | None = None, **more: Any) -> None:
        self.family.reconfigure(terms(policy, **more))

    @property
    def open(self) -> list[str]:
        return [short(each.name) for each in self.family.make_snapshots() if each.state is VersionState.OPEN]

    @property
    def cold(self) -> list[str]:
        return [f"{short(name)} {endpoint}" for name, endpoint in self.family.list_cold_endpoints()]

    def state(self, name: str) -> str:
        return next(str(each.state) for each in self.family.make_snapshots() if each.name == full(name))


def full(name: str) -> str:
    return f"qwen-{name}" if name[:1] == "v" else name


def short(name: str) -> str:
    return name.removeprefix("qwen-")


# The two transitions.


def test_availability_the_old_one_serves_until_the_new_one_is_warm() -> None:
    pool = Rollout(has_warm_up=True)
    assert pool.look("v1", v1="a*") == "v1 cold, v1 open"
    assert pool.look("v1", v1="a*", v2="b") == "v2 cold"
    assert (pool.open, pool.cold) == (["v1"], ["v2 b"])
    assert pool.family.describe_state() == "'qwen-v1' is open; 'qwen-v2' is being warmed up"
    assert pool.look("v1", v1="a*", v2="b*") == "v2 open, v1 draining"
    assert (pool.open, pool.cold) == (["v2"], [])
    assert pool.family.describe_state() == "'qwen-v2' is open; 'qwen-v1' is draining"
    assert pool.look("v2", v1="a*", v2="b*") == "v1 retiring"
    assert pool.look("v2", v2="b*") == "v1 gone"


def test_resource_the_old_one_is_drained_before_the_new_one_is_warmed() -> None:
    pool = Rollout(has_warm_up=True, transition=RESOURCE)
    pool.look("v1", v1="a*")
    assert pool.look("v1", v1="a*", v2="b") == "v1 draining, v2 cold"
    assert (pool.open, pool.cold) == ([], [])
    assert pool.family.explain_closed() == "'qwen-v1' is drained first"
    assert pool.look(v1="a*", v2="b") == "v1 retiring"
    assert (pool.open, pool.cold) == ([], ["v2 b"])
    assert pool.family.explain_closed() == "'qwen-v2' is being warmed up"
    assert pool.look("v2", v1="a*", v2="b*") == "v2 open"


def test_resource_who_names_a_version_itself_stands_in_nobody_s_way() -> None:
    pool = Rollout(has_warm_up=True, transition=RESOURCE)
    way = pool.family.explain_wait
    pool.look("v1", v1="a*")
    assert way("qwen-v1") == ""
    pool.look("v1", v1="a*", v2="b")
    assert way("qwen-v1") == "waits for 'qwen-v2'"
    assert way("qwen-v2") == "waits until 'qwen-v1' is drained"
    assert pool.family.is_blocked_by("qwen-v1")
    pool.look(v1="a*", v2="b")
    assert way("qwen-v1") == "waits for 'qwen-v2'", "its warm-up is not to wait for more"
    assert way("qwen-v2") == "", "who names it gets it, warm or not"
    assert not pool.family.is_blocked_by("qwen-v1")
    pool.look("v1", v1="a*", v2="b*")
    assert way("qwen-v2") != ""
    pool.look(v1="a*", v2="b*")
    pool.look("v1", v1="a*", v2="b*")
    assert (way("qwen-v1"), way("qwen-v2"), pool.open) == ("", "", ["v2"])


def test_resource_what_drains_counts_after_it_has_left_the_pool() -> None:
    pool = Rollout(transition=RESOURCE)
    pool.look(v1="a")
    assert pool.look("v1", v2="b") == "v1 draining, v1 gone, v2 cold"
    assert pool.family.explain_closed() == "'qwen-v1' is drained first"
    assert pool.look(v2="b") == "v2 open"


def test_resource_a_wanted_one_that_drained_opens_again_beside_its_own_work() -> None:
    pool = Rollout(transition=RESOURCE)
    pool.look(v1="a")
    pool.look("v1", v1="a", v2="b")
    pool.reconfigure(VersionPolicy(specific=("1",)), transition=RESOURCE)
    assert pool.look("v1", v1="a", v2="b") == "v2 retiring, v1 open"


def test_a_jump_tells_each_state_between() -> None:
    pool = Rollout()
    assert pool.look(v1="a") == "v1 cold, v1 open"
    assert pool.look(v1="loading") == "v1 draining, v1 gone, v1 loading"
    assert pool.look() == "v1 gone"
    assert pool.look(v1="loading") == "v1 loading"
    assert pool.look(v1="a") == "v1 cold, v1 open"
    assert pool.look(v1="a", drained="1") == "v1 draining, v1 retiring"


def test_the_shortest_way_between_states() -> None:
    assert STATE_PATHS[VersionState.OPEN, VersionState.GONE][1:] == (VersionState.DRAINING, VersionState.GONE)
    assert len(STATE_PATHS[VersionState.RETIRING, VersionState.OPEN]) == 3
    assert not any(state is VersionState.ABSENT for way in STATE_PATHS.values() for state in way[1:])


# Policies that flip in the middle.


def test_a_policy_flips_in_the_middle_of_availability() -> None:
    """Back before the new one was warm: nothing closes, and the new one is not warmed any more."""
    pool = Rollout(has_warm_up=True)
    pool.look("v1", v1="a*")
    pool.look("v1", v1="a*", v2="b")
    pool.reconfigure(VersionPolicy(specific=("v1",)), has_warm_up=True)
    assert (pool.open, pool.cold) == (["v1"], ["v2 b"]), "not before the next look"
    assert pool.look("v1", v1="a*", v2="b") == "v2 retiring"
    assert (pool.open, pool.cold) == (["v1"], [])


def test_a_policy_flips_back_while_the_old_one_drains() -> None:
    pool = Rollout()
    pool.look("v1", v1="a")
    pool.look("v1", v1="a", v2="b")
    pool.reconfigure(VersionPolicy(specific=("v1",)))
    assert pool.look("v1", "v2", v1="a", v2="b") == "v1 open, v2 draining"


def test_a_policy_flips_in_the_middle_of_resource() -> None:
    """To a third one: all that is under way ends first, of either."""
    pool = Rollout(transition=RESOURCE)
    pool.look("v1", v1="a")
    pool.look("v1", v1="a", v2="b")
    pool.reconfigure(VersionPolicy(specific=("v3",)), transition=RESOURCE)
    assert pool.look("v1", v1="a", v2="b", v3="c") == "v2 retiring, v3 cold"
    assert pool.family.explain_closed() == "'qwen-v1' is drained first"
    assert pool.look(v1="a", v2="b", v3="c") == "v1 retiring, v3 open"


@pytest.mark.parametrize("before", Transition)
def test_the_transition_itself_flips(before: Transition) -> None:
    after = Transition.AVAILABILITY if before is RESOURCE else RESOURCE
    pool = Rollout(has_warm_up=True, transition=before)
    pool.look("v1", v1="a*")
    pool.look("v1", v1="a*", v2="b")
    pool.reconfigure(has_warm_up=True, transition=after)
    pool.look("v1", v1="a*", v2="b")
    assert pool.open == (["v1"] if after is Transition.AVAILABILITY else [])


# What endpoints do.


def test_an_endpoint_that_flaps() -> None:
    """Listed, not, listed: each round has an open version, and goes back by itself."""
    pool = Rollout()
    pool.look(v1="a", v2="b")
    for _ in range(5):
        assert pool.look(v1="a") == "v1 cold, v1 open, v2 draining, v2 gone"
        assert pool.look(v1="a", v2="b") == "v2 cold, v2 open, v1 draining, v1 retiring"


def test_an_endpoint_that_flaps_is_cold_each_time() -> None:
    pool = Rollout(has_warm_up=True)
    pool.look(v1="a*", v2="b*")
    assert pool.look(v1="a*") == "v1 cold, v1 open, v2 draining, v2 gone"
    assert pool.look(v1="a*", v2="b") == "v2 cold"
    assert pool.open == ["v1"]


def test_first_look_with_everything_cold() -> None:
    pool = Rollout(has_warm_up=True)
    assert pool.look(v1="a b", v2="c d") == "v2 cold, v1 retiring"
    assert (pool.open, pool.cold) == ([], ["v2 c", "v2 d"])
    assert pool.family.choose_version("k") is None
    assert pool.family.explain_closed() == pool.family.describe_state() == "'qwen-v2' is being warmed up"
    assert pool.look(v1="a b", v2="c* d") == "v2 open"
    assert pool.family.list_warm_endpoints("qwen-v2") == {"c"}
    assert pool.cold == ["v2 d"]


def test_without_a_wanted_one_that_is_warm_the_newest_that_is_opens() -> None:
    pool = Rollout(has_warm_up=True)
    assert pool.look(v1="a*", v2="b*", v3="c") == "v2 cold, v2 open, v3 cold, v1 retiring"


def test_what_is_open_and_not_wanted_is_warmed_last() -> None:
    pool = Rollout(has_warm_up=True)
    pool.look(v1="a*")
    pool.look(v1="a* b", v2="c")
    assert pool.cold == ["v2 c", "v1 b"]


def test_where_requests_cannot_be_confined_all_endpoints_are_warmed_first() -> None:
    pool = Rollout(has_warm_up=True)
    pool.steered = False
    pool.look(v1="a* b")
    assert (pool.open, pool.cold) == ([], ["v1 b"])
    pool.look(v1="a* b*")
    assert pool.open == ["v1"]
    assert pool.family.describe_state() == "'qwen-v1' is open"
    pool.look(v1="a* b* c")
    assert (pool.open, pool.cold) == (["v1"], ["v1 c"]), "it is open already"
    exposed = "'qwen-v1' is open; 'qwen-v1' is also sent to endpoints that are not warm yet"
    assert pool.family.describe_state() == exposed
    pool.steered = True
    pool.look(v1="a* b* c")
    assert pool.family.describe_state() == "'qwen-v1' is open"


@pytest.mark.parametrize("transition", Transition)
def test_an_open_version_that_is_warm_nowhere_any_more(transition: Transition) -> None:
    """Its server was restarted, or nobody refreshed the marks: work would pay for what is cold there."""
    pool = Rollout(has_warm_up=True, transition=transition)
    pool.look(v1="a*")
    pool.look("v1", v1="a")
    assert (pool.open, pool.state("v1"), pool.cold) == ([], "draining", ["v1 a"])
    assert pool.look("v1", v1="a*") == "v1 open"
    pool.look(v1="a", v2="b*")
    assert pool.open == ["v2"]


@pytest.mark.parametrize("transition", Transition)
def test_restart_in_the_middle_of_a_transition(transition: Transition) -> None:
    """Another process goes on where this one was, by what the queue and the endpoints say."""
    old = Rollout(has_warm_up=True, transition=transition)
    old.look("v1", v1="a*")
    old.look("v1", v1="a*", v2="b")
    new = Rollout(has_warm_up=True, transition=transition)
    new.look("v1", v1="a*", v2="b")
    assert (new.open, new.cold, new.family.describe_state()) == (
        old.open,
        old.cold,
        old.family.describe_state(),
    )
    assert [each.state for each in new.family.make_snapshots()] == [
        each.state for each in old.family.make_snapshots()
    ]
    for pool in (old, new):
        pool.look("v1", v1="a*", v2="b*")
        pool.look(v1="a*", v2="b*")
    assert new.open == old.open == ["v2"]


def test_a_restart_after_the_new_one_opened_sees_the_old_one_drain() -> None:
    pool = Rollout()
    assert pool.look("v1", v1="a", v2="b") == "v2 cold, v2 open, v1 cold, v1 open, v1 draining"
    assert pool.family.can_keep("qwen-v1")


# What the policy says.


@pytest.mark.parametrize(
    ("policy", "open_"),
    [
        (VersionPolicy(), ["v10"]),
        (VersionPolicy(latest=2), ["v10", "v9"]),
        (VersionPolicy(everything=True), ["v10", "v9", "v1"]),
        (VersionPolicy(specific=("1", "v9", "qwen-v7")), ["v9", "v1"]),
        (VersionPolicy(label="stable"), ["v9"]),
        (VersionPolicy(label="stable", specific=("1",), everything=True), ["v9"]),
    ],
)
def test_the_policy_chooses(policy: VersionPolicy, open_: list[str]) -> None:
    pool = Rollout(policy, labels={"stable": "9"})
    pool.look(v1="a", v9="b", v10="c")
    assert pool.open == open_


def test_rollback_by_label() -> None:
    """One line of the settings, or a verb, which wins."""
    pool = Rollout(VersionPolicy(label="stable"), labels={"stable": "2"})
    pool.look("v2", v1="a", v2="b")
    assert pool.open == ["v2"]
    pool.labels["stable"] = "v1"
    assert pool.look("v2", v1="a", v2="b") == "v1 cold, v1 open, v2 draining"
    assert [each.labels for each in pool.family.make_snapshots()] == [(), ("stable",)]
    pool.labels.clear()
    assert pool.look(v1="a", v2="b") == "v2 open, v1 draining, v1 retiring"
    pool.reconfigure(VersionPolicy(label="stable"), labels={"stable": "1"})
    pool.look(v1="a", v2="b")
    assert pool.open == ["v1"]


def test_the_next_newest_takes_over_from_one_that_is_drained() -> None:
    pool = Rollout()
    pool.look(v1="a", v2="b")
    assert pool.look("v2", v1="a", v2="b", drained="2") == "v1 cold, v1 open, v2 draining"
    assert not pool.family.can_keep("qwen-v2")


@pytest.mark.parametrize("transition", Transition)
def test_what_is_drained_by_an_operator_is_not_opened_for_want_of_others(transition: Transition) -> None:
    pool = Rollout(transition=transition)
    pool.look(v1="a")
    assert pool.look(v1="a", drained="qwen-v1") == "v1 draining, v1 retiring"
    assert pool.family.explain_closed() == "'qwen-v1' is drained by ada"
    assert pool.look(v1="a") == "v1 cold, v1 open"


def test_who_has_drained_what_and_who_has_set_a_label_is_told() -> None:
    pool = Rollout(transition=RESOURCE)
    at = dict.fromkeys(("v1", "v2", "v3"), "a")
    since = "by ada since noon: a bad quantisation"
    pool.look(drained={"1": since, "v2": "", "qwen-v3": since}, **at)
    assert pool.family.explain_closed() == (
        f"'qwen-v1' and 'qwen-v3' are drained {since}; 'qwen-v2' is drained by an operator"
    )
    each = {f"{number}": f"by p{number}" for number in range(1, 6)}
    pool.look(drained=each, **dict.fromkeys((f"v{number}" for number in each), "a"))
    assert pool.family.explain_closed().endswith("'qwen-v3' is drained by p3; and others by 2 more")
    pool.reconfigure(VersionPolicy(label="stable"), transition=RESOURCE)
    pool.labels["stable"] = "7"
    pool.look(v1="a")
    assert pool.family.explain_closed() == (
        "the label 'stable', set by bob since noon, asks for '7', which is not served: there is 'qwen-v1'"
    )


@pytest.mark.parametrize(
    ("policy", "said", "why"),
    [
        (VersionPolicy(), {}, "no version of 'qwen' is served"),
        (VersionPolicy(), {"v1": ""}, "no version of 'qwen' is served"),
        (VersionPolicy(), {"v1": "loading"}, "'qwen-v1' is being loaded"),
        (VersionPolicy(label="stable"), {"v1": "a"}, "the label 'stable' is not set"),
        (
            VersionPolicy(label="next"),
            {"v1": "a", "v3": "a"},
            "the label 'next' asks for '5', which is not served: there are 'qwen-v3' and 'qwen-v1'",
        ),
        (
            VersionPolicy(specific=("5",)),
            {"v1": "a"},
            "the policy asks for '5', which is not served: there is 'qwen-v1'",
        ),
        (
            VersionPolicy(specific=("5", "7")),
            {f"v{n}": "a" for n in range(10, 17)},
            (
                "the policy asks for '5' and '7', which are not served: there are 'qwen-v16', 'qwen-v15', "
                "'qwen-v14', 'qwen-v13', 'qwen-v12' and 2 more"
            ),
        ),
        (VersionPolicy(latest=0), {"v1": "a"}, "the policy asks for no version"),
    ],
)
def test_why_a_request_waits(policy: VersionPolicy, said: dict[str, str], why: str) -> None:
    for transition in Transition:
        pool = Rollout(policy, labels={"next": "5"}, transition=transition, has_warm_up=True)
        pool.look(**said)
        assert pool.family.explain_closed() == pool.family.describe_state() == why
        assert pool.family.choose_version("key") is None


def test_a_label_that_is_not_set_leaves_the_newest_open_where_availability_is_kept() -> None:
    pool = Rollout(VersionPolicy(label="stable"))
    pool.look(v1="a", v2="a")
    assert pool.family.explain_closed() == ""
    assert pool.family.describe_state() == "'qwen-v2' is open; the label 'stable' is not set"


# Weights and pins.


def test_weights_of_canaries() -> None:
    pool = Rollout(VersionPolicy(everything=True), weights={"v3": 0.05})
    pool.look(v1="a", v2="b", v3="c")
    weights = {short(each.name): each.weight for each in pool.family.make_snapshots()}
    assert weights == pytest.approx({"v1": 0.475, "v2": 0.475, "v3": 0.05})
    counts = Counter(pool.family.choose_version(f"request-{n}") for n in range(2000))
    assert 60 < counts["qwen-v3"] < 140
    assert pool.family.describe_state() == (
        "open are 'qwen-v2' with 47.5%, 'qwen-v1' with 47.5% and 'qwen-v3' with 5.0%"
    )
    pool.look(v3="c")
    assert {pool.family.choose_version(str(n)) for n in range(9)} == {"qwen-v3"}, "it is alone"


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"1": 0.0}, {"v1": 0.0, "v2": 1.0}),
        ({"1": 0.0, "2": 0.0}, {"v1": 0.5, "v2": 0.5}),
        ({"qwen-v1": 3.0, "v2": 1.0}, {"v1": 0.75, "v2": 0.25}),
        ({"1": 7.0}, {"v1": 1.0, "v2": 0.0}),
        ({"1": float("nan"), "2": -1.0}, {"v1": 0.5, "v2": 0.5}),
        ({"8": 0.4}, {"v1": 0.5, "v2": 0.5}),
    ],
)
def test_shares_of_the_open(weights: dict[str, float], shares: dict[str, float]) -> None:
    pool = Rollout(VersionPolicy(everything=True), weights=weights)
    pool.look(v1="a", v2="b")
    assert {short(each.name): each.weight for each in pool.family.make_snapshots()} == shares
    chosen = {short(pool.family.choose_version(str(n)) or "") for n in range(64)}
    assert chosen == {name for name, share in shares.items() if share}


def test_pinned_work_stays_while_its_version_drains() -> None:
    pool = Rollout()
    pool.look("v1", v1="a")
    pool.look("v1", v1="a", v2="b")
    assert pool.family.choose_version("any") == "qwen-v2"
    assert pool.family.can_keep("qwen-v1")
    pool.look(v1="a", v2="b")
    assert pool.state("v1") == "retiring"
    assert pool.family.can_keep("qwen-v1"), "a job may pause"
    assert pool.family.list_keepable() == ["qwen-v2", "qwen-v1"]
    pool.look("v1", v1="", v2="b")
    assert not pool.family.can_keep("qwen-v1"), "it has gone"


def test_pinned_work_moves_where_resources_are_kept() -> None:
    pool = Rollout(transition=RESOURCE)
    pool.look("v1", v1="a")
    pool.look("v1", v1="a", v2="b")
    assert pool.state("v1") == "draining"
    assert not pool.family.can_keep("qwen-v1")


# Names and patterns.


def test_natural_order() -> None:
    names = ["qwen-1.9", "qwen-1.10", "qwen-1.10-b", "qwen-9", "qwen-10", "qwen-010", "qwen-a"]
    family = ModelFamily(terms(match=re.compile("qwen-(?P<version>.*)")))
    family.apply_facts(VersionFacts({name: frozenset("a") for name in reversed(names)}), 1.0)
    newest_first = [each.label for each in family.make_snapshots()]
    assert newest_first == ["a", "10", "010", "9", "1.10-b", "1.10", "1.9"]


@pytest.mark.parametrize(
    ("match", "name", "label"),
    [
        (None, "qwen", "qwen"),
        (None, "qwen-v1", None),
        ("qwen-v.*", "qwen-v1", "qwen-v1"),
        ("qwen(-v(?P<version>[0-9]*))?", "qwen", "qwen"),
        ("qwen(-v(?P<version>[0-9]*))?", "qwen-v", "qwen-v"),
        ("qwen", "qwen-v1", None),
        ("", "", None),
        (".*", "x" * (MAX_MODEL_NAME_BYTES + 1), None),
        (".*", "ü" * (MAX_MODEL_NAME_BYTES // 2 + 1), None),
        (".*", "\ud800", "\ud800"),
        ("(?P<version>.*)", "9" * MAX_MODEL_NAME_BYTES, "9" * MAX_MODEL_NAME_BYTES),
        (r"(?P<version>\d+)", "٣", "٣"),
        ("(?P<other>q)wen", "qwen", "qwen"),
    ],
)
def test_wrong_patterns_and_strange_names(match: str | None, name: str, label: str | None) -> None:
    """What a pattern makes of a name; None: it is no version."""
    found = match_version(name, terms(match=re.compile(match) if match is not None else None))
    assert (found.label if found else None) == label
    family = ModelFamily(terms(match=re.compile(match) if match is not None else None))
    family.apply_facts(VersionFacts({name: frozenset("a")}), 1.0)
    assert family.choose_version("key") == (name if label else None)


def test_words_that_mean_a_version() -> None:
    pool = Rollout(match=re.compile("qwen-(?P<version>.*)"))
    pool.family.apply_facts(VersionFacts({"qwen-3": frozenset("a"), "qwen-v3": frozenset("a")}), 1.0)
    assert pool.family.find_versions("3") == ["qwen-3"]
    assert pool.family.find_versions("v3") == ["qwen-v3", "qwen-3"]
    assert pool.family.find_versions("qwen-3") == ["qwen-3"]
    assert pool.family.find_versions("vv3") == []


def test_a_name_of_two_families_belongs_to_both() -> None:
    sight = VersionFacts({"qwen-v1": frozenset("a")})
    families = [ModelFamily(terms(match=NUMBERED)), ModelFamily(terms(match=re.compile("q.*")))]
    for family in families:
        family.apply_facts(sight, 1.0)
    assert [family.choose_version("key") for family in families] == ["qwen-v1", "qwen-v1"]


def test_a_new_pattern_holds_from_the_next_look_on() -> None:
    pool = Rollout()
    pool.look(v1="a", v2="b")
    pool.reconfigure(match=re.compile(r"qwen-v(?P<version>1)"))
    assert pool.look(v1="a", v2="b") == "v1 cold, v1 open, v2 draining, v2 gone"
    pool.reconfigure(match=re.compile(r"qwen-v(?P<version>2)"))
    assert pool.look(v1="loading", v2="b") == "v2 cold, v2 open, v1 draining, v1 gone"
    pool.reconfigure(match=re.compile(r"qwen-(?P<version>.*)"))
    pool.look(v1="a", v2="b")
    assert [each.label for each in pool.family.make_snapshots()] == ["v2", "v1"]


@pytest.mark.parametrize("pattern", [NUMBERED, re.compile("other")])
def test_ten_thousand_names(pattern: re.Pattern[str]) -> None:
    """What is remembered of them is bounded, whatever comes."""
    family = ModelFamily(terms(match=pattern))
    for begin in (0, 10_000, 20_000):
        family.apply_facts(
            VersionFacts({f"qwen-v{n}": frozenset("a") for n in range(begin, begin + 10_000)}), float(begin)
        )
        assert family.choose_version("key") == (f"qwen-v{begin + 9_999}" if pattern is NUMBERED else None)
    family.apply_facts(VersionFacts({}), 1.0)
    assert len(family.make_snapshots()) == (MAX_GONE_VERSIONS if pattern is NUMBERED else 0)
    assert len(family._namings) + len(family._unmatched_names) <= MAX_KNOWN_NAMES


def test_the_gone_that_went_first_are_forgotten_first() -> None:
    pool = Rollout(VersionPolicy(everything=True))
    pool.look(v1="a", v2="a")
    pool.look(v1="a")
    family = pool.family
    family.apply_facts(
        VersionFacts({f"qwen-v{n}": frozenset("a") for n in range(10, 10 + MAX_GONE_VERSIONS)}), 9.0
    )
    family.apply_facts(VersionFacts({}), 10.0)
    names = {each.name for each in family.make_snapshots()}
    assert len(names) == MAX_GONE_VERSIONS
    assert not {"qwen-v1", "qwen-v2"} & names


def test_people_see_when_it_came_to_its_state() -> None:
    pool = Rollout(has_warm_up=True)
    pool.look(v1="a* b")
    pool.look("v1", v1="a* b")
    (seen,) = pool.family.make_snapshots()
    assert (seen.name, seen.label, seen.state_since) == ("qwen-v1", "1", 1.0)
    assert seen.endpoints == {"a", "b"}
    assert seen.warm_endpoints == {"a"}
    assert (seen.is_desired, seen.is_drained, seen.is_used, seen.weight) == (True, False, True, 1.0)


def test_membership_finds_what_a_pattern_matches_however_it_begins() -> None:
    patterns = [
        r"qwen-v(?P<version>\d+)",
        r"qwen-v*",
        r"qwen-v?x",
        r"qwen-v{0,2}",
        r"qwen-v+",
        r"qwen|llama-v1",
        r"(?i)QWEN-v\d",
        r"(?x) qwen - v1",
        r".*-v1",
        r"\w+",
        r"qwen\.v1",
        r"",
    ]
    families = [FamilyTerms(f"m{at}", re.compile(pattern)) for at, pattern in enumerate(patterns)]
    families += [
        FamilyTerms("qwen"),
        FamilyTerms("qwen-v1"),
        FamilyTerms("", re.compile("qwen-v1", re.IGNORECASE)),
    ]
    names = [
        "qwen-v1",
        "qwen-v",
        "qwen-",
        "qwen-x",
        "qwen-vv",
        "qwen",
        "llama-v1",
        "QWEN-V1",
        "qwen.v1",
        "q",
        "x" * 300,
    ]
    membership = FamilyIndex(families)
    for name in names:
        expected = {each.name for each in families if match_version(name, each) is not None}
        assert set(membership.find_families(name)) == expected, name
    assert membership.find_families("qwen-v1") != []


def test_each_new_name_is_matched_once_however_many_ask() -> None:
    some = terms(match=re.compile(r"once-(?P<version>\d+)"))
    names = {f"once-{number}": frozenset({"a"}) for number in range(500)}
    before = parse_version.cache_info().misses
    assert all(FamilyIndex([some]).find_families(name) == [some.name] for name in names)
    ModelFamily(some).apply_facts(VersionFacts(names), 0.0)
    assert parse_version.cache_info().misses - before == len(names)
