"""Which rule counts for a path, what is remembered of models and of pieces, and for how many."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.outcome import Delivered, Failed
from dispatcher.core.merging.grouping import BatchRule, GroupingRule, MergeMode
from dispatcher.dispatch.merging.merged_calls import (
    MAX_ANSWER_BYTES,
    MAX_MODEL_CHARS,
    MAX_PATHS,
    MAX_SPLIT_LISTS,
    MAX_TARGETS,
    MergeTargets,
    PartialAnswers,
    SplitList,
    join_answers,
    split_by_limits,
    split_long_list,
)
from tests.dispatch.embedder import answer
from tests.dispatch.riders import PATH, RULE, rider, served_by

ANY = replace(RULE, paths=("/v1/*", "/models/*:predict"), grouping=GroupingRule(9))
TEXTS = [f"text {n}" for n in range(10)]


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        (PATH, RULE),
        ("/v1/rerank", ANY),
        ("/models/x:predict", ANY),
        ("/models/x", None),
        ("/v2/embeddings", None),
        ("", None),
    ],
)
def test_the_first_rule_with_a_pattern_for_a_path_counts(path: str, rule: BatchRule | None) -> None:
    models = MergeTargets([RULE, ANY])
    assert models.find_rule(path) is rule
    assert models.find_rule(path) is rule, "and so it does when it is asked for again"


def test_without_rules_none_counts() -> None:
    assert MergeTargets([]).find_rule(PATH) is None


def test_paths_that_producers_make_up_are_not_kept_without_end() -> None:
    models = MergeTargets([RULE])
    for n in range(3 * MAX_PATHS):
        assert models.find_rule(f"/made/up/{n}") is None
        assert models.find_rule(PATH) is RULE
    assert len(models._rule_by_path) <= MAX_PATHS


def test_a_model_behind_a_path_is_known_by_both() -> None:
    models = MergeTargets([RULE])
    one = models.get_target(PATH, "m", RULE)
    assert models.get_target(PATH, "m", RULE) is one
    assert models.get_target(PATH, "n", RULE) is not one
    assert models.get_target("/v1/other", "m", RULE) is not one
    assert [each.model for each in models] == ["m", "n", "m"]


def test_a_model_begins_with_what_its_rule_says() -> None:
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


def test_of_too_many_models_the_one_that_was_longest_not_asked_for_is_forgotten() -> None:
    models = MergeTargets([RULE])
    first, second = (models.get_target(PATH, name, RULE) for name in ("first", "second"))
    for n in range(MAX_TARGETS - 2):
        models.get_target(PATH, f"m-{n}", RULE)
    assert models.get_target(PATH, "first", RULE) is first
    models.get_target(PATH, "one more", RULE)
    assert len(list(models)) == MAX_TARGETS
    assert models.get_target(PATH, "first", RULE) is first
    assert models.get_target(PATH, "second", RULE) is not second


def test_a_name_without_end_is_shortened() -> None:
    models = MergeTargets([RULE])
    assert len(models.get_target(PATH, "x" * 10_000, RULE).model) <= MAX_MODEL_CHARS


def test_what_is_told_of_a_model() -> None:
    served = served_by(replace(RULE, max_items=3))
    assert served.build_status() == {
        "path": PATH,
        "model": "m",
        "shape": "embeddings",
        "mode": "on",
        "size": 3,
        "server_max_items": 3,
        "gain": None,
        "checked_calls": 0,
        "off_reason": None,
        "sentence": "up to 3 items a call; the server takes 3; its first answers are being compared",
    }
    served.size.gain = 2.34567
    served.size.turn_off("it mixes them up")
    told = served.build_status()
    assert (told["size"], told["gain"], told["off_reason"]) == (1, 2.346, "it mixes them up")


@pytest.mark.parametrize(("max_items", "unit", "units"), [(None, False, 10), (4, False, 4), (4, True, 1)])
def test_an_item_weighs_what_one_call_of_it_holds(max_items: int | None, unit: bool, units: int) -> None:
    rule = replace(RULE, max_items=max_items, unit_per_call=unit)
    assert rider(1, served_by(rule), TEXTS).units == units


# Answers to pieces.


def pieces_of(count: int = 1, body: bytes = b"{}") -> SplitList:
    return SplitList([], [body] * count)


def test_answers_to_pieces_are_kept_for_the_next_try_and_taken_once() -> None:
    done, served = PartialAnswers(), served_by()
    pieces = pieces_of()
    done.store_answers(rider(1, served), pieces)
    assert done.take_answers(rider(2, served)) is None
    assert done.take_answers(rider(1, served)) is pieces
    assert done.take_answers(rider(1, served)) is None


def test_those_of_another_request_are_not_taken_for_its_own() -> None:
    """An entry's number is of one request; should it ever not be, the secret of the request says so."""
    done, served = PartialAnswers(), served_by()
    done.store_answers(rider(1, served, token="mine"), pieces_of())
    assert done.take_answers(rider(1, served, token="another's")) is None


