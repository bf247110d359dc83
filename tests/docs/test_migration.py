"""docs/how-to/migration.md: what it names of ours exists, and what it says of llm-d-async's members is so."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import yaml

from dispatcher.core.requests.request import Rejection, Request, parse_member
from dispatcher.core.requests.score import decode_deadline
from dispatcher.queue.keys import QueueNames
from tests.paths import DOCS

PAGE = (DOCS / "how-to" / "migration.md").read_text()
SECTIONS = "pool|gateway|queue|signals|budget|retry|shutdown|admin|log|tracing"
DEADLINE = 1764047600


def written(**changes: object) -> bytes:
    """A member as the Go producer writes it, without the order of its fields."""
    internal = {"request_queue_name": "request-sortedset", "result_queue_name": "result-list"}
    data = {"id": "r-1", "created": DEADLINE - 3600, "deadline": DEADLINE, "payload": {"model": "m"}}
    internal |= {"request_token": "5f2c", "enqueue_seq": 7, **changes.pop("internal", {})}  # type: ignore[dict-item]
    return json.dumps({"internal": internal, "request_kind": "redis", "data": data | changes}).encode()


def test_settings_that_it_names_exist() -> None:
    table = (DOCS / "reference" / "configuration.md").read_text()
    known = set(re.findall(rf"^\| `((?:{SECTIONS})\.[a-z_.]+)`", table, re.MULTILINE))
    named = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)`", PAGE))
    assert len(named) > 30
    assert named - known == set()


def test_series_that_it_names_exist() -> None:
    known = set(
        re.findall(
            r"^\| `(batch_dispatcher_\w+)`", (DOCS / "reference" / "metrics.md").read_text(), re.MULTILINE
        )
    )
    named = {name.removesuffix("_count") for name in re.findall(r"`(batch_dispatcher_\w+)", PAGE)}
    assert len(named) > 20
    assert named - known == set()


def test_a_member_of_a_newer_producer_is_read() -> None:
    read = parse_member(written(model="m"))
    assert isinstance(read, Request)
    assert (read.id, read.results, read.token) == ("r-1", "result-list", "5f2c")
    assert decode_deadline(DEADLINE + 7 / 2_097_152) == DEADLINE, "a place within its second"


@pytest.mark.parametrize("payload", [{"payload": None}, {}])
def test_a_member_whose_payload_lies_elsewhere_is_refused_with_its_list(payload: dict[str, None]) -> None:
    member = json.loads(written(internal={"payload_ref": "request-payload:r-1:5f2c"}))
    del member["data"]["payload"]
    member["data"] |= payload
    refused = parse_member(json.dumps(member).encode())
    assert isinstance(refused, Rejection)
    assert (refused.code, refused.id, refused.results) == ("INVALID_REQUEST", "r-1", "result-list")


def test_lists_of_the_coordinator_are_allowed_as_the_page_says_and_not_before() -> None:
    queue = yaml.safe_load(re.findall(r"```yaml\n(queue:\n.*?)```", PAGE, re.DOTALL)[-1])["queue"]
    mailbox = "results:req:acme:job-4217"
    usual = QueueNames("request-sortedset", "result-list")
    assert usual.find_list_problem(mailbox) == "is not among queue.result_lists"
    assert replace(usual, allowed_lists=tuple(queue["result_lists"])).find_list_problem(mailbox) is None
