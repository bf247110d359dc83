"""Hostile requests, from queue to gateway: each ends as documented, and its neighbours never notice."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import unquote

import pytest

from tests.pages import rows
from tests.paths import DOCS
from tests.scenarios.processes import POOL, Producer, Stage
from tests.support import wait_until_sync


class Crowd:
    """Members written by hand, each with what is to become of it, and a harmless neighbour after each."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.expected: dict[str, str] = {}
        self.unreadable = 0
        self._members: dict[bytes, float] = {}
        self.deadline = int(time.time()) + 600

    def add_line(self, id_: str, expected: str, **data: Any) -> None:
        """A request whose result is to be this status, or this error code."""
        internal = data.pop("internal", {})
        data = {"id": id_, "deadline": self.deadline, "payload": {"prompt": "hi"}} | data
        member = {"request_kind": "plain", "internal": internal, "data": data}
        self.add_raw(json.dumps(member).encode())
        self.expected[id_] = expected

    def add_raw(self, member: bytes) -> None:
        neighbour = f"neighbour-{len(self._members)}"
        plain = {"id": neighbour, "deadline": self.deadline, "payload": {"prompt": "hi"}}
        for one in (member, json.dumps({"request_kind": "plain", "data": plain}).encode()):
            self._members[one] = self.deadline + len(self._members)
        self.expected[neighbour] = "200"

    def add_unreadable(self, member: bytes) -> None:
        """One whose id nobody can read: it is put aside, whole."""
        self.add_raw(member)
        self.unreadable += 1

    def submit(self) -> None:
        self.producer.put(self._members)

    def outcomes(self) -> dict[str, str]:
        return {
            id_: "+".join(str(each.get("error_code") or each.get("status_code")) for each in several)
            for id_, several in self.producer.results.items()
        }