def test_where_no_piece_was_answered_nothing_is_kept() -> None:
    done, served = PartialAnswers(), served_by()
    done.store_answers(rider(1, served), pieces_of(0))
    assert done.take_answers(rider(1, served)) is None


def test_of_too_many_the_oldest_are_done_again() -> None:
    done, served = PartialAnswers(), served_by()
    for entry in range(MAX_SPLIT_LISTS + 2):
        done.store_answers(rider(entry, served), pieces_of())
    kept = [done.take_answers(rider(entry, served)) is not None for entry in range(MAX_SPLIT_LISTS + 2)]
    assert kept == [False, False, *[True] * MAX_SPLIT_LISTS]


def test_of_too_much_the_oldest_are_done_again() -> None:
    done, served = PartialAnswers(), served_by()
    third = bytes(MAX_ANSWER_BYTES // 3)
    for entry in range(4):
        done.store_answers(rider(entry, served), pieces_of(1, third))
    assert [done.take_answers(rider(entry, served)) is not None for entry in range(4)] == [
        False,
        True,
        True,
        True,
    ]
    done.store_answers(rider(5, served), pieces_of(4, third))
    assert done.take_answers(rider(5, served)) is None, "more than may be kept at all"


# Calls that the server takes.


def test_a_list_is_cut_where_it_is_known_to_be_too_long() -> None:
    served = served_by()
    item = rider(1, served, TEXTS)
    assert split_long_list(item) is None, "nothing is known"
    served.size.server_max_items = 10
    assert split_long_list(item) is None
    served.size.server_max_items = 4
    pieces = split_long_list(item)
    assert pieces is not None
    assert [part.size for part in pieces.parts] == [4, 4, 2]
    assert split_long_list(rider(2, served, "one text")) is None
    served.size.server_max_items, served.size.server_max_tokens = None, item.part.tokens // 2 + 1
    pieces = split_long_list(item)
    assert pieces is not None
    assert len(pieces.parts) > 1
    assert all(part.tokens <= served.size.server_max_tokens for part in pieces.parts)


def test_answers_to_pieces_are_joined_to_that_of_the_list() -> None:
    served = served_by(replace(RULE, max_items=4))
    item = rider(1, served, TEXTS)
    pieces = split_long_list(item)
    assert pieces is not None
    pieces.answers = [answer(TEXTS[at : at + 4]) for at in (0, 4, 8)]
    outcome = join_answers(item, pieces, 200)
    assert isinstance(outcome, Delivered)
    assert msgspec.json.decode(outcome.body) == msgspec.json.decode(answer(TEXTS))
    pieces.answers[1] = b"<html>"
    outcome = join_answers(item, pieces, 200)
    assert isinstance(outcome, Failed)
    assert outcome.why.startswith("the answers to 3 pieces of the list could not be joined: ")


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.just(inf), st.floats(1.0, 60.0)),
)
def test_calls_within_what_the_server_takes_hold_all_in_order(
    sizes: list[int], takes: int | None, tokens: float
) -> None:
    served = served_by()
    served.size.server_max_items, served.size.server_max_tokens = takes, tokens
    items = [rider(n, served, ["a text"] * size) for n, size in enumerate(sizes)]
    calls = list(split_by_limits(served, items))
    assert [item for call in calls for item in call] == items
    for call in calls:
        size = sum(item.part.size for item in call)
        assert len(call) == 1 or (
            size <= (takes or size) and sum(item.part.tokens for item in call) <= tokens
        )
    for call, following in pairwise(calls):
        more = [*call, following[0]]
        size = sum(item.part.size for item in more)
        assert size > (takes or size) or sum(item.part.tokens for item in more) > tokens, (
            "no more calls than it takes"
        )
