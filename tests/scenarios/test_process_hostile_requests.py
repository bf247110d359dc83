"""Hostile requests end as documented, and do not affect other requests."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import unquote

import pytest

from dispatcher.limit.budget import GATEWAY_OUTAGES
from tests.markdown_pages import read_table_rows
from tests.paths import DOCS
from tests.scenarios.processes import POOL, Producer, Stage
from tests.support import wait_until_sync


class MemberBuilder:
    """Builds hostile members with their expected results, each followed by a harmless request."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.expected: dict[str, str] = {}
        self.unreadable = 0
        self._members: dict[bytes, float] = {}
        self.deadline = int(time.time()) + 600

    def add_request(self, id_: str, expected: str, **fields: Any) -> None:
        """Add a request whose expected result is this status or error code."""
        internal = fields.pop("internal", {})
        fields = {"id": id_, "deadline": self.deadline, "payload": {"prompt": "hi"}} | fields
        member = {"request_kind": "plain", "internal": internal, "data": fields}
        self.add_member(json.dumps(member).encode())
        self.expected[id_] = expected

    def add_member(self, member: bytes) -> None:
        plain_id = f"plain-{len(self._members)}"
        plain = {"id": plain_id, "deadline": self.deadline, "payload": {"prompt": "hi"}}
        for each in (member, json.dumps({"request_kind": "plain", "data": plain}).encode()):
            self._members[each] = self.deadline + len(self._members)
        self.expected[plain_id] = "200"

    def add_unreadable(self, member: bytes) -> None:
        """Add a member whose id cannot be parsed. It must be dead-lettered unchanged."""
        self.add_member(member)
        self.unreadable += 1

    def submit(self) -> None:
        self.producer.add_members(self._members)

    def get_results(self) -> dict[str, str]:
        return {
            id_: "+".join(str(each.get("error_code") or each.get("status_code")) for each in results)
            for id_, results in self.producer.results.items()
        }


