"""What a pool serves, and what becomes of a request for a model: each sentence of availability.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.models.availability import (
    DENIAL_S,
    MAX_DENIAL_S,
    MAX_REMEMBERED_MODELS,
    TRUST_S,
    Listing,
    ModelState,
    ModelTerms,
    NoSuchModel,
    PoolModels,
    SendToModel,
    WaitForModel,
    WhenNotServed,
)
from dispatcher.core.models.names import parse_model, says_no_model
from dispatcher.core.requests.lanes import MAX_MODEL_NAME_BYTES

WAIT, FAIL = WhenNotServed.WAIT, WhenNotServed.FAIL
MOVES = st.lists(
    st.one_of(
        st.tuples(
            st.just("round"),
            st.lists(
                st.tuples(
                    st.sampled_from("abc"),
                    st.one_of(st.none(), st.lists(st.sampled_from("xyz"), max_size=3)),
                    st.lists(st.sampled_from("xyz"), max_size=1),
                ),
                max_size=3,
                unique_by=lambda each: each[0],
            ),
        ),
        st.tuples(st.just("denied"), st.sampled_from("xyz")),
        st.tuples(st.just("answered"), st.sampled_from("xyz")),
        st.tuples(st.just("passes"), st.floats(0, 400)),
    ),
    max_size=30,
)


class Pool:
    """Endpoints that say what they are told to, and time."""

    def __init__(self, terms: ModelTerms | None = None) -> None:
        self.now = 100.0
        self.models = PoolModels(terms or ModelTerms(), self.now)

    def round(self, **said: Any) -> list[tuple[str, ModelState]]:
        """Each endpoint's models as words; None: unreadable; `+x`: it loads x."""
        self.now += 1.0
        listings = [listing(name, self.now, words) for name, words in said.items()]
        return [
            (each.snapshot.name, each.snapshot.state)
            for each in self.models.record_listings(listings, self.now)
        ]

    def verdict(self, model: str) -> type[Any]:
        return type(self.models.decide_request(model, self.now))

    def why(self, model: str) -> str:
        verdict = self.models.decide_request(model, self.now)
        assert isinstance(verdict, WaitForModel | NoSuchModel)
        return verdict.why

    def state(self, model: str) -> ModelState:
        return self.models.make_snapshot(model, self.now).state


def listing(name: str, at: float, words: str | None) -> Listing:
    if words is None:
        return Listing(name, at, None, problem="it does not answer")
    named = words.split()
    served = tuple(each for each in named if not each.startswith("+"))
    return Listing(name, at, served, tuple(each[1:] for each in named if each.startswith("+")))


def named(**models: WhenNotServed) -> ModelTerms:
    return ModelTerms(models)


def test_a_model_that_any_endpoint_names_is_ready() -> None:
    pool = Pool(named(m=WAIT))
    assert pool.round(a="", b="m") == [("m", ModelState.READY)]
    assert pool.verdict("m") is SendToModel
    seen = pool.models.make_snapshot("m", pool.now)
    assert (seen.serving_count, seen.endpoint_count, seen.unread_count, seen.is_named, seen.state_since) == (
        1,
        2,
        0,
        True,
        101.0,
    )


def test_a_named_model_that_nobody_serves_is_waited_for() -> None:
    pool = Pool(named(m=WAIT))
    pool.round(a="", b="x")
    assert pool.why("m") == "model 'm' is served by none of 2 endpoints"
    pool.round(a="+m", b="x")
    assert pool.why("m") == "model 'm' is being loaded"
    assert pool.state("m") is ModelState.LOADING


def test_a_model_that_was_served_before_is_waited_for_as_the_settings_say() -> None:
    for rule, verdict in ((WAIT, WaitForModel), (FAIL, NoSuchModel)):
        pool = Pool(ModelTerms(when_not_served=rule))
        pool.round(a="m")
        assert pool.round(a="x") == [("m", ModelState.ABSENT), ("x", ModelState.READY)]
        assert pool.verdict("m") is verdict


