"""Merge targets and their rules, kept answers to pieces of lists, and calls within the server's limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.grouping import GroupingRule
from dispatcher.common.patterns import MAX_PATHS
from dispatcher.features.merging.merged_calls import (
    MAX_ANSWER_BYTES,
    MAX_MODEL_CHARS,
    MAX_SPLIT_LISTS,
    MAX_TARGETS,
    MergeTargets,
    PartialAnswers,
    SplitList,
    join_answers,
    split_by_limits,
    split_long_list,
)
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.requests.outcomes.outcome import Delivered, Failed
from tests.features.merging.batch_members import PATH, RULE, build_member, build_target
from tests.features.merging.embedding_gateway import build_answer

WILDCARD_RULE = replace(RULE, paths=("/v1/*", "/models/*:predict"), grouping=GroupingRule(9))
TEXTS = [f"text {number}" for number in range(10)]


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        (PATH, RULE),
        ("/v1/rerank", WILDCARD_RULE),
        ("/models/x:predict", WILDCARD_RULE),
        ("/models/x", None),
        ("/v2/embeddings", None),
        ("", None),
    ],
)
def test_first_rule_with_a_matching_path_applies(path: str, rule: BatchRule | None) -> None:
    targets = MergeTargets([RULE, WILDCARD_RULE])
    assert targets.find_rule(path) is rule
    assert targets.find_rule(path) is rule, "the remembered path yields the same rule"


def test_no_rule_applies_without_rules() -> None:
    assert MergeTargets([]).find_rule(PATH) is None


def test_number_of_remembered_paths_is_bounded() -> None:
    targets = MergeTargets([RULE])
    for number in range(3 * MAX_PATHS):
        assert targets.find_rule(f"/made/up/{number}") is None
        assert targets.find_rule(PATH) is RULE
    assert len(targets._rule_by_path) <= MAX_PATHS


def test_target_is_identified_by_path_and_model() -> None:
    targets = MergeTargets([RULE])
    first = targets.get_target(PATH, "m", RULE)
    assert targets.get_target(PATH, "m", RULE) is first
    assert targets.get_target(PATH, "n", RULE) is not first
    assert targets.get_target("/v1/other", "m", RULE) is not first
    assert [each.model for each in targets] == ["m", "n", "m"]


def test_new_target_has_the_sizes_of_its_rule() -> None:
    rule = replace(RULE, mode=MergeMode.AUTO, max_items=7, grouping=GroupingRule(5, (2,), max_weight=11.0))
    size = MergeTargets([rule]).get_target(PATH, "m", rule).size
    assert (
        size.mode,
        size.max_size,
        size.preferred_sizes,
        size.server_max_items,
        size.server_max_tokens,
    ) == (
        MergeMode.AUTO,
        5,
        (2,),
        7,
        11.0,
    )


def test_least_recently_used_target_is_dropped_when_there_are_too_many() -> None:
    targets = MergeTargets([RULE])
    first, second = (targets.get_target(PATH, name, RULE) for name in ("first", "second"))
    for number in range(MAX_TARGETS - 2):
        targets.get_target(PATH, f"m-{number}", RULE)
    assert targets.get_target(PATH, "first", RULE) is first
    targets.get_target(PATH, "one more", RULE)
    assert len(list(targets)) == MAX_TARGETS
    assert targets.get_target(PATH, "first", RULE) is first
    assert targets.get_target(PATH, "second", RULE) is not second


def test_long_model_name_is_shortened() -> None:
    targets = MergeTargets([RULE])
    assert len(targets.get_target(PATH, "x" * 10_000, RULE).model) <= MAX_MODEL_CHARS


@pytest.mark.parametrize(
    ("max_items", "unit_per_call", "units"), [(None, False, 10), (4, False, 4), (4, True, 1)]
)
def test_units_of_a_member_are_the_items_of_its_largest_call(
    max_items: int | None, unit_per_call: bool, units: int
) -> None:
    rule = replace(RULE, max_items=max_items, unit_per_call=unit_per_call)
    assert build_member(1, build_target(rule), TEXTS).units == units


# Answers to pieces.


def build_split_list(count: int = 1, body: bytes = b"{}") -> SplitList:
    return SplitList([], [body] * count)


def test_answers_to_pieces_are_kept_for_the_next_attempt_and_taken_once() -> None:
    partial_answers, target = PartialAnswers(), build_target()
    split_list = build_split_list()
    partial_answers.store_answers(build_member(1, target), split_list)
    assert partial_answers.take_answers(build_member(2, target)) is None
    assert partial_answers.take_answers(build_member(1, target)) is split_list
    assert partial_answers.take_answers(build_member(1, target)) is None


def test_answers_of_another_request_are_not_returned() -> None:
    """The token of the request must match as well, should an entry id ever be used twice."""
    partial_answers, target = PartialAnswers(), build_target()
    partial_answers.store_answers(build_member(1, target, token="mine"), build_split_list())
    assert partial_answers.take_answers(build_member(1, target, token="another's")) is None


def test_split_list_without_answers_is_not_kept() -> None:
    partial_answers, target = PartialAnswers(), build_target()
    partial_answers.store_answers(build_member(1, target), build_split_list(0))
    assert partial_answers.take_answers(build_member(1, target)) is None


def test_oldest_answers_are_dropped_when_there_are_too_many_lists() -> None:
    partial_answers, target = PartialAnswers(), build_target()
    for entry_id in range(MAX_SPLIT_LISTS + 2):
        partial_answers.store_answers(build_member(entry_id, target), build_split_list())
    kept = [
        partial_answers.take_answers(build_member(entry_id, target)) is not None
        for entry_id in range(MAX_SPLIT_LISTS + 2)
    ]
    assert kept == [False, False, *[True] * MAX_SPLIT_LISTS]


def test_oldest_answers_are_dropped_when_they_use_too_many_bytes() -> None:
    partial_answers, target = PartialAnswers(), build_target()
    answer_bytes = bytes(MAX_ANSWER_BYTES // 3)
    for entry_id in range(4):
        partial_answers.store_answers(build_member(entry_id, target), build_split_list(1, answer_bytes))
    assert [
        partial_answers.take_answers(build_member(entry_id, target)) is not None for entry_id in range(4)
    ] == [
        False,
        True,
        True,
        True,
    ]
    partial_answers.store_answers(build_member(5, target), build_split_list(4, answer_bytes))
    assert partial_answers.take_answers(build_member(5, target)) is None, (
        "a list that exceeds the maximum alone is not kept"
    )


# Calls within the limits of the server.


def test_list_is_split_if_it_exceeds_a_known_limit() -> None:
    target = build_target()
    member = build_member(1, target, TEXTS)
    assert split_long_list(member) is None, "no limit is known"
    target.size.server_max_items = 10
    assert split_long_list(member) is None
    target.size.server_max_items = 4
    split_list = split_long_list(member)
    assert split_list is not None
    assert [part.size for part in split_list.parts] == [4, 4, 2]
    assert split_long_list(build_member(2, target, "one text")) is None
    target.size.server_max_items, target.size.server_max_tokens = None, member.part.tokens // 2 + 1
    split_list = split_long_list(member)
    assert split_list is not None
    assert len(split_list.parts) > 1
    assert all(part.tokens <= target.size.server_max_tokens for part in split_list.parts)


def test_answers_to_pieces_are_joined() -> None:
    target = build_target(replace(RULE, max_items=4))
    member = build_member(1, target, TEXTS)
    split_list = split_long_list(member)
    assert split_list is not None
    split_list.answers = [build_answer(TEXTS[at : at + 4]) for at in (0, 4, 8)]
    outcome = join_answers(member, split_list, 200)
    assert isinstance(outcome, Delivered)
    assert msgspec.json.decode(outcome.body) == msgspec.json.decode(build_answer(TEXTS))
    split_list.answers[1] = b"<html>"
    outcome = join_answers(member, split_list, 200)
    assert isinstance(outcome, Failed)
    assert outcome.why.startswith("the answers to 3 pieces of the list could not be joined: ")


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.just(inf), st.floats(1.0, 60.0)),
)
def test_split_by_limits_keeps_order_and_limits_and_needs_no_extra_call(
    sizes: list[int], max_items: int | None, tokens: float
) -> None:
    target = build_target()
    target.size.server_max_items, target.size.server_max_tokens = max_items, tokens
    members = [build_member(number, target, ["a text"] * size) for number, size in enumerate(sizes)]
    calls = list(split_by_limits(target, members))
    assert [member for call in calls for member in call] == members
    for call in calls:
        size = sum(member.part.size for member in call)
        assert len(call) == 1 or (
            size <= (max_items or size) and sum(member.part.tokens for member in call) <= tokens
        )
    for call, following in pairwise(calls):
        larger_call = [*call, following[0]]
        size = sum(member.part.size for member in larger_call)
        assert size > (max_items or size) or sum(member.part.tokens for member in larger_call) > tokens, (
            "the first item of the next call does not fit"
        )