@pytest.mark.parametrize("queue_server", ["valkey"], indirect=True)  # the other scenarios run on Redis
def test_hostile_requests_end_as_documented_and_affect_no_other_request(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.05)
    dispatcher = stage.dispatcher(
        stage.settings(
            world,
            gateway={"max_response_bytes": 100_000, "timeout_s": 2},
            queue={"max_payload_bytes": 50_000, "result_lists": ["own:*", f"*{{{POOL}}}*"]},
            retry={"base_s": 0.05, "max_s": 0.1, "max_attempts": 3},
        )
    )
    builder = MemberBuilder(stage.producer)

    for number, (endpoint, expected_result) in enumerate(
        read_table_rows(DOCS / "reference" / "forwarding.md", "endpoint")
    ):
        builder.add_request(
            f"endpoint-{number}", "200" if expected_result == "sent" else expected_result, endpoint=endpoint
        )
    builder.add_request("crlf-in-endpoint", "INVALID_REQUEST", endpoint="/v1/x\r\nx-evil: 1")
    builder.add_request("nul-in-endpoint", "INVALID_REQUEST", endpoint="/v1/x\0")

    for number, value in enumerate(("a\r\nx-evil: 1", "a\nb", "a\0b", "a\x7fb")):
        builder.add_request(f"header-value-{number}", "INVALID_REQUEST", headers={"x-a": value})
    for number, name in enumerate(("", "x a", "x:a", "x\r\na", "é")):
        builder.add_request(f"header-name-{number}", "INVALID_REQUEST", headers={name: "a"})
    builder.add_request(
        "header-flood", "INVALID_REQUEST", headers={f"x-{at}": "a" * 1000 for at in range(20)}
    )
    smuggled_headers = {
        "Host": "evil",
        "Content-Length": "1",
        "Transfer-Encoding": "chunked",
        "Connection": "close, x-b",
        "Authorization": "Bearer stolen",
        "Expect": "100-continue",
        "X-Request-Id": "another",
        "x-llm-d-inference-objective": "realtime",
    }
    builder.add_request("smuggled-headers", "200", headers=smuggled_headers)
    builder.add_request("evil id\r\nx-evil: 1", "200")
    builder.add_request("tenant", "200", metadata={"userid": "t\r\nx-evil: 1"})

    builder.add_request("payload-list", "INVALID_REQUEST", payload=[1])
    builder.add_request("payload-text", "INVALID_REQUEST", payload="hi")
    builder.add_request("payload-too-large", "TOO_LARGE", payload={"prompt": "x" * 50_000})
    builder.add_request("deadline-of-text", "INVALID_REQUEST", deadline="soon")
    builder.add_request("deadline-past", "DEADLINE_EXCEEDED", deadline=int(time.time()) - 5)
    wrong_type = f"a-string:{{{POOL}}}"
    stage.producer.client.set(wrong_type, "x")
    builder.add_request("list-of-wrong-type", "INVALID_REQUEST", internal={"result_queue_name": wrong_type})
    stage.producer.client.lpush("celery", "a task")
    foreign_keys = [
        "batch:{other}:requests",
        "batch:{other}:requests:paused",
        "own:{other}:leases",
        "batch-results:1",
    ]
    for number, name in enumerate((stage.producer.names.queue, "celery", *foreign_keys)):
        builder.add_request(
            f"list-of-another-{number}", "INVALID_REQUEST", internal={"result_queue_name": name}
        )

    own_list_request = {"id": "to-its-own", "deadline": builder.deadline, "payload": {"prompt": "hi"}}
    internal = {"result_queue_name": "own:list", "request_token": "0f"}
    member = {"request_kind": "plain", "internal": internal, "data": own_list_request}
    builder.add_member(json.dumps(member).encode())

    def add_answered_by(id_: str, expected: str, **answer: Any) -> None:
        builder.add_request(id_, expected, payload={"sim": answer})

    add_answered_by("not-found", "404", kind="status", status=404, body="no such model")
    add_answered_by("bad-request", "400", kind="status", status=400, body="bad")
    add_answered_by("redirected", "RETRIES_EXHAUSTED", kind="status", status=302)
    add_answered_by("crashing", "RETRIES_EXHAUSTED", kind="status", status=500, body="Traceback")
    add_answered_by("reset", "RETRIES_EXHAUSTED", kind="reset")
    add_answered_by("cut-short", "RETRIES_EXHAUSTED", kind="cut")
    add_answered_by("never-answered", "RETRIES_EXHAUSTED", kind="hang")
    add_answered_by("too-much", "TOO_LARGE", answer_bytes=200_000)
    add_answered_by("bomb", "TOO_LARGE", answer_bytes=200_000, gzip=True)
    add_answered_by("zipped", "200", answer_bytes=2_000, gzip=True)
    add_answered_by("events", "200", events=20)
    add_answered_by("slow", "200", kind="slow", slow_s=0.3)

    for data in (b"", b"null", b"[]", b"\xff\xfe", b"{", b'{"data":{"id":7}}', b"[" * 5000, b'{"data":{}}'):
        builder.add_unreadable(data)

    builder.submit()
    wait_until_sync(
        lambda: builder.expected.keys() <= stage.producer.collect().keys(),
        40,
        what=f"all results; {dispatcher.status()}",
        every_s=0.05,
    )
    wait_until_sync(lambda: not stage.producer.count_requests()["leased"], 10, what="all leases to end")
    assert builder.get_results() == builder.expected
    exhausted = list(builder.expected.values()).count("RETRIES_EXHAUSTED")
    dead = exhausted + builder.unreadable
    assert stage.producer.count_requests() == {"pending": 0, "leased": 0, "delayed": 0, "dead": dead}
    log = world.log()
    assert all(entry.batch for entry in log), "no request could choose an objective"
    never_sent = {
        id_ for id_, expected_result in builder.expected.items() if expected_result == "INVALID_REQUEST"
    }
    sent = {entry.id for entry in log}
    assert not sent & (never_sent - {"list-of-wrong-type"})
    (own_result,) = map(json.loads, stage.producer.client.lrange("own:list", 0, -1))
    assert (own_result["id"], own_result["status_code"], own_result["request_token"]) == (
        "to-its-own",
        200,
        "0f",
    )
    assert not stage.producer.client.exists(*foreign_keys), "nothing is written for another pool"
    assert stage.producer.client.lrange("celery", 0, -1) == [b"a task"]
    assert stage.producer.client.ttl("celery") == -1
    assert "another" not in sent
    assert all(entry.id.isprintable() and entry.tenant.isprintable() for entry in log)
    assert "evil id\r\nx-evil: 1" in map(unquote, sent)
    assert "t\r\nx-evil: 1" in {unquote(entry.tenant) for entry in log}
    assert not [event for event in dispatcher.events("gate") if event["reason"] in GATEWAY_OUTAGES]
