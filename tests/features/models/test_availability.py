"""Models that a pool serves, and the decision for a request: each sentence of availability.py."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.models.availability import (
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
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES

WAIT, FAIL = WhenNotServed.WAIT, WhenNotServed.FAIL
event_lists = st.lists(
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
        st.tuples(st.just("time passes"), st.floats(0, 400)),
    ),
    max_size=30,
)


class Pool:
    """Models of a pool whose endpoints and time are set by the test."""

    def __init__(self, terms: ModelTerms | None = None) -> None:
        self.now = 100.0
        self.models = PoolModels(terms or ModelTerms(), self.now)

    def record_round(self, **models_by_endpoint: Any) -> list[tuple[str, ModelState]]:
        """Record a round of listings and return the changes.

        Models are separated by spaces. `+x` means that the endpoint loads x, `None` that it cannot be read.
        """
        self.now += 1.0
        listings = [make_listing(name, self.now, models) for name, models in models_by_endpoint.items()]
        return [(model.name, model.state) for model, _ in self.models.record_listings(listings, self.now)]

    def get_decision_type(self, model: str) -> type[Any]:
        return type(self.models.decide_request(model, self.now))

    def get_reason(self, model: str) -> str:
        decision = self.models.decide_request(model, self.now)
        assert isinstance(decision, WaitForModel | NoSuchModel)
        return decision.why

    def get_state(self, model: str) -> ModelState:
        return self.models.make_snapshot(model, self.now).state


def make_listing(name: str, at: float, models: str | None) -> Listing:
    if models is None:
        return Listing(name, at, None, problem="it does not answer")
    names = models.split()
    served = tuple(each for each in names if not each.startswith("+"))
    return Listing(name, at, served, tuple(each[1:] for each in names if each.startswith("+")))


def make_terms(**models: WhenNotServed) -> ModelTerms:
    return ModelTerms(models)


def test_model_that_any_endpoint_lists_is_ready() -> None:
    pool = Pool(make_terms(m=WAIT))
    assert pool.record_round(a="", b="m") == [("m", ModelState.READY)]
    assert pool.get_decision_type("m") is SendToModel
    snapshot = pool.models.make_snapshot("m", pool.now)
    assert (
        snapshot.serving_count,
        snapshot.endpoint_count,
        snapshot.unread_count,
        snapshot.is_named,
        snapshot.state_since,
    ) == (
        1,
        2,
        0,
        True,
        101.0,
    )


def test_requests_wait_for_a_named_model_that_is_not_served() -> None:
    pool = Pool(make_terms(m=WAIT))
    pool.record_round(a="", b="x")
    assert pool.get_reason("m") == "model 'm' is served by none of 2 endpoints"
    pool.record_round(a="+m", b="x")
    assert pool.get_reason("m") == "model 'm' is being loaded"
    assert pool.get_state("m") is ModelState.LOADING


def test_requests_for_a_model_that_was_served_before_follow_the_settings() -> None:
    for rule, decision_type in ((WAIT, WaitForModel), (FAIL, NoSuchModel)):
        pool = Pool(ModelTerms(when_not_served=rule))
        pool.record_round(a="m")
        assert pool.record_round(a="x") == [("m", ModelState.ABSENT), ("x", ModelState.READY)]
        assert pool.get_decision_type("m") is decision_type


def test_request_for_an_unknown_model_is_rejected_with_the_names_of_served_models() -> None:
    pool = Pool(make_terms(n=WAIT))
    pool.record_round(a="x", b="y")
    assert pool.get_decision_type("m") is NoSuchModel
    assert pool.get_reason("m") == "no model 'm' is served here: there are 'x', 'y'"
    pool.record_round(a="x", b="x")
    assert pool.get_reason("m") == "no model 'm' is served here: there is 'x'"
    pool.record_round(a=" ".join(f"m{number:02}" for number in range(12)))
    assert pool.get_reason("m").endswith("'m09' and 2 more")
    pool.record_round(a="")
    assert pool.get_reason("m") == "no model 'm' is served here: none is"


def test_request_for_a_named_model_fails_only_once_it_is_certainly_not_served() -> None:
    pool = Pool(make_terms(m=FAIL))
    assert pool.get_decision_type("m") is SendToModel, "no endpoint was asked yet, so the server decides"
    pool.record_round(a="x", b=None)
    assert pool.get_decision_type("m") is SendToModel
    pool.record_round(a="x", b="+m")
    assert pool.get_decision_type("m") is NoSuchModel, "a model that is being loaded is not served either"
    pool.record_round(a="x", b="")
    assert pool.get_decision_type("m") is NoSuchModel


def test_unreadable_endpoint_does_not_stop_requests_for_models_that_others_serve() -> None:
    pool = Pool(make_terms(m=WAIT, n=WAIT))
    pool.record_round(a=None, b="m")
    assert pool.get_decision_type("m") is SendToModel
    assert pool.get_reason("n") == (
        "model 'n' cannot be known: 1 of 2 endpoints cannot be read: a: it does not answer"
    )
    assert pool.get_decision_type("other") is SendToModel, (
        "the unreadable endpoint may serve it, so the server decides"
    )
    assert pool.models.problems == {"a": "it does not answer"}


def test_named_model_is_unknown_before_the_first_round_and_without_endpoints() -> None:
    pool = Pool(make_terms(m=WAIT))
    assert pool.get_reason("m") == "model 'm' is not known yet: no endpoint was asked"
    pool.record_round()
    assert pool.get_reason("m") == "model 'm' cannot be served: the pool has no endpoint"
    assert pool.get_decision_type("other") is SendToModel
    assert pool.get_decision_type("") is SendToModel, "the request names no model"


def test_last_listing_of_an_unreadable_endpoint_counts_for_a_while() -> None:
    pool = Pool(make_terms(m=WAIT))
    pool.record_round(a="m")
    pool.now += TRUST_S - 1.5
    assert pool.record_round(a=None) == []
    assert pool.get_decision_type("m") is SendToModel
    pool.now += 0.5
    assert pool.record_round(a=None) == [("m", ModelState.UNKNOWN)]
    assert pool.get_decision_type("m") is WaitForModel
    assert pool.record_round(a="m") == [("m", ModelState.READY)]


def test_listing_of_an_endpoint_that_has_left_is_forgotten() -> None:
    pool = Pool(make_terms(m=WAIT))
    pool.record_round(a="m", b="x")
    assert pool.record_round(b="x") == [("m", ModelState.ABSENT)]
    assert pool.record_round(a=None, b="x") == [("m", ModelState.UNKNOWN)], (
        "the endpoint is new and cannot be read"
    )


def test_denial_counts_until_a_newer_listing() -> None:
    pool = Pool(make_terms(m=WAIT))
    pool.record_round(a="m")
    pool.models.record_denial("m", pool.now, pool.now + 0.5)
    pool.now += 0.5
    assert pool.get_reason("m") == "model 'm' is listed, and the server answers that it is not there"
    assert pool.models.make_snapshot("m", pool.now).is_denied
    pool.now += DENIAL_S
    assert pool.get_decision_type("m") is WaitForModel, "there is no newer listing"
    pool.record_round(a="m")
    assert pool.get_decision_type("m") is SendToModel


def test_each_further_denial_counts_twice_as_long_until_a_request_is_answered() -> None:
    pool = Pool(make_terms(m=WAIT))
    for denial_s in (DENIAL_S, 2 * DENIAL_S, 4 * DENIAL_S):
        pool.record_round(a="m")
        sent_at = pool.now
        pool.models.record_denial("m", sent_at, sent_at)
        pool.models.record_denial(
            "m", sent_at - 0.1, sent_at + 0.1
        )  # a request that was sent at the same time
        pool.now += denial_s - 2.0
        pool.record_round(a="m")
        assert pool.get_decision_type("m") is WaitForModel
        pool.now += 1.0
        pool.record_round(a="m")
        assert pool.get_decision_type("m") is SendToModel
    pool.models.record_answer("m", pool.now)
    sent_at = pool.now + 1
    pool.models.record_denial("m", sent_at, sent_at)
    pool.now += DENIAL_S + 1
    pool.record_round(a="m")
    assert pool.get_decision_type("m") is SendToModel
    for _ in range(20):
        pool.models.record_denial("m", pool.now, pool.now)
        pool.now += MAX_DENIAL_S
        pool.record_round(a="m")
    assert pool.get_decision_type("m") is SendToModel, "a denial never counts longer than MAX_DENIAL_S"


def test_an_answer_sent_before_the_denial_does_not_end_it() -> None:
    pool = Pool(make_terms(m=WAIT))
    pool.record_round(a="m")
    pool.models.record_denial("m", pool.now, pool.now)
    pool.models.record_answer("m", pool.now - 0.1)
    assert pool.get_decision_type("m") is WaitForModel
    pool.models.record_answer("m", pool.now + 0.1)
    assert pool.get_decision_type("m") is SendToModel


def test_denial_is_ignored_while_only_some_endpoints_serve_the_model() -> None:
    pool = Pool(make_terms(m=WAIT))
    pool.record_round(a="m", b="x")
    assert pool.models.is_partly_served("m")
    for _ in range(20):
        pool.models.record_denial("m", pool.now, pool.now)
        pool.now += 1.0
    assert pool.get_decision_type("m") is SendToModel
    pool.record_round(a="m", b="m")
    assert not pool.models.is_partly_served("m")
    assert pool.get_decision_type("m") is SendToModel, (
        "denials from other endpoints do not count later either"
    )


def test_count_of_denials_begins_anew_if_other_endpoints_list_the_model() -> None:
    pool = Pool(make_terms(m=WAIT))
    for _ in range(6):
        pool.record_round(a="m")
        pool.models.record_denial("m", pool.now, pool.now)
        pool.now += MAX_DENIAL_S
    pool.record_round(a="m", b="m")
    pool.models.record_denial("m", pool.now, pool.now)
    pool.now += DENIAL_S
    pool.record_round(a="m", b="m")
    assert pool.get_decision_type("m") is SendToModel


def test_state_of_a_model_is_described_in_one_sentence() -> None:
    pool = Pool(make_terms(m=WAIT, n=WAIT))
    assert pool.models.describe_model("m", pool.now) == "it is not known yet: no endpoint was asked"
    pool.record_round(a="m", b="m x")
    assert pool.models.describe_model("m", pool.now) == "it is served"
    assert pool.models.describe_model("x", pool.now) == "it is served by 1 of 2 endpoints"
    assert pool.models.describe_model("n", pool.now) == "it is served by none of 2 endpoints"


def test_expected_model_is_waited_for_and_new_settings_apply_at_once() -> None:
    pool = Pool()
    pool.models.expect_models(["m"])
    pool.record_round(a="x")
    assert pool.get_decision_type("m") is WaitForModel
    pool.models.terms = ModelTerms({"m": FAIL})
    assert pool.get_decision_type("m") is NoSuchModel
    assert pool.models.list_known() == ["m", "x"]


def test_number_of_remembered_models_is_limited() -> None:
    pool = Pool()
    pool.models.expect_models(str(number) for number in range(MAX_REMEMBERED_MODELS + 100))
    assert len(pool.models.list_known()) == MAX_REMEMBERED_MODELS
    pool.record_round(a="x")
    assert pool.get_decision_type("99") is NoSuchModel, "the oldest models are forgotten"
    assert pool.get_decision_type(str(MAX_REMEMBERED_MODELS)) is WaitForModel
    long_name = "m" * (MAX_MODEL_NAME_BYTES + 1)
    pool.models.expect_models([long_name])
    assert pool.get_decision_type(long_name) is NoSuchModel, "no model is expected under a longer name"


@given(event_lists, st.sampled_from([WAIT, FAIL]), st.sampled_from([WAIT, FAIL]))
def test_states_and_decisions_are_consistent_in_every_history(
    events: list[tuple[Any, ...]], rule_for_x: WhenNotServed, rule_for_others: WhenNotServed
) -> None:
    """Reported changes are the changes of the states. Requests are sent for a model that an endpoint lists
    and no answer denied. Requests for a model that is to be waited for never end."""
    pool = Pool(ModelTerms({"x": rule_for_x}, rule_for_others))
    states: dict[str, ModelState] = {}
    denied: set[str] = set()
    for event in events:
        match event:
            case ("round", endpoints):
                models_by_endpoint = {
                    name: None if models is None else " ".join([*models, *(f"+{each}" for each in loading)])
                    for name, models, loading in endpoints
                }
                for name, state in pool.record_round(**models_by_endpoint):
                    assert states.get(name, ModelState.UNKNOWN) is not state
                    states[name] = state
                listed = {each for _, models, _ in endpoints for each in models or ()}
                for name in listed - denied:
                    assert pool.get_decision_type(name) is SendToModel
                for name in pool.models.list_known():
                    assert states.get(name, ModelState.UNKNOWN) is pool.get_state(name)
            case ("denied", name):
                pool.models.record_denial(name, pool.now, pool.now)
                denied.add(name)
            case ("answered", name):
                pool.models.record_answer(name, pool.now)
            case ("time passes", seconds):
                pool.now += seconds
        if rule_for_x is WAIT:
            assert pool.get_decision_type("x") is not NoSuchModel


def test_ready_models_are_listed_with_their_endpoints_and_gone_ones_are_known() -> None:
    models = PoolModels(ModelTerms(), 0.0)
    models.record_listings([Listing("a", 0.0, ("m", "n"), ("o",)), Listing("b", 0.0, ("m",))], 0.0)
    assert models.endpoints == {"a", "b"}
    assert models.list_ready(1.0) == {"m": {"a", "b"}, "n": {"a"}}
    assert models.loading_models == {"o"}
    assert [models.is_gone("m", "a"), models.is_gone("n", "b"), models.is_gone("m", "c")] == [
        False,
        True,
        True,
    ]
    models.record_denial("n", 1.0, 2.0)
    assert "n" in models.list_ready(3.0), "the denied request may have reached the other endpoint"
    models.record_listings(
        [Listing("a", 3.0, None, problem="late"), Listing("b", 3.0, None, problem="x", is_down=True)], 3.0
    )
    assert [models.is_gone("m", "a"), models.is_gone("m", "b")] == [False, True]
    models.record_listings([Listing("a", 4.0, ("m",))], 4.0)
    models.record_denial("m", 5.0, 6.0)
    assert models.list_ready(6.0) == {}
