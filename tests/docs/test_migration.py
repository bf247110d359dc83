"""docs/how-to/migration.md names existing settings and metrics and describes llm-d-async correctly."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import yaml

from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import Rejection, Request, parse_member
from dispatcher.requests.score import decode_deadline
from tests.paths import DOCS

PAGE = (DOCS / "how-to" / "migration.md").read_text()
SECTIONS = "pool|gateway|queue|signals|budget|retry|shutdown|admin|log|tracing"
DEADLINE = 1764047600


def make_member(**changes: object) -> bytes:
    """Return a member like one of the Go producer, except for the order of its fields."""
    internal = {"request_queue_name": "request-sortedset", "result_queue_name": "result-list"}
    data = {"id": "r-1", "created": DEADLINE - 3600, "deadline": DEADLINE, "payload": {"model": "m"}}
    internal |= {"request_token": "5f2c", "enqueue_seq": 7, **changes.pop("internal", {})}  # type: ignore[dict-item]
    return json.dumps({"internal": internal, "request_kind": "redis", "data": data | changes}).encode()


def test_settings_named_on_the_page_exist() -> None:
    table = (DOCS / "reference" / "configuration.md").read_text()
    known = set(re.findall(rf"^\| `((?:{SECTIONS})\.[a-z_.]+)`", table, re.MULTILINE))
    named = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)`", PAGE))
    assert len(named) > 30
    assert named - known == set()


def test_metrics_named_on_the_page_exist() -> None:
    known = set(
        re.findall(
            r"^\| `(batch_dispatcher_\w+)`", (DOCS / "reference" / "metrics.md").read_text(), re.MULTILINE
        )
    )
    named = {name.removesuffix("_count") for name in re.findall(r"`(batch_dispatcher_\w+)", PAGE)}
    assert len(named) > 20
    assert named - known == set()


def test_member_of_a_newer_producer_is_accepted() -> None:
    request = parse_member(make_member(model="m"))
    assert isinstance(request, Request)
    assert (request.id, request.results, request.token) == ("r-1", "result-list", "5f2c")
    assert decode_deadline(DEADLINE + 7 / 2_097_152) == DEADLINE, (
        "the fraction of a second is a position in the queue"
    )


@pytest.mark.parametrize("payload", [{"payload": None}, {}])
def test_member_with_an_external_payload_is_rejected_with_its_result_list(payload: dict[str, None]) -> None:
    member = json.loads(make_member(internal={"payload_ref": "request-payload:r-1:5f2c"}))
    del member["data"]["payload"]
    member["data"] |= payload
    rejection = parse_member(json.dumps(member).encode())
    assert isinstance(rejection, Rejection)
    assert (rejection.code, rejection.id, rejection.results) == ("INVALID_REQUEST", "r-1", "result-list")


def test_result_lists_of_the_coordinator_are_allowed_by_the_documented_setting() -> None:
    queue = yaml.safe_load(re.findall(r"```yaml\n(queue:\n.*?)```", PAGE, re.DOTALL)[-1])["queue"]
    mailbox = "results:req:acme:job-4217"
    names = QueueNames("request-sortedset", "result-list")
    assert names.find_list_problem(mailbox) == "is not among queue.result_lists"
    assert replace(names, allowed_lists=tuple(queue["result_lists"])).find_list_problem(mailbox) is None