@pytest.mark.parametrize("queue_server", ["valkey"], indirect=True)  # the other scenarios run on Redis
def test_hostile_requests_end_as_documented_and_harm_no_neighbour(stage: Stage) -> None:
    world = stage.world(slots=32, seconds=0.05)
    one = stage.dispatcher(
        stage.settings(
            world,
            gateway={"max_response_bytes": 100_000, "timeout_s": 2},
            queue={"max_payload_bytes": 50_000, "result_lists": ["own:*", f"*{{{POOL}}}*"]},
            retry={"base_s": 0.05, "max_s": 0.1, "max_attempts": 3},
        )
    )
    crowd = Crowd(stage.producer)

    for number, (endpoint, fate) in enumerate(rows(DOCS / "reference" / "forwarding.md", "endpoint")):
        crowd.add_line(f"endpoint-{number}", "200" if fate == "sent" else fate, endpoint=endpoint)
    crowd.add_line("crlf-in-endpoint", "INVALID_REQUEST", endpoint="/v1/x\r\nx-evil: 1")
    crowd.add_line("nul-in-endpoint", "INVALID_REQUEST", endpoint="/v1/x\0")

    for number, value in enumerate(("a\r\nx-evil: 1", "a\nb", "a\0b", "a\x7fb")):
        crowd.add_line(f"header-value-{number}", "INVALID_REQUEST", headers={"x-a": value})
    for number, name in enumerate(("", "x a", "x:a", "x\r\na", "é")):
        crowd.add_line(f"header-name-{number}", "INVALID_REQUEST", headers={name: "a"})
    crowd.add_line("header-flood", "INVALID_REQUEST", headers={f"x-{at}": "a" * 1000 for at in range(20)})
    smuggled = {
        "Host": "evil",
        "Content-Length": "1",
        "Transfer-Encoding": "chunked",
        "Connection": "close, x-b",
        "Authorization": "Bearer stolen",
        "Expect": "100-continue",
        "X-Request-Id": "another",
        "x-llm-d-inference-objective": "realtime",
    }
    crowd.add_line("smuggled-headers", "200", headers=smuggled)
    crowd.add_line("evil id\r\nx-evil: 1", "200")
    crowd.add_line("tenant", "200", metadata={"userid": "t\r\nx-evil: 1"})

    crowd.add_line("payload-list", "INVALID_REQUEST", payload=[1])
    crowd.add_line("payload-text", "INVALID_REQUEST", payload="hi")
    crowd.add_line("payload-too-large", "TOO_LARGE", payload={"prompt": "x" * 50_000})
    crowd.add_line("deadline-of-text", "INVALID_REQUEST", deadline="soon")
    crowd.add_line("deadline-past", "DEADLINE_EXCEEDED", deadline=int(time.time()) - 5)
    wrong_type = f"a-string:{{{POOL}}}"
    stage.producer.client.set(wrong_type, "x")
    crowd.add_line("list-of-wrong-type", "INVALID_REQUEST", internal={"result_queue_name": wrong_type})
    stage.producer.client.lpush("celery", "a task")
    others = [
        "batch:{other}:requests",
        "batch:{other}:requests:paused",
        "own:{other}:leases",
        "batch-results:1",
    ]
    for number, name in enumerate((stage.producer.names.queue, "celery", *others)):
        crowd.add_line(f"list-of-another-{number}", "INVALID_REQUEST", internal={"result_queue_name": name})

    to_its_own = {"id": "to-its-own", "deadline": crowd.deadline, "payload": {"prompt": "hi"}}
    internal = {"result_queue_name": "own:list", "request_token": "0f"}
    member = {"request_kind": "plain", "internal": internal, "data": to_its_own}
    crowd.add_raw(json.dumps(member).encode())

    def answered(id_: str, expected: str, **how: Any) -> None:
        crowd.add_line(id_, expected, payload={"sim": how})

    answered("not-found", "404", kind="status", status=404, body="no such model")
    answered("bad-request", "400", kind="status", status=400, body="bad")
    answered("redirected", "RETRIES_EXHAUSTED", kind="status", status=302)
    answered("crashing", "RETRIES_EXHAUSTED", kind="status", status=500, body="Traceback")
    answered("reset", "RETRIES_EXHAUSTED", kind="reset")
    answered("cut-short", "RETRIES_EXHAUSTED", kind="cut")
    answered("never-answered", "RETRIES_EXHAUSTED", kind="hang")
    answered("too-much", "TOO_LARGE", answer_bytes=200_000)
    answered("bomb", "TOO_LARGE", answer_bytes=200_000, gzip=True)
    answered("zipped", "200", answer_bytes=2_000, gzip=True)
    answered("events", "200", events=20)
    answered("slow", "200", kind="slow", slow_s=0.3)

    for junk in (b"", b"null", b"[]", b"\xff\xfe", b"{", b'{"data":{"id":7}}', b"[" * 5000, b'{"data":{}}'):
        crowd.add_unreadable(junk)

    crowd.submit()
    wait_until_sync(
        lambda: crowd.expected.keys() <= stage.producer.collect().keys(),
        40,
        what=f"all results; {one.status()}",
        every_s=0.05,
    )
    wait_until_sync(lambda: not stage.producer.count_requests()["leased"], 10, what="all leases to end")
    assert crowd.outcomes() == crowd.expected
    retried_in_vain = list(crowd.expected.values()).count("RETRIES_EXHAUSTED")
    dead = retried_in_vain + crowd.unreadable
    assert stage.producer.count_requests() == {"pending": 0, "leased": 0, "delayed": 0, "dead": dead}
    log = world.log()
    assert all(entry.batch for entry in log), "nobody chose an objective"
    never_sent = {id_ for id_, fate in crowd.expected.items() if fate == "INVALID_REQUEST"}
    sent = {entry.id for entry in log}
    assert not sent & (never_sent - {"list-of-wrong-type"})
    (own,) = map(json.loads, stage.producer.client.lrange("own:list", 0, -1))
    assert (own["id"], own["status_code"], own["request_token"]) == ("to-its-own", 200, "0f")
    assert not stage.producer.client.exists(*others), "nothing was written for another pool"
    assert stage.producer.client.lrange("celery", 0, -1) == [b"a task"]
    assert stage.producer.client.ttl("celery") == -1
    assert "another" not in sent
    assert all(entry.id.isprintable() and entry.tenant.isprintable() for entry in log)
    assert "evil id\r\nx-evil: 1" in map(unquote, sent)
    assert "t\r\nx-evil: 1" in {unquote(entry.tenant) for entry in log}
    assert not [event for event in one.events("gate") if event["reason"] == "gateway-unreachable"]