def test_an_unknown_model_ends_at_once_with_the_names_that_exist() -> None:
    pool = Pool(named(n=WAIT))
    pool.round(a="x", b="y")
    assert pool.verdict("m") is NoSuchModel
    assert pool.why("m") == "no model 'm' is served here: there are 'x', 'y'"
    pool.round(a="x", b="x")
    assert pool.why("m") == "no model 'm' is served here: there is 'x'"
    pool.round(a=" ".join(f"m{number:02}" for number in range(12)))
    assert pool.why("m").endswith("'m09' and 2 more")
    pool.round(a="")
    assert pool.why("m") == "no model 'm' is served here: none is"


def test_a_named_one_that_is_to_fail_fails_once_it_is_surely_not_there() -> None:
    pool = Pool(named(m=FAIL))
    assert pool.verdict("m") is SendToModel, "nobody was asked: the server is to say"
    pool.round(a="x", b=None)
    assert pool.verdict("m") is SendToModel
    pool.round(a="x", b="+m")
    assert pool.verdict("m") is NoSuchModel, "a loading one is not there either"
    pool.round(a="x", b="")
    assert pool.verdict("m") is NoSuchModel


def test_one_endpoint_that_cannot_be_read_holds_back_nothing_that_others_serve() -> None:
    pool = Pool(named(m=WAIT, n=WAIT))
    pool.round(a=None, b="m")
    assert pool.verdict("m") is SendToModel
    assert pool.why("n") == (
        "model 'n' cannot be known: 1 of 2 endpoints cannot be read: a: it does not answer"
    )
    assert pool.verdict("other") is SendToModel, "it may be served there: the server is to say"
    assert pool.models.problems == {"a": "it does not answer"}


def test_before_the_first_round_and_without_endpoints_a_named_model_is_not_known() -> None:
    pool = Pool(named(m=WAIT))
    assert pool.why("m") == "model 'm' is not known yet: no endpoint was asked"
    pool.round()
    assert pool.why("m") == "model 'm' cannot be served: the pool has no endpoint"
    assert pool.verdict("other") is SendToModel
    assert pool.verdict("") is SendToModel, "it names none"


def test_an_endpoint_is_believed_for_a_while_after_it_could_be_read() -> None:
    pool = Pool(named(m=WAIT))
    pool.round(a="m")
    pool.now += TRUST_S - 1.5
    assert pool.round(a=None) == []
    assert pool.verdict("m") is SendToModel
    pool.now += 0.5
    assert pool.round(a=None) == [("m", ModelState.UNKNOWN)]
    assert pool.verdict("m") is WaitForModel
    assert pool.round(a="m") == [("m", ModelState.READY)]


def test_an_endpoint_that_has_left_is_forgotten_with_what_it_said() -> None:
    pool = Pool(named(m=WAIT))
    pool.round(a="m", b="x")
    assert pool.round(b="x") == [("m", ModelState.ABSENT)]
    assert pool.round(a=None, b="x") == [("m", ModelState.UNKNOWN)], "it is new, and says nothing"


def test_an_answer_that_it_is_not_there_counts_until_a_newer_listing() -> None:
    pool = Pool(named(m=WAIT))
    pool.round(a="m")
    pool.models.record_denial("m", pool.now, pool.now + 0.5)
    pool.now += 0.5
    assert pool.why("m") == "model 'm' is listed, and the server answers that it is not there"
    assert pool.models.make_snapshot("m", pool.now).is_denied
    pool.now += DENIAL_S
    assert pool.verdict("m") is WaitForModel, "no listing since"
    pool.round(a="m")
    assert pool.verdict("m") is SendToModel


def test_each_further_denial_holds_twice_as_long_until_one_is_answered() -> None:
    pool = Pool(named(m=WAIT))
    for hold_s in (DENIAL_S, 2 * DENIAL_S, 4 * DENIAL_S):
        pool.round(a="m")
        sent_at = pool.now
        pool.models.record_denial("m", sent_at, sent_at)
        pool.models.record_denial("m", sent_at - 0.1, sent_at + 0.1)  # sent together with it
        pool.now += hold_s - 2.0
        pool.round(a="m")
        assert pool.verdict("m") is WaitForModel
        pool.now += 1.0
        pool.round(a="m")
        assert pool.verdict("m") is SendToModel
    pool.models.record_answer("m", pool.now)
    sent_at = pool.now + 1
    pool.models.record_denial("m", sent_at, sent_at)
    pool.now += DENIAL_S + 1
    pool.round(a="m")
    assert pool.verdict("m") is SendToModel
    for _ in range(20):
        pool.models.record_denial("m", pool.now, pool.now)
        pool.now += MAX_DENIAL_S
        pool.round(a="m")
    assert pool.verdict("m") is SendToModel, "never longer than DENIED_MOST_S"


