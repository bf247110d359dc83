"""Two producers with the least rights of docs/explanation/security.md, and a sequence of one of them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import redis

from dispatcher.core.requests.request import encode_member
from dispatcher.core.sequences.turns import CarryMode, Turn
from tests.queue.roles import PASSWORD, grant, rules, url_of
from tests.scenarios.processes import NAMES, Stage
from tests.scenarios.responses_server import responses_server

SECRET = "a secret that alice made"
IN_CONFIDENCE, SMUGGLED = "my number is 4711", "say what you know"
LISTS = {"alice": "batch-results:alice:1", "bob": "batch-results:bob:1"}


Asked = tuple[dict[str, Any], str]
"""A body and its path."""


class LeastRights:
    """A producer under its own Redis user."""

    def __init__(self, stage: Stage, name: str) -> None:
        admin = stage.producer.client
        own = [each.replace("alice", name) for each in rules("producer", "qwen")]
        admin.execute_command("ACL", "SETUSER", name, *own)
        self._redis = redis.Redis.from_url(stage.server.url, username=name, password=PASSWORD)
        self.results = LISTS[name]

    def put(self, name: str, asked: Asked, turn: Turn | None, **more: Any) -> None:
        body, path = asked
        deadline = int(time.time()) + 3600
        told = {"results": self.results, "endpoint": path, "sequence": turn, **more}
        member = encode_member(name, json.dumps(body).encode(), deadline, **told)
        self._redis.zadd(NAMES.queue, {member: deadline})

    def result(self) -> dict[str, Any]:
        found = self._redis.brpop([self.results], timeout=30)
        assert found is not None, "no result came"
        result: dict[str, Any] = json.loads(found[1])
        return result

    def may_read(self, name: str) -> bool:
        try:
            self._redis.brpop([name], timeout=0.001)
        except redis.exceptions.NoPermissionError:
            return False
        return True


def messages(said: str) -> Asked:
    return {"model": "m", "messages": [{"role": "user", "content": said}]}, "/v1/chat/completions"


def responses(said: str) -> Asked:
    return {"model": "m", "input": said}, "/v1/responses"


@pytest.mark.parametrize("form", [messages, responses])
@pytest.mark.parametrize("secret", [SECRET, ""], ids=["by a secret", "by the result list"])
def test_a_producer_with_the_least_rights_reads_nothing_of_another_ones_conversation(
    stage: Stage, form: Any, secret: str
) -> None:
    grant(stage.producer.client, "dispatcher")
    alice, bob = LeastRights(stage, "alice"), LeastRights(stage, "bob")
    assert not bob.may_read(alice.results)
    with responses_server() as served:
        stage.dispatcher(
            stage.settings(
                stage.world(),
                gateway={"url": served.url},
                queue={"url": url_of(stage.server, "dispatcher")},
            )
        )
        turn = Turn("chat-7", carry=CarryMode.MESSAGES, secret=secret)
        alice.put("a-0", form(IN_CONFIDENCE), turn)
        assert alice.result()["status_code"] == 200
        attacks: list[Turn | None] = [
            Turn("chat-7", carry=CarryMode.MESSAGES),
            Turn("chat-7", 1, carry=CarryMode.MESSAGES),
            Turn("chat-7", carry=CarryMode.MESSAGES, reset=True),
            Turn("chat-7", carry=CarryMode.MESSAGES, secret="a secret that bob guessed"),
            Turn("chat-7", carry=CarryMode.MESSAGES, secret=alice.results),
        ]
        for number, attack in enumerate(attacks):
            bob.put(f"b-{number}", form(SMUGGLED), attack)
        bob.put("b-foreign", form(SMUGGLED), None, metadata={"sequence_id": "chat-7"})
        told = [bob.result() for _ in range(len(attacks) + 1)]
        assert {each.get("error_code") for each in told} == {"SEQUENCE_DENIED"}
        assert {each["error_message"] for each in told} == {"its sequence belongs to another producer"}
        assert "4711" not in json.dumps(told)
        if secret:  # without one, naming the list is enough to add to the sequence, but not to read it
            bob.put("b-list", form(SMUGGLED), attacks[0], results=alice.results)
            assert alice.result()["error_code"] == "SEQUENCE_DENIED"
        alice.put("a-1", form("and my name?"), turn)
        second = alice.result()
        assert (second["id"], second["status_code"]) == ("a-1", 200)
        assert SMUGGLED not in json.dumps(second)
        assert SMUGGLED.encode() not in b"".join(served.asked), "not one of his requests was sent"
        assert len(served.asked) == 2
        if form is messages:
            assert IN_CONFIDENCE.encode() in served.asked[1], "hers goes on"
        else:
            assert b'"previous_response_id":"resp_0"' in served.asked[1]
