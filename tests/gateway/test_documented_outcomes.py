"""Every row of the tables in docs/reference/forwarding.md is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.lab.standin.config import Config
from dispatcher.lab.standin.live import LiveWorld
from dispatcher.requests.headers import (
    DROP_REASON,
    FORBIDDEN_HEADERS,
    FORBIDDEN_PREFIXES,
    RESTRICTED_HEADERS,
    RESTRICTED_PREFIXES,
)
from dispatcher.requests.outcomes.judge import GatewayRecord, judge_attempt
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    Unreachable,
    classify_answer,
    classify_cut_answer,
)
from dispatcher.requests.request import Request, encode_member, parse_member
from dispatcher.requests.routing import Route
from tests.gateway.envoy import envoy_before
from tests.gateway.scripted_server import Connection, a_request, options, outcome, serving
from tests.markdown_pages import read_table_rows
from tests.paths import DOCS

MakeGateway = Callable[..., HttpGateway]
PAGE = DOCS / "reference" / "forwarding.md"


def name_outcome(outcome: Outcome) -> str:
    match outcome:
        case Delivered():
            return "delivered"
        case Unreachable():
            return "unreachable"
        case Evicted():
            return "evicted"
        case Overloaded(is_out_of_capacity=capacity):
            return "overloaded, teaches" if capacity else "overloaded"
        case Failed(is_intermediary_error=is_intermediary_error):
            return "failed, intermediary error" if is_intermediary_error else "failed"
        case _:
            return repr(outcome)


ANSWERS = list(read_table_rows(PAGE, "status"))


@pytest.mark.parametrize(("status", "reason", "body", "expected"), ANSWERS)
def test_answer_has_the_documented_outcome(status: str, reason: str, body: str, expected: str) -> None:
    headers = {DROP_REASON: reason} if reason else {}
    if body.startswith("data:"):
        headers["content-type"] = "text/event-stream"
    if status.endswith(", cut"):
        assert name_outcome(classify_cut_answer(200, headers, body.encode()) or Failed("cut")) == expected
    else:
        assert name_outcome(classify_answer(int(status), headers, body.encode(), 0.0)) == expected


async def test_answer_of_the_stand_in_has_the_documented_outcome(gateway_to: MakeGateway) -> None:
    async with LiveWorld(Config()) as world:
        gateway = gateway_to(world.gateway_url)
        for status, reason, body, expected in ANSWERS:
            cut = status.endswith(", cut")
            response = {
                "status": int(status.split(",")[0]),
                "reason": reason,
                "body": body + "\n\n" * cut * 100,
            }
            sim = {"kind": "cut" if cut else "status", **response}
            found = await outcome(gateway, a_request(json.dumps({"sim": sim}).encode()))
            assert name_outcome(found) == expected, (status, reason, body)


async def test_answer_behind_a_real_envoy_has_the_documented_outcome(
    gateway_to: MakeGateway, tmp_path: Path
) -> None:
    """Envoy forwards the answer of its upstream, and ends a stream that the upstream has cut."""

    async def pool(connection: Connection) -> None:
        while True:
            received = await connection.receive()
            status, reason, body, _ = ANSWERS[int(received.headers["x-row"])]
            headers = f"{DROP_REASON}: {reason}\r\n" if reason else ""
            if body.startswith("data:"):
                headers += "content-type: text/event-stream\r\n"
            if status.endswith(", cut"):
                text = body.encode() + b"\n\n"
                head = f"HTTP/1.1 200 OK\r\n{headers}transfer-encoding: chunked\r\n\r\n"
                connection.writer.write(head.encode() + b"%x\r\n%b\r\n" % (len(text), text))
                await connection.writer.drain()
                return
            await connection.answer(body.encode(), status=f"{status} Said", headers=headers)

    async with serving(pool) as server, envoy_before(server.port, tmp_path) as url:
        gateway = gateway_to(url)
        for number, (status, reason, body, expected) in enumerate(ANSWERS):
            request = a_request(endpoint="/v1/plain", headers={"x-row": str(number)})
            assert name_outcome(await outcome(gateway, request)) == expected, (status, reason, body)


PLAIN, ELSEWHERE = "/v1/plain", "/v1/plain/elsewhere"
BEFORE: dict[str, list[tuple[int, str, str]]] = {
    "nothing": [],
    "2xx for it": [(200, PLAIN, "m")],
    "2xx for another model": [(200, PLAIN, "n")],
    "2xx on another path": [(200, ELSEWHERE, "m")],
    "2xx for another model, and an empty 404 for that": [(200, PLAIN, "n"), (404, PLAIN, "n")],
}
"""Status, path and model of the requests before it."""
NOT_FOUND = list(read_table_rows(PAGE, "body of the 404"))


async def judge_after_requests(gateway: HttpGateway, body: str, before: str) -> str:
    """Return the name of the outcome of the last of these requests, a 404."""
    record = GatewayRecord()
    found: Outcome
    for status, path, model, text in [*((*each, "") for each in BEFORE[before]), (404, PLAIN, "m", body)]:
        sim = {"kind": "status", "status": status, "reason": "", "body": text}
        request = a_request(json.dumps({"model": model, "sim": sim}).encode(), endpoint=path)
        answer = await outcome(gateway, request)
        found, _, record = judge_attempt(answer, record, path=path, payload=request.payload, at=1.0)
    return name_outcome(found)


@pytest.mark.parametrize(("body", "before", "expected"), NOT_FOUND)
async def test_404_of_the_stand_in_has_the_documented_outcome(
    gateway_to: MakeGateway, body: str, before: str, expected: str
) -> None:
    async with LiveWorld(Config()) as world:
        assert await judge_after_requests(gateway_to(world.gateway_url), body, before) == expected


async def test_404_behind_a_real_envoy_has_the_documented_outcome(
    gateway_to: MakeGateway, tmp_path: Path
) -> None:
    async def pool(connection: Connection) -> None:
        while True:
            simulated = json.loads((await connection.receive()).body)["sim"]
            await connection.answer(simulated["body"].encode(), status=f"{simulated['status']} Said")

    async with serving(pool) as server, envoy_before(server.port, tmp_path) as url:
        for body, before, expected in NOT_FOUND:
            assert await judge_after_requests(gateway_to(url), body, before) == expected, (body, before)


@pytest.mark.parametrize(("endpoint", "expected"), list(read_table_rows(PAGE, "endpoint")))
def test_path_is_sent_or_refused_as_documented(endpoint: str, expected: str) -> None:
    path = Route(options("http://gateway"), user_agent="").choose_path(endpoint)
    assert ("INVALID_REQUEST" if isinstance(path, Refused) else "sent") == expected


def test_only_headers_that_the_settings_allow_are_sent() -> None:
    member = encode_member("r-1", b"{}", 2_000_000_000, headers={"X-Api-Key": "k", "x-own": "1"})
    request = parse_member(member)
    assert isinstance(request, Request)
    sent = Route(options("http://gateway", allowed_headers=["x-api-*"]), user_agent="").build_headers(
        request, ""
    )
    assert sent.get("x-api-key") == "k"
    assert "x-own" not in sent


def test_documented_table_of_omitted_headers_is_complete() -> None:
    left_out = FORBIDDEN_HEADERS | {prefix + "*" for prefix in FORBIDDEN_PREFIXES}
    left_out |= RESTRICTED_HEADERS | {prefix + "*" for prefix in RESTRICTED_PREFIXES}
    table = PAGE.read_text().split("\n| left out |", 1)[1].split("\n\n", 1)[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert named == left_out