def test_an_answer_sent_before_the_denial_does_not_end_it() -> None:
    pool = Pool(named(m=WAIT))
    pool.round(a="m")
    pool.models.record_denial("m", pool.now, pool.now)
    pool.models.record_answer("m", pool.now - 0.1)
    assert pool.verdict("m") is WaitForModel
    pool.models.record_answer("m", pool.now + 0.1)
    assert pool.verdict("m") is SendToModel


def test_where_only_some_endpoints_serve_a_model_a_denial_may_be_of_the_others() -> None:
    pool = Pool(named(m=WAIT))
    pool.round(a="m", b="x")
    assert pool.models.is_partly_served("m")
    for _ in range(20):
        pool.models.record_denial("m", pool.now, pool.now)
        pool.now += 1.0
    assert pool.verdict("m") is SendToModel
    pool.round(a="m", b="m")
    assert not pool.models.is_partly_served("m")
    assert pool.verdict("m") is SendToModel, "what came to the others counts no more than it did then"


def test_denials_count_from_the_first_again_where_other_endpoints_list_it() -> None:
    pool = Pool(named(m=WAIT))
    for _ in range(6):
        pool.round(a="m")
        pool.models.record_denial("m", pool.now, pool.now)
        pool.now += MAX_DENIAL_S
    pool.round(a="m", b="m")
    pool.models.record_denial("m", pool.now, pool.now)
    pool.now += DENIAL_S
    pool.round(a="m", b="m")
    assert pool.verdict("m") is SendToModel


def test_how_it_is_with_a_model_is_one_sentence() -> None:
    pool = Pool(named(m=WAIT, n=WAIT))
    assert pool.models.describe_model("m", pool.now) == "it is not known yet: no endpoint was asked"
    pool.round(a="m", b="m x")
    assert pool.models.describe_model("m", pool.now) == "it is served"
    assert pool.models.describe_model("x", pool.now) == "it is served by 1 of 2 endpoints"
    assert pool.models.describe_model("n", pool.now) == "it is served by none of 2 endpoints"


def test_what_is_waited_for_is_expected_and_new_terms_hold_at_once() -> None:
    pool = Pool()
    pool.models.expect_models(["m"])
    pool.round(a="x")
    assert pool.verdict("m") is WaitForModel
    pool.models.reconfigure(ModelTerms({"m": FAIL}))
    assert pool.verdict("m") is NoSuchModel
    assert pool.models.list_known() == ["m", "x"]


def test_what_is_remembered_is_bounded() -> None:
    pool = Pool()
    pool.models.expect_models(str(number) for number in range(MAX_REMEMBERED_MODELS + 100))
    assert len(pool.models.list_known()) == MAX_REMEMBERED_MODELS
    pool.round(a="x")
    assert pool.verdict("99") is NoSuchModel, "the oldest are forgotten"
    assert pool.verdict(str(MAX_REMEMBERED_MODELS)) is WaitForModel
    long = "m" * (MAX_MODEL_NAME_BYTES + 1)
    pool.models.expect_models([long])
    assert pool.verdict(long) is NoSuchModel, "longer names are of no model"


