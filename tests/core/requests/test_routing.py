"""Routing of requests and the headers they are sent with, decided without a connection.

See docs/reference/forwarding.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.outcome import Refused
from dispatcher.core.requests.headers import (
    FORBIDDEN_HEADERS,
    FORBIDDEN_PREFIXES,
    RESTRICTED_HEADERS,
    RESTRICTED_PREFIXES,
)
from dispatcher.core.requests.request import Request, encode_member, parse_member
from dispatcher.core.requests.routing import MAX_ENDPOINT_CHARS, Route

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


@dataclass(frozen=True)
class Options:
    path: str = "/v1/completions"
    allowed_paths: Sequence[str] = ("/v1/*",)
    allowed_headers: Sequence[str] | None = None
    objective: str = ""
    fairness_from: str = "userid"
    headers: Mapping[str, str] = field(default_factory=dict)


def route(**options: object) -> Route:
    return Route(Options(**options), user_agent="us/1")  # type: ignore[arg-type]


def a_request(
    headers: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    request_id: str = "r-1",
) -> Request:
    member = encode_member(request_id, b"{}", 2_000_000_000, headers=headers or {}, metadata=metadata or {})
    request = parse_member(member)
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize("endpoint", ["", "/v1/completions", "/v1/chat/completions", "/v1/a-b_c.d~e/"])
def test_default_and_allowed_paths_are_taken(endpoint: str) -> None:
    assert route().choose_path(endpoint) == (endpoint or "/v1/completions")


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("/v2/completions", "not among gateway.allowed_paths"),
        ("/v1", "not among gateway.allowed_paths"),
        ("v1/completions", "not a plain path"),
        ("//evil/v1/x", "not a plain path"),
        ("/v1/../admin", "not a plain path"),
        ("/v1/./x", "not a plain path"),
        ("/v1/%2e%2e/admin", "not a plain path"),
        ("/v1//x", "not a plain path"),
        ("/v1/x?y=1", "not a plain path"),
        ("/v1/x#y", "not a plain path"),
        ("/v1/x\r\nHost: evil", "not a plain path"),
        ("/v1/x\n", "not a plain path"),
        ("/v1\\x", "not a plain path"),
        ("http://evil/v1/x", "not a plain path"),
        ("/v1/ä", "not a plain path"),
    ],
)
def test_other_paths_are_refused_with_the_reason(endpoint: str, why: str) -> None:
    refused = route().choose_path(endpoint)
    assert isinstance(refused, Refused)
    assert why in refused.why


PIECES = st.sampled_from(["/v1", "/a", "/b", "/", "a", "b", "*"])


@given(st.lists(PIECES, max_size=8), st.lists(PIECES.filter(lambda piece: piece != "*"), max_size=12))
def test_patterns_with_any_number_of_stars_mean_what_they_always_did(
    pattern: list[str], path: list[str]
) -> None:
    endpoint, allowed = "/x" + "".join(path), "/x" + "".join(pattern)
    meant = re.compile(".*".join(map(re.escape, allowed.split("*"))))
    taken = route(allowed_paths=[allowed]).choose_path(endpoint)
    if isinstance(taken, Refused) and "plain" in taken.why:
        return
    assert isinstance(taken, str) is (meant.fullmatch(endpoint) is not None or endpoint == "/v1/completions")


@pytest.mark.parametrize("allowed", ["/v1/*/a/*/b/*/c", "/*/v1/*/completions", "/v1" + "*/a" * 200 + "/c"])
def test_no_path_costs_much_more_than_another_however_many_stars_there_are(allowed: str) -> None:
    """In CPU time, the least of several: it grew with the third power of the length, to 20 s at 4 KB."""
    rules = route(allowed_paths=[allowed])

    def cost(endpoint: str) -> float:
        spent = []
        for _ in range(5):
            began = time.process_time_ns()
            for _ in range(20):
                assert isinstance(rules.choose_path(endpoint), Refused)
            spent.append(time.process_time_ns() - began)
        return min(spent)

    plain = cost("/w" + "/x" * 1000)
    made_for_it = cost("/v1" + "/a/b" * 500)
    print(f"{made_for_it / plain:.1f} times as much")
    assert made_for_it < 50 * plain


def test_path_has_a_bound_before_anything_is_matched() -> None:
    rules = route(allowed_paths=["/v1/*"])
    assert rules.choose_path("/v1/" + "a" * (MAX_ENDPOINT_CHARS - 4)) == "/v1/" + "a" * (
        MAX_ENDPOINT_CHARS - 4
    )
    refused = rules.choose_path("/v1/" + "a" * (MAX_ENDPOINT_CHARS - 3))
    assert refused == Refused(f"data.endpoint: longer than {MAX_ENDPOINT_CHARS} characters")


def test_no_path_is_allowed_but_the_default_where_none_is_named() -> None:
    assert route(allowed_paths=()).choose_path("") == "/v1/completions"
    assert isinstance(route(allowed_paths=()).choose_path("/v1/chat/completions"), Refused)


def test_star_stands_for_any_characters_and_all_else_for_itself() -> None:
    narrow = route(allowed_paths=("/v1/*/generate", "/a.b"))
    assert narrow.choose_path("/v1/m/x/generate") == "/v1/m/x/generate"
    assert narrow.choose_path("/a.b") == "/a.b"
    assert isinstance(narrow.choose_path("/aXb"), Refused)


@given(st.text("/v1.%2eE\\ab?#:@\r\n ", max_size=30))
def test_no_path_that_is_sent_can_be_read_in_two_ways(endpoint: str) -> None:
    path = route(allowed_paths=("*",)).choose_path(endpoint)
    if isinstance(path, str):
        assert path.startswith("/")
        assert not path.startswith("//")
        assert not set(path) & set("%?#\\ \r\n")
        assert not {".", ".."} & set(path.split("/"))


def test_request_without_anything_has_exactly_our_headers() -> None:
    assert route().build_headers(a_request(), "") == {
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "user-agent": "us/1",
        "x-request-id": "r-1",
    }


def test_credentials_objective_fairness_and_trace_are_ours_to_set() -> None:
    sent = route(objective="batch", headers={"X-Team": "blue"}).build_headers(
        a_request(
            {"x-team": "mine", "authorization": "mine", "x-own": "1"},
            {"userid": "tenant 1", "traceparent": TRACE, "other": "x"},
        ),
        "Bearer t",
    )
    assert sent["authorization"] == "Bearer t"
    assert sent["x-llm-d-inference-objective"] == "batch"
    assert sent["x-llm-d-inference-fairness-id"] == "tenant%201"
    assert (sent["traceparent"], sent["x-team"], sent["x-own"]) == (TRACE, "blue", "1")
    assert "other" not in sent


@pytest.mark.parametrize("metadata", [{}, {"userid": ""}, {"traceparent": "00-x"}])
def test_what_metadata_does_not_hold_is_not_sent(metadata: dict[str, str]) -> None:
    sent = route().build_headers(a_request(metadata=metadata), "")
    assert not {"x-llm-d-inference-fairness-id", "traceparent"} & set(sent)


@given(
    st.sampled_from(sorted(FORBIDDEN_HEADERS) + [prefix + "x" for prefix in FORBIDDEN_PREFIXES]),
    st.randoms(use_true_random=False),
)
def test_no_spelling_of_a_header_that_is_not_the_callers_gets_through(name: str, chance: object) -> None:
    spelt = "".join(
        chance.choice((letter.upper(), letter, "_" if letter == "-" else letter))  # type: ignore[attr-defined]
        for letter in name
    )
    before = route().build_headers(a_request(), "")
    assert route().build_headers(a_request({spelt: "evil"}), "") == before


@given(
    st.sampled_from(sorted(RESTRICTED_HEADERS) + [prefix + "x" for prefix in RESTRICTED_PREFIXES]),
    st.booleans(),
)
def test_who_the_caller_is_and_what_he_is_after_is_told_by_no_header_that_nobody_allowed(
    name: str, underscored: bool
) -> None:
    spelt = name.replace("-", "_").upper() if underscored else name
    assert name not in {
        sent.replace("_", "-") for sent in route().build_headers(a_request({spelt: "evil"}), "")
    }
    assert spelt.lower() in route(allowed_headers=(name,)).build_headers(a_request({spelt: "meant"}), "")


@pytest.mark.parametrize(
    ("allowed", "passed"),
    [(None, {"x-own", "baggage"}), ((), set()), (("X-*", "Host", "x-llm-d-*"), {"x-own", "x-api-key"})],
)
def test_only_headers_that_the_operator_allows_pass_and_some_never_do(
    allowed: tuple[str, ...] | None, passed: set[str]
) -> None:
    never = {"host": "evil", "x-llm-d-inference-objective": "evil", "authorization": "evil"}
    given_ = {"X-Own": "1", "X-Api-Key": "k", "baggage": "k=v", **never}
    ours = route().build_headers(a_request(), "")
    assert set(route(allowed_headers=allowed).build_headers(a_request(given_), "")) - set(ours) == passed


def test_headers_that_the_connection_header_names_stay_behind() -> None:
    sent = route().build_headers(a_request({"connection": "close, X-Hop", "x-hop": "1", "x-far": "2"}), "")
    assert "x-hop" not in sent
    assert sent["x-far"] == "2"


@pytest.mark.parametrize(
    ("request_id", "sent"),
    [("r/1:a%", "r/1:a%"), ("a b", "a%20b"), ("é\r\nx: y", "%C3%A9%0D%0Ax:%20y")],
)
def test_id_that_is_no_header_value_is_escaped(request_id: str, sent: str) -> None:
    assert route().build_headers(a_request(request_id=request_id), "")["x-request-id"] == sent


def directed(endpoints: str, headers: Mapping[str, str] | None = None) -> Request:
    return msgspec.structs.replace(a_request(headers), endpoints=endpoints)


def test_endpoints_go_in_the_header_that_the_settings_name() -> None:
    rules = Route(Options(), user_agent="us/1", subset_header="X-Subset")
    assert rules.build_headers(directed("10.0.0.1:80,[fd00::1]:80"), "")["x-subset"] == (
        "10.0.0.1:80,[fd00::1]:80"
    )
    assert "x-subset" not in rules.build_headers(directed(""), "")
    assert "10.0.0.1:80" not in route().build_headers(directed("10.0.0.1:80"), "").values()


@pytest.mark.parametrize("name", ["x-subset", "X-Subset", "x_subset"])
@pytest.mark.parametrize("endpoints", ["", "10.0.0.1:80"])
def test_no_caller_says_to_which_endpoints_his_request_goes(name: str, endpoints: str) -> None:
    request = directed(endpoints, {name: "10.0.0.9:80", "x-own": "1"})
    options = Options(allowed_headers=["x-*"])
    sent = Route(options, user_agent="us/1", subset_header="x-subset").build_headers(request, "")
    assert "10.0.0.9:80" not in sent.values()
    assert sent.get("x-subset", "") == endpoints
    assert sent["x-own"] == "1"
    other = Route(options, user_agent="us/1").build_headers(request, "")
    assert other[name.lower()] == "10.0.0.9:80", "where nothing is told by it, it is a header like others"
