"""States of the versions of a model, and the versions that take work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from dispatcher.features.models.rollover import MAX_GONE_VERSIONS, MAX_KNOWN_NAMES, ModelFamily
from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.features.models.versions import (
    STATE_PATHS,
    FamilyIndex,
    FamilyTerms,
    Transition,
    VersionFacts,
    VersionState,
    match_version,
    parse_version,
)
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES

NUMBERED = VersionTemplate("qwen-v")
RESOURCE = Transition.RESOURCE


def make_terms(
    policy: VersionPolicy | None = None, template: VersionTemplate | None = NUMBERED, **more: Any
) -> FamilyTerms:
    return FamilyTerms("qwen", template, policy or VersionPolicy(), **more)


class Rollout:
    """A family `qwen` of numbered versions in a pool.

    `v1="a b*"` means that the endpoints a and b list version v1, and that it is warm on b.
    """

    is_steered = True

    def __init__(self, policy: VersionPolicy | None = None, **more: Any) -> None:
        self.terms = make_terms(policy, **more)
        self.family = ModelFamily(self.terms)
        self.now = 0.0
        self.labels: dict[str, str] = {}
        """Labels that were set by a command."""

    def apply_facts(
        self, *used: str, drained: str | Mapping[str, str] = "", drained_by: str = "by ada", **listings: str
    ) -> str:
        """Apply the facts of one moment and return the changes, such as `v1 open`."""
        self.now += 1.0
        served: dict[str, frozenset[str]] = {}
        warm: set[tuple[str, str]] = set()
        loading = {full_name(name) for name, endpoints in listings.items() if endpoints == "loading"}
        for name, endpoints in listings.items():
            if endpoints not in ("loading", ""):
                served[full_name(name)] = frozenset(endpoint.rstrip("*") for endpoint in endpoints.split())
                warm |= {
                    (full_name(name), endpoint[:-1])
                    for endpoint in endpoints.split()
                    if endpoint.endswith("*")
                }
        changes = self.family.apply_facts(
            VersionFacts(
                served,
                loading=loading,
                warm=warm,
                used={full_name(name) for name in used},
                drained=dict.fromkeys(drained.split(), drained_by) if isinstance(drained, str) else drained,
                labels=self.labels,
                label_origins=dict.fromkeys(self.labels, "by bob since noon"),
                is_steered=self.is_steered,
            ),
            self.now,
        )
        return ", ".join(f"{each.version.removeprefix('qwen-')} {each.state}" for each in changes)

    def reconfigure(self, policy: VersionPolicy | None = None, **more: Any) -> None:
        self.family.reconfigure(make_terms(policy, **more))

    @property
    def open_versions(self) -> list[str]:
        return [
            short_name(each.name) for each in self.family.make_snapshots() if each.state is VersionState.OPEN
        ]

    @property
    def cold_endpoints(self) -> list[str]:
        return [f"{short_name(name)} {endpoint}" for name, endpoint in self.family.list_cold_endpoints()]

    def get_state(self, name: str) -> str:
        return next(str(each.state) for each in self.family.make_snapshots() if each.name == full_name(name))


def full_name(name: str) -> str:
    return f"qwen-{name}" if name[:1] == "v" else name


def short_name(name: str) -> str:
    return name.removeprefix("qwen-")


# The two kinds of transition.


def test_availability_keeps_the_old_version_open_until_the_new_one_is_warm() -> None:
    rollout = Rollout(has_warm_up=True)
    assert rollout.apply_facts("v1", v1="a*") == "v1 cold, v1 open"
    assert rollout.apply_facts("v1", v1="a*", v2="b") == "v2 cold"
    assert (rollout.open_versions, rollout.cold_endpoints) == (["v1"], ["v2 b"])
    assert rollout.family.describe_state() == "'qwen-v1' is open; 'qwen-v2' is being warmed up"
    assert rollout.apply_facts("v1", v1="a*", v2="b*") == "v2 open, v1 draining"
    assert (rollout.open_versions, rollout.cold_endpoints) == (["v2"], [])
    assert rollout.family.describe_state() == "'qwen-v2' is open; 'qwen-v1' is draining"
    assert rollout.apply_facts("v2", v1="a*", v2="b*") == "v1 retiring"
    assert rollout.apply_facts("v2", v2="b*") == "v1 gone"


def test_resource_drains_the_old_version_before_the_new_one_is_warmed() -> None:
    rollout = Rollout(has_warm_up=True, transition=RESOURCE)
    rollout.apply_facts("v1", v1="a*")
    assert rollout.apply_facts("v1", v1="a*", v2="b") == "v1 draining, v2 cold"
    assert (rollout.open_versions, rollout.cold_endpoints) == ([], [])
    assert rollout.family.explain_closed() == "'qwen-v1' is drained first"
    assert rollout.apply_facts(v1="a*", v2="b") == "v1 retiring"
    assert (rollout.open_versions, rollout.cold_endpoints) == ([], ["v2 b"])
    assert rollout.family.explain_closed() == "'qwen-v2' is being warmed up"
    assert rollout.apply_facts("v2", v1="a*", v2="b*") == "v2 open"


def test_resource_makes_requests_that_name_a_version_wait_during_the_transition() -> None:
    rollout = Rollout(has_warm_up=True, transition=RESOURCE)
    explain_wait = rollout.family.explain_wait
    rollout.apply_facts("v1", v1="a*")
    assert explain_wait("qwen-v1") == ""
    rollout.apply_facts("v1", v1="a*", v2="b")
    assert explain_wait("qwen-v1") == "waits for 'qwen-v2'"
    assert explain_wait("qwen-v2") == "waits until 'qwen-v1' is drained"
    assert rollout.family.is_blocked_by("qwen-v1")
    rollout.apply_facts(v1="a*", v2="b")
    assert explain_wait("qwen-v1") == "waits for 'qwen-v2'", "further requests must not delay its warm-up"
    assert explain_wait("qwen-v2") == "", "requests that name the version are sent, warm or not"
    assert not rollout.family.is_blocked_by("qwen-v1")
    rollout.apply_facts("v1", v1="a*", v2="b*")
    assert explain_wait("qwen-v2") != ""
    rollout.apply_facts(v1="a*", v2="b*")
    rollout.apply_facts("v1", v1="a*", v2="b*")
    assert (explain_wait("qwen-v1"), explain_wait("qwen-v2"), rollout.open_versions) == ("", "", ["v2"])


def test_resource_waits_for_a_draining_version_that_has_left_the_pool() -> None:
    rollout = Rollout(transition=RESOURCE)
    rollout.apply_facts(v1="a")
    assert rollout.apply_facts("v1", v2="b") == "v1 draining, v1 gone, v2 cold"
    assert rollout.family.explain_closed() == "'qwen-v1' is drained first"
    assert rollout.apply_facts(v2="b") == "v2 open"


def test_resource_reopens_a_draining_version_that_is_desired_again_while_it_is_used() -> None:
    rollout = Rollout(transition=RESOURCE)
    rollout.apply_facts(v1="a")
    rollout.apply_facts("v1", v1="a", v2="b")
    rollout.reconfigure(VersionPolicy(specific=("1",)), transition=RESOURCE)
    assert rollout.apply_facts("v1", v1="a", v2="b") == "v2 retiring, v1 open"


def test_each_intermediate_state_is_reported() -> None:
    rollout = Rollout()
    assert rollout.apply_facts(v1="a") == "v1 cold, v1 open"
    assert rollout.apply_facts(v1="loading") == "v1 draining, v1 gone, v1 loading"
    assert rollout.apply_facts() == "v1 gone"
    assert rollout.apply_facts(v1="loading") == "v1 loading"
    assert rollout.apply_facts(v1="a") == "v1 cold, v1 open"
    assert rollout.apply_facts(v1="a", drained="1") == "v1 draining, v1 retiring"


def test_shortest_paths_between_states() -> None:
    assert STATE_PATHS[VersionState.OPEN, VersionState.GONE][1:] == (VersionState.DRAINING, VersionState.GONE)
    assert len(STATE_PATHS[VersionState.RETIRING, VersionState.OPEN]) == 3
    assert not any(state is VersionState.ABSENT for path in STATE_PATHS.values() for state in path[1:])


# Policies that change during a transition.


def test_policy_is_reversed_during_an_availability_transition() -> None:
    """The old version never closes, and the new one is not warmed any more."""
    rollout = Rollout(has_warm_up=True)
    rollout.apply_facts("v1", v1="a*")
    rollout.apply_facts("v1", v1="a*", v2="b")
    rollout.reconfigure(VersionPolicy(specific=("v1",)), has_warm_up=True)
    assert (rollout.open_versions, rollout.cold_endpoints) == (["v1"], ["v2 b"]), (
        "the policy applies to the next facts"
    )
    assert rollout.apply_facts("v1", v1="a*", v2="b") == "v2 retiring"
    assert (rollout.open_versions, rollout.cold_endpoints) == (["v1"], [])


def test_policy_is_reversed_while_the_old_version_drains() -> None:
    rollout = Rollout()
    rollout.apply_facts("v1", v1="a")
    rollout.apply_facts("v1", v1="a", v2="b")
    rollout.reconfigure(VersionPolicy(specific=("v1",)))
    assert rollout.apply_facts("v1", "v2", v1="a", v2="b") == "v1 open, v2 draining"


def test_policy_selects_a_third_version_during_a_resource_transition() -> None:
    """The third version opens only after the requests to the other two have ended."""
    rollout = Rollout(transition=RESOURCE)
    rollout.apply_facts("v1", v1="a")
    rollout.apply_facts("v1", v1="a", v2="b")
    rollout.reconfigure(VersionPolicy(specific=("v3",)), transition=RESOURCE)
    assert rollout.apply_facts("v1", v1="a", v2="b", v3="c") == "v2 retiring, v3 cold"
    assert rollout.family.explain_closed() == "'qwen-v1' is drained first"
    assert rollout.apply_facts(v1="a", v2="b", v3="c") == "v1 retiring, v3 open"


@pytest.mark.parametrize("before", Transition)
def test_kind_of_transition_changes_during_a_transition(before: Transition) -> None:
    after = Transition.AVAILABILITY if before is RESOURCE else RESOURCE
    rollout = Rollout(has_warm_up=True, transition=before)
    rollout.apply_facts("v1", v1="a*")
    rollout.apply_facts("v1", v1="a*", v2="b")
    rollout.reconfigure(has_warm_up=True, transition=after)
    rollout.apply_facts("v1", v1="a*", v2="b")
    assert rollout.open_versions == (["v1"] if after is Transition.AVAILABILITY else [])


# Endpoints that come, go and warm up.


def test_version_opens_and_closes_with_an_endpoint_that_comes_and_goes() -> None:
    """A version is open in each round."""
    rollout = Rollout()
    rollout.apply_facts(v1="a", v2="b")
    for _ in range(5):
        assert rollout.apply_facts(v1="a") == "v1 cold, v1 open, v2 draining, v2 gone"
        assert rollout.apply_facts(v1="a", v2="b") == "v2 cold, v2 open, v1 draining, v1 retiring"


def test_endpoint_that_comes_and_goes_is_cold_each_time() -> None:
    rollout = Rollout(has_warm_up=True)
    rollout.apply_facts(v1="a*", v2="b*")
    assert rollout.apply_facts(v1="a*") == "v1 cold, v1 open, v2 draining, v2 gone"
    assert rollout.apply_facts(v1="a*", v2="b") == "v2 cold"
    assert rollout.open_versions == ["v1"]


def test_no_version_opens_at_first_if_all_are_cold() -> None:
    rollout = Rollout(has_warm_up=True)
    assert rollout.apply_facts(v1="a b", v2="c d") == "v2 cold, v1 retiring"
    assert (rollout.open_versions, rollout.cold_endpoints) == ([], ["v2 c", "v2 d"])
    assert rollout.family.choose_version("k") is None
    assert (
        rollout.family.explain_closed() == rollout.family.describe_state() == "'qwen-v2' is being warmed up"
    )
    assert rollout.apply_facts(v1="a b", v2="c* d") == "v2 open"
    assert rollout.family.list_warm_endpoints("qwen-v2") == {"c"}
    assert rollout.cold_endpoints == ["v2 d"]


def test_newest_warm_version_opens_while_no_desired_one_is_warm() -> None:
    rollout = Rollout(has_warm_up=True)
    assert rollout.apply_facts(v1="a*", v2="b*", v3="c") == "v2 cold, v2 open, v3 cold, v1 retiring"


def test_open_version_that_is_not_desired_is_warmed_last() -> None:
    rollout = Rollout(has_warm_up=True)
    rollout.apply_facts(v1="a*")
    rollout.apply_facts(v1="a* b", v2="c")
    assert rollout.cold_endpoints == ["v2 c", "v1 b"]


def test_version_opens_only_when_all_its_endpoints_are_warm_if_requests_cannot_be_confined() -> None:
    rollout = Rollout(has_warm_up=True)
    rollout.is_steered = False
    rollout.apply_facts(v1="a* b")
    assert (rollout.open_versions, rollout.cold_endpoints) == ([], ["v1 b"])
    rollout.apply_facts(v1="a* b*")
    assert rollout.open_versions == ["v1"]
    assert rollout.family.describe_state() == "'qwen-v1' is open"
    rollout.apply_facts(v1="a* b* c")
    assert (rollout.open_versions, rollout.cold_endpoints) == (["v1"], ["v1 c"]), (
        "the version is open already"
    )
    expected = "'qwen-v1' is open; 'qwen-v1' is also sent to endpoints that are not warm yet"
    assert rollout.family.describe_state() == expected
    rollout.is_steered = True
    rollout.apply_facts(v1="a* b* c")
    assert rollout.family.describe_state() == "'qwen-v1' is open"


@pytest.mark.parametrize("transition", Transition)
def test_open_version_closes_when_it_is_not_warm_anywhere(transition: Transition) -> None:
    """Its server was restarted or its warm markers expired, so the server may be cold."""
    rollout = Rollout(has_warm_up=True, transition=transition)
    rollout.apply_facts(v1="a*")
    rollout.apply_facts("v1", v1="a")
    assert (rollout.open_versions, rollout.get_state("v1"), rollout.cold_endpoints) == (
        [],
        "draining",
        ["v1 a"],
    )
    assert rollout.apply_facts("v1", v1="a*") == "v1 open"
    rollout.apply_facts(v1="a", v2="b*")
    assert rollout.open_versions == ["v2"]


@pytest.mark.parametrize("transition", Transition)
def test_restarted_process_continues_a_transition(transition: Transition) -> None:
    """Facts from the queue and the endpoints suffice to continue."""
    old = Rollout(has_warm_up=True, transition=transition)
    old.apply_facts("v1", v1="a*")
    old.apply_facts("v1", v1="a*", v2="b")
    new = Rollout(has_warm_up=True, transition=transition)
    new.apply_facts("v1", v1="a*", v2="b")
    assert (new.open_versions, new.cold_endpoints, new.family.describe_state()) == (
        old.open_versions,
        old.cold_endpoints,
        old.family.describe_state(),
    )
    assert [each.state for each in new.family.make_snapshots()] == [
        each.state for each in old.family.make_snapshots()
    ]
    for rollout in (old, new):
        rollout.apply_facts("v1", v1="a*", v2="b*")
        rollout.apply_facts(v1="a*", v2="b*")
    assert new.open_versions == old.open_versions == ["v2"]


def test_restarted_process_sees_the_old_version_drain_after_the_new_one_opened() -> None:
    rollout = Rollout()
    assert rollout.apply_facts("v1", v1="a", v2="b") == "v2 cold, v2 open, v1 cold, v1 open, v1 draining"
    assert rollout.family.can_keep("qwen-v1")


# Policies, labels and drains.


@pytest.mark.parametrize(
    ("policy", "open_versions"),
    [
        (VersionPolicy(), ["v10"]),
        (VersionPolicy(latest=2), ["v10", "v9"]),
        (VersionPolicy(everything=True), ["v10", "v9", "v1"]),
        (VersionPolicy(specific=("1", "v9", "qwen-v7")), ["v9", "v1"]),
        (VersionPolicy(label="stable"), ["v9"]),
        (VersionPolicy(label="stable", specific=("1",), everything=True), ["v9"]),
    ],
)
def test_policy_selects_the_open_versions(policy: VersionPolicy, open_versions: list[str]) -> None:
    rollout = Rollout(policy, labels={"stable": "9"})
    rollout.apply_facts(v1="a", v9="b", v10="c")
    assert rollout.open_versions == open_versions


def test_moved_label_rolls_back_and_overrides_the_settings() -> None:
    """A label that a command has set overrides the label in the settings."""
    rollout = Rollout(VersionPolicy(label="stable"), labels={"stable": "2"})
    rollout.apply_facts("v2", v1="a", v2="b")
    assert rollout.open_versions == ["v2"]
    rollout.labels["stable"] = "v1"
    assert rollout.apply_facts("v2", v1="a", v2="b") == "v1 cold, v1 open, v2 draining"
    assert [each.labels for each in rollout.family.make_snapshots()] == [(), ("stable",)]
    rollout.labels.clear()
    assert rollout.apply_facts(v1="a", v2="b") == "v2 open, v1 draining, v1 retiring"
    rollout.reconfigure(VersionPolicy(label="stable"), labels={"stable": "1"})
    rollout.apply_facts(v1="a", v2="b")
    assert rollout.open_versions == ["v1"]


def test_next_newest_version_replaces_a_drained_one() -> None:
    rollout = Rollout()
    rollout.apply_facts(v1="a", v2="b")
    assert rollout.apply_facts("v2", v1="a", v2="b", drained="2") == "v1 cold, v1 open, v2 draining"
    assert not rollout.family.can_keep("qwen-v2")


@pytest.mark.parametrize("transition", Transition)
def test_drained_version_stays_closed_although_no_other_exists(transition: Transition) -> None:
    rollout = Rollout(transition=transition)
    rollout.apply_facts(v1="a")
    assert rollout.apply_facts(v1="a", drained="qwen-v1") == "v1 draining, v1 retiring"
    assert rollout.family.explain_closed() == "'qwen-v1' is drained by ada"
    assert rollout.apply_facts(v1="a") == "v1 cold, v1 open"


def test_explanation_names_who_drained_a_version_or_set_a_label() -> None:
    rollout = Rollout(transition=RESOURCE)
    listed = dict.fromkeys(("v1", "v2", "v3"), "a")
    since = "by ada since noon: a bad quantisation"
    rollout.apply_facts(drained={"1": since, "v2": "", "qwen-v3": since}, **listed)
    assert rollout.family.explain_closed() == (
        f"'qwen-v1' and 'qwen-v3' are drained {since}; 'qwen-v2' is drained by an operator"
    )
    drained = {f"{number}": f"by p{number}" for number in range(1, 6)}
    rollout.apply_facts(drained=drained, **dict.fromkeys((f"v{number}" for number in drained), "a"))
    assert rollout.family.explain_closed().endswith("'qwen-v3' is drained by p3; and others by 2 more")
    rollout.reconfigure(VersionPolicy(label="stable"), transition=RESOURCE)
    rollout.labels["stable"] = "7"
    rollout.apply_facts(v1="a")
    assert rollout.family.explain_closed() == (
        "the label 'stable', set by bob since noon, asks for '7', which is not served: there is 'qwen-v1'"
    )


@pytest.mark.parametrize(
    ("policy", "listings", "why"),
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
def test_explanation_says_why_a_request_waits(
    policy: VersionPolicy, listings: dict[str, str], why: str
) -> None:
    for transition in Transition:
        rollout = Rollout(policy, labels={"next": "5"}, transition=transition, has_warm_up=True)
        rollout.apply_facts(**listings)
        assert rollout.family.explain_closed() == rollout.family.describe_state() == why
        assert rollout.family.choose_version("key") is None


def test_newest_version_is_open_if_the_label_of_the_policy_is_not_set() -> None:
    rollout = Rollout(VersionPolicy(label="stable"))
    rollout.apply_facts(v1="a", v2="a")
    assert rollout.family.explain_closed() == ""
    assert rollout.family.describe_state() == "'qwen-v2' is open; the label 'stable' is not set"


# Weights and pins.


def test_canary_gets_its_weight_of_the_requests() -> None:
    rollout = Rollout(VersionPolicy(everything=True), weights={"v3": 0.05})
    rollout.apply_facts(v1="a", v2="b", v3="c")
    weights = {short_name(each.name): each.weight for each in rollout.family.make_snapshots()}
    assert weights == pytest.approx({"v1": 0.475, "v2": 0.475, "v3": 0.05})
    counts = Counter(rollout.family.choose_version(f"request-{n}") for n in range(2000))
    assert 60 < counts["qwen-v3"] < 140
    assert rollout.family.describe_state() == (
        "open are 'qwen-v2' with 47.5%, 'qwen-v1' with 47.5% and 'qwen-v3' with 5.0%"
    )
    rollout.apply_facts(v3="c")
    assert {rollout.family.choose_version(str(n)) for n in range(9)} == {"qwen-v3"}, (
        "it is the only open version"
    )


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
def test_open_versions_share_requests_by_their_weights(
    weights: dict[str, float], shares: dict[str, float]
) -> None:
    rollout = Rollout(VersionPolicy(everything=True), weights=weights)
    rollout.apply_facts(v1="a", v2="b")
    assert {short_name(each.name): each.weight for each in rollout.family.make_snapshots()} == shares
    chosen = {short_name(rollout.family.choose_version(str(n)) or "") for n in range(64)}
    assert chosen == {name for name, share in shares.items() if share}


def test_availability_keeps_pinned_work_on_its_version_while_it_drains() -> None:
    rollout = Rollout()
    rollout.apply_facts("v1", v1="a")
    rollout.apply_facts("v1", v1="a", v2="b")
    assert rollout.family.choose_version("any") == "qwen-v2"
    assert rollout.family.can_keep("qwen-v1")
    rollout.apply_facts(v1="a", v2="b")
    assert rollout.get_state("v1") == "retiring"
    assert rollout.family.can_keep("qwen-v1"), "a job may pause between its requests"
    assert rollout.family.list_keepable() == ["qwen-v2", "qwen-v1"]
    rollout.apply_facts("v1", v1="", v2="b")
    assert not rollout.family.can_keep("qwen-v1"), "the version is gone"


def test_resource_moves_pinned_work_to_another_version() -> None:
    rollout = Rollout(transition=RESOURCE)
    rollout.apply_facts("v1", v1="a")
    rollout.apply_facts("v1", v1="a", v2="b")
    assert rollout.get_state("v1") == "draining"
    assert not rollout.family.can_keep("qwen-v1")


# Names and templates.


def test_versions_are_ordered_by_the_numbers_in_their_names() -> None:
    names = ["qwen-1.9", "qwen-1.10", "qwen-1.10-b", "qwen-9", "qwen-10", "qwen-010", "qwen-a"]
    family = ModelFamily(make_terms(template=VersionTemplate("qwen-")))
    family.apply_facts(VersionFacts({name: frozenset("a") for name in reversed(names)}), 1.0)
    newest_first = [each.label for each in family.make_snapshots()]
    assert newest_first == ["a", "10", "010", "9", "1.10-b", "1.10", "1.9"]


@pytest.mark.parametrize(
    ("template", "name", "label"),
    [
        (None, "qwen", "qwen"),
        (None, "qwen-v1", None),
        ("qwen-v{version}", "qwen-v1", "1"),
        ("qwen-v{version}", "qwen-v", None),
        ("qwen-v{version}", "qwen", None),
        ("v{version}-qwen", "v1-qwen", "1"),
        ("{version}", "", None),
        ("{version}", "x" * (MAX_MODEL_NAME_BYTES + 1), None),
        ("{version}", "9" * MAX_MODEL_NAME_BYTES, "9" * MAX_MODEL_NAME_BYTES),
        ("ü{version}", "ü" * (MAX_MODEL_NAME_BYTES // 2) + "1", None),
        ("\ud800{version}", "\ud8001", "1"),
        (None, "\ud800", None),
        ("{version}", "٣", None),
    ],
)
def test_label_of_a_name_under_unusual_templates_and_names(
    template: str | None, name: str, label: str | None
) -> None:
    """The label is `None` if the name is not a version."""
    terms = make_terms(template=None if template is None else VersionTemplate.parse(template))
    found = match_version(name, terms)
    assert (found.label if found else None) == label
    family = ModelFamily(terms)
    family.apply_facts(VersionFacts({name: frozenset("a")}), 1.0)
    assert family.choose_version("key") == (name if label else None)


def find_versions(family: ModelFamily, alias: str) -> list[str]:
    return [each.name for each in family.make_snapshots() if alias in each.aliases]


def test_version_is_found_by_its_aliases() -> None:
    rollout = Rollout(template=VersionTemplate("qwen-"))
    rollout.family.apply_facts(VersionFacts({"qwen-3": frozenset("a"), "qwen-v3": frozenset("a")}), 1.0)
    assert find_versions(rollout.family, "3") == ["qwen-3"]
    assert find_versions(rollout.family, "v3") == ["qwen-v3", "qwen-3"]
    assert find_versions(rollout.family, "qwen-3") == ["qwen-3"]
    assert find_versions(rollout.family, "vv3") == []


def test_name_that_matches_two_families_belongs_to_both() -> None:
    facts = VersionFacts({"qwen-v1": frozenset("a")})
    families = [ModelFamily(make_terms(template=each)) for each in (NUMBERED, VersionTemplate("q"))]
    for family in families:
        family.apply_facts(facts, 1.0)
    assert [family.choose_version("key") for family in families] == ["qwen-v1", "qwen-v1"]


def test_new_template_applies_when_facts_are_applied_next() -> None:
    rollout = Rollout()
    rollout.apply_facts(v1="a", v2="b")
    rollout.reconfigure(template=VersionTemplate("qwen-", "1"))
    assert rollout.apply_facts(v1="a", v2="b") == "v1 cold, v1 open, v2 draining, v2 gone"
    rollout.reconfigure(template=VersionTemplate("qwen-", "2"))
    assert rollout.apply_facts(v1="loading", v2="b") == "v2 cold, v2 open, v1 draining, v1 gone"
    rollout.reconfigure(template=VersionTemplate("qwen-"))
    rollout.apply_facts(v1="a", v2="b")
    assert [each.label for each in rollout.family.make_snapshots()] == ["v2", "v1"]


@pytest.mark.parametrize("template", [NUMBERED, VersionTemplate("other")])
def test_number_of_remembered_names_is_limited(template: VersionTemplate) -> None:
    """The limit applies to names that match and to names that do not."""
    family = ModelFamily(make_terms(template=template))
    for first in (0, 10_000, 20_000):
        family.apply_facts(
            VersionFacts({f"qwen-v{n}": frozenset("a") for n in range(first, first + 10_000)}), float(first)
        )
        assert family.choose_version("key") == (f"qwen-v{first + 9_999}" if template is NUMBERED else None)
    family.apply_facts(VersionFacts({}), 1.0)
    assert len(family.make_snapshots()) == (MAX_GONE_VERSIONS if template is NUMBERED else 0)
    assert len(family._namings) + len(family._unmatched_names) <= MAX_KNOWN_NAMES


def test_versions_that_went_first_are_forgotten_first() -> None:
    rollout = Rollout(VersionPolicy(everything=True))
    rollout.apply_facts(v1="a", v2="a")
    rollout.apply_facts(v1="a")
    family = rollout.family
    family.apply_facts(
        VersionFacts({f"qwen-v{n}": frozenset("a") for n in range(10, 10 + MAX_GONE_VERSIONS)}), 9.0
    )
    family.apply_facts(VersionFacts({}), 10.0)
    names = {each.name for each in family.make_snapshots()}
    assert len(names) == MAX_GONE_VERSIONS
    assert not {"qwen-v1", "qwen-v2"} & names


def test_snapshot_contains_the_time_of_the_last_change_of_state() -> None:
    rollout = Rollout(has_warm_up=True)
    rollout.apply_facts(v1="a* b")
    rollout.apply_facts("v1", v1="a* b")
    (snapshot,) = rollout.family.make_snapshots()
    assert (snapshot.name, snapshot.label, snapshot.state_since) == ("qwen-v1", "1", 1.0)
    assert snapshot.endpoints == {"a", "b"}
    assert snapshot.warm_endpoints == {"a"}
    assert (snapshot.is_desired, snapshot.is_drained, snapshot.is_used, snapshot.weight) == (
        True,
        False,
        True,
        1.0,
    )


def test_index_finds_every_family_whose_template_matches() -> None:
    templates = [
        "qwen-v{version}",
        "qwen-{version}",
        "qwen{version}",
        "q{version}1",
        "{version}-v1",
        "{version}",
        "QWEN-V{version}",
        "llama-v{version}",
        "qwen.{version}",
    ]
    families = [FamilyTerms(f"m{at}", VersionTemplate.parse(text)) for at, text in enumerate(templates)]
    families += [FamilyTerms("qwen"), FamilyTerms("qwen-v1")]
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
    index = FamilyIndex(families)
    for name in names:
        expected = {each.name for each in families if match_version(name, each) is not None}
        assert set(index.find_families(name)) == expected, name
    assert index.find_families("qwen-v1") != []


def test_each_new_name_is_matched_only_once() -> None:
    terms = make_terms(template=VersionTemplate("once-"))
    names = {f"once-{number}": frozenset({"a"}) for number in range(500)}
    before = parse_version.cache_info().misses
    assert all(FamilyIndex([terms]).find_families(name) == [terms.name] for name in names)
    ModelFamily(terms).apply_facts(VersionFacts(names), 0.0)
    assert parse_version.cache_info().misses - before == len(names)