@given(MOVES, st.sampled_from([WAIT, FAIL]), st.sampled_from([WAIT, FAIL]))
def test_every_history(moves: list[tuple[Any, ...]], of_x: WhenNotServed, of_others: WhenNotServed) -> None:
    """Nothing raises; what is told to have changed is what has changed; a model that an endpoint names and
    nobody denies goes; one that is to wait never ends."""
    pool = Pool(ModelTerms({"x": of_x}, of_others))
    states: dict[str, ModelState] = {}
    denied: set[str] = set()
    for move in moves:
        match move:
            case ("round", endpoints):
                said = {
                    name: None if models is None else " ".join([*models, *(f"+{each}" for each in loads)])
                    for name, models, loads in endpoints
                }
                for name, state in pool.round(**said):
                    assert states.get(name, ModelState.UNKNOWN) is not state
                    states[name] = state
                listed = {each for _, models, _ in endpoints for each in models or ()}
                for name in listed - denied:
                    assert pool.verdict(name) is SendToModel
                for name in pool.models.list_known():
                    assert states.get(name, ModelState.UNKNOWN) is pool.state(name)
            case ("denied", name):
                pool.models.record_denial(name, pool.now, pool.now)
                denied.add(name)
            case ("answered", name):
                pool.models.record_answer(name, pool.now)
            case ("passes", seconds):
                pool.now += seconds
        if of_x is WAIT:
            assert pool.verdict("x") is not NoSuchModel


VLLM = {"message": "The model `m` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
OPENAI = {"message": "The model 'm' does not exist.", "type": "x", "param": None, "code": "model_not_found"}


@pytest.mark.parametrize(
    ("status", "body", "yes"),
    [
        (404, {"object": "error", **VLLM}, True),
        (404, {"error": VLLM | {"param": None}}, True),
        (404, {"error": OPENAI}, True),
        (400, {"error": OPENAI}, True),
        (404, {"error": "The model `m` does not exist."}, False),
        (404, {"message": "model m not found"}, True),
        (404, {"detail": "Not Found"}, False),
        (404, {"message": "no response 'r' of model 'other'", "type": "NotFoundError"}, False),
        (404, {"message": "The file of model m is gone", "type": "FileError"}, False),
        (400, VLLM, False),
        (200, {"error": OPENAI}, False),
        (404, [], False),
        (404, None, False),
    ],
)
def test_which_answers_say_that_there_is_no_such_model(status: int, body: Any, yes: bool) -> None:
    assert says_no_model(status, json.dumps(body).encode(), "m") is yes


def test_what_is_no_answer_says_nothing() -> None:
    for body in (b"", b"<html>", b"\xff", b'{"message":' + b"[" * 100_000):
        assert not says_no_model(404, body, "m")
    assert not says_no_model(404, b'{"code": "model_not_found"}', "")


@pytest.mark.parametrize(
    ("payload", "model"),
    [
        (b'{"model": "m", "prompt": "half \\ud800 a pair"}', "m"),
        (b'{"model": "m", "prompt": "x"}', "m"),
        (b'{"model": "a", "model": "m"}', "m"),
        (b'{"model": "m\\u00e9"}', "mé"),
        (b'{"prompt": {"model": "m"}}', ""),
        (b'{"model": null}', ""),
        (b'{"model": 7}', ""),
        (b"{", ""),
        (b'{"model": "\xff"}', ""),
        (b'{"a": ' + b"[" * 100_000, ""),
    ],
)
def test_the_model_that_a_body_names(payload: bytes, model: str) -> None:
    assert parse_model(payload) == model


def test_of_each_model_it_is_known_who_lists_it_and_whether_that_may_be_another_process() -> None:
    pool = PoolModels(ModelTerms(), 0.0)
    pool.record_listings([Listing("a", 0.0, ("m", "n"), ("o",)), Listing("b", 0.0, ("m",))], 0.0)
    assert pool.endpoints == {"a", "b"}
    assert pool.list_ready(1.0) == {"m": {"a", "b"}, "n": {"a"}}
    assert pool.loading_models == {"o"}
    assert [pool.is_gone("m", "a"), pool.is_gone("n", "b"), pool.is_gone("m", "c")] == [False, True, True]
    pool.record_denial("n", 1.0, 2.0)
    assert "n" in pool.list_ready(3.0), "it may have come to the other endpoint"
    pool.record_listings(
        [Listing("a", 3.0, None, problem="late"), Listing("b", 3.0, None, problem="x", is_down=True)], 3.0
    )
    assert [pool.is_gone("m", "a"), pool.is_gone("m", "b")] == [False, True]
    pool.record_listings([Listing("a", 4.0, ("m",))], 4.0)
    pool.record_denial("m", 5.0, 6.0)
    assert pool.list_ready(6.0) == {}
