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
from dispatcher.core.merging.grouping import BatchRule, Forming, Mode
from dispatcher.dispatch.merging.merged_calls import (
    MODEL_CHARS,
    MODELS_MOST,
    PATHS_MOST,
    PROGRESS_BYTES,
    PROGRESS_MOST,
    CutList,
    PiecesDone,
    ServedModels,
    cut_list,
    joined,
    within,
)
from tests.dispatch.embedder import answer
from tests.dispatch.riders import PATH, RULE, rider, served_by

ANY = replace(RULE, paths=("/v1/*", "/models/*:predict"), forming=Forming(9))
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
    models = ServedModels([RULE, ANY])
    assert models.rule(path) is rule
    assert models.rule(path) is rule, "and so it does when it is asked for again"


def test_without_rules_none_counts() -> None:
    assert ServedModels([]).rule(PATH) is None


def test_paths_that_producers_make_up_are_not_kept_without_end() -> None:
    models = ServedModels([RULE])
    for n in range(3 * PATHS_MOST):
        assert models.rule(f"/made/up/{n}") is None
        assert models.rule(PATH) is RULE
    assert len(models._by_path) <= PATHS_MOST


def test_a_model_behind_a_path_is_known_by_both() -> None:
    models = ServedModels([RULE])
    one = models.of(PATH, "m", RULE)
    assert models.of(PATH, "m", RULE) is one
    assert models.of(PATH, "n", RULE) is not one
    assert models.of("/v1/other", "m", RULE) is not one
    assert [each.model for each in models] == ["m", "n", "m"]


def test_a_model_begins_with_what_its_rule_says() -> None:
    rule = replace(RULE, mode=Mode.AUTO, max_items=7, forming=Forming(5, (2,), max_weight=11.0))
    size = ServedModels([rule]).of(PATH, "m", rule).size
    assert (size.mode, size.max_size, size.preferred, size.takes, size.tokens) == (
        Mode.AUTO,
        5,
        (2,),
        7,
        11.0,
    )


def test_of_too_many_models_the_one_that_was_longest_not_asked_for_is_forgotten() -> None:
    models = ServedModels([RULE])
    first, second = (models.of(PATH, name, RULE) for name in ("first", "second"))
    for n in range(MODELS_MOST - 2):
        models.of(PATH, f"m-{n}", RULE)
    assert models.of(PATH, "first", RULE) is first
    models.of(PATH, "one more", RULE)
    assert len(list(models)) == MODELS_MOST
    assert models.of(PATH, "first", RULE) is first
    assert models.of(PATH, "second", RULE) is not second


def test_a_name_without_end_is_shortened() -> None:
    models = ServedModels([RULE])
    assert len(models.of(PATH, "x" * 10_000, RULE).model) <= MODEL_CHARS


def test_what_is_told_of_a_model() -> None:
    served = served_by(replace(RULE, max_items=3))
    assert served.told() == {
        "path": PATH,
        "model": "m",
        "shape": "embeddings",
        "mode": "on",
        "size": 3,
        "takes": 3,
        "gain": None,
        "checked": 0,
        "why_off": None,
        "sentence": "up to 3 items a call; the server takes 3; its first answers are being compared",
    }
    served.size.gain = 2.34567
    served.size.off("it mixes them up")
    told = served.told()
    assert (told["size"], told["gain"], told["why_off"]) == (1, 2.346, "it mixes them up")


@pytest.mark.parametrize(("max_items", "unit", "units"), [(None, False, 10), (4, False, 4), (4, True, 1)])
def test_an_item_weighs_what_one_call_of_it_holds(max_items: int | None, unit: bool, units: int) -> None:
    rule = replace(RULE, max_items=max_items, unit_per_call=unit)
    assert rider(1, served_by(rule), TEXTS).units == units


# Answers to pieces.


def pieces_of(count: int = 1, body: bytes = b"{}") -> CutList:
    return CutList([], [body] * count)


def test_answers_to_pieces_are_kept_for_the_next_try_and_taken_once() -> None:
    done, served = PiecesDone(), served_by()
    pieces = pieces_of()
    done.keep(rider(1, served), pieces)
    assert done.take(rider(2, served)) is None
    assert done.take(rider(1, served)) is pieces
    assert done.take(rider(1, served)) is None


def test_those_of_another_request_are_not_taken_for_its_own() -> None:
    """An entry's number is of one request; should it ever not be, the secret of the request says so."""
    done, served = PiecesDone(), served_by()
    done.keep(rider(1, served, token="mine"), pieces_of())
    assert done.take(rider(1, served, token="another's")) is None


def test_where_no_piece_was_answered_nothing_is_kept() -> None:
    done, served = PiecesDone(), served_by()
    done.keep(rider(1, served), pieces_of(0))
    assert done.take(rider(1, served)) is None


def test_of_too_many_the_oldest_are_done_again() -> None:
    done, served = PiecesDone(), served_by()
    for entry in range(PROGRESS_MOST + 2):
        done.keep(rider(entry, served), pieces_of())
    kept = [done.take(rider(entry, served)) is not None for entry in range(PROGRESS_MOST + 2)]
    assert kept == [False, False, *[True] * PROGRESS_MOST]


def test_of_too_much_the_oldest_are_done_again() -> None:
    done, served = PiecesDone(), served_by()
    third = bytes(PROGRESS_BYTES // 3)
    for entry in range(4):
        done.keep(rider(entry, served), pieces_of(1, third))
    assert [done.take(rider(entry, served)) is not None for entry in range(4)] == [False, True, True, True]
    done.keep(rider(5, served), pieces_of(4, third))
    assert done.take(rider(5, served)) is None, "more than may be kept at all"


# Calls that the server takes.


def test_a_list_is_cut_where_it_is_known_to_be_too_long() -> None:
    served = served_by()
    item = rider(1, served, TEXTS)
    assert cut_list(item) is None, "nothing is known"
    served.size.takes = 10
    assert cut_list(item) is None
    served.size.takes = 4
    pieces = cut_list(item)
    assert pieces is not None
    assert [part.size for part in pieces.parts] == [4, 4, 2]
    assert cut_list(rider(2, served, "one text")) is None
    served.size.takes, served.size.tokens = None, item.part.tokens // 2 + 1
    pieces = cut_list(item)
    assert pieces is not None
    assert len(pieces.parts) > 1
    assert all(part.tokens <= served.size.tokens for part in pieces.parts)


def test_answers_to_pieces_are_joined_to_that_of_the_list() -> None:
    served = served_by(replace(RULE, max_items=4))
    item = rider(1, served, TEXTS)
    pieces = cut_list(item)
    assert pieces is not None
    pieces.bodies = [answer(TEXTS[at : at + 4]) for at in (0, 4, 8)]
    outcome = joined(item, pieces, 200)
    assert isinstance(outcome, Delivered)
    assert msgspec.json.decode(outcome.body) == msgspec.json.decode(answer(TEXTS))
    pieces.bodies[1] = b"<html>"
    outcome = joined(item, pieces, 200)
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
    served.size.takes, served.size.tokens = takes, tokens
    items = [rider(n, served, ["a text"] * size) for n, size in enumerate(sizes)]
    calls = list(within(served, items))
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
