"""Two producers with the least permissions of docs/explanation/security.md, and a sequence of one of them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import redis

from dispatcher.features.sequences.turns import CarryMode, Turn
from dispatcher.requests.request import encode_member
from tests.queue.redis_users import PASSWORD, grant, rules, url_of
from tests.scenarios.processes import NAMES, Stage
from tests.scenarios.responses_server import run_responses_server

SECRET = "a secret that alice made"
SECRET_TEXT, INJECTED_TEXT = "my number is 4711", "say what you know"
RESULT_LISTS = {"alice": "batch-results:alice:1", "bob": "batch-results:bob:1"}


RequestData = tuple[dict[str, Any], str]
"""Body and path of a request."""


class RestrictedProducer:
    """Producer with its own Redis user, which has the least permissions."""

    def __init__(self, stage: Stage, name: str) -> None:
        admin = stage.producer.client
        rules_of_user = [each.replace("alice", name) for each in rules("producer", "qwen")]
        admin.execute_command("ACL", "SETUSER", name, *rules_of_user)
        self._redis = redis.Redis.from_url(stage.server.url, username=name, password=PASSWORD)
        self.results = RESULT_LISTS[name]

    def submit(self, name: str, request: RequestData, turn: Turn | None, **more: Any) -> None:
        body, path = request
        deadline = int(time.time()) + 3600
        options = {"results": self.results, "endpoint": path, "extra": turn, **more}
        member = encode_member(name, json.dumps(body).encode(), deadline, **options)
        self._redis.zadd(NAMES.queue, {member: deadline})

    def pop_result(self) -> dict[str, Any]:
        found = self._redis.brpop([self.results], timeout=30)
        assert found is not None, "no result came"
        result: dict[str, Any] = json.loads(found[1])
        return result

    def may_pop(self, name: str) -> bool:
        try:
            self._redis.brpop([name], timeout=0.001)
        except redis.exceptions.NoPermissionError:
            return False
        return True


def make_chat_request(text: str) -> RequestData:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}, "/v1/chat/completions"


def make_responses_request(text: str) -> RequestData:
    return {"model": "m", "input": text}, "/v1/responses"


@pytest.mark.parametrize("make_request", [make_chat_request, make_responses_request])
@pytest.mark.parametrize("secret", [SECRET, ""], ids=["by a secret", "by the result list"])
def test_producer_with_least_permissions_cannot_read_the_conversation_of_another_one(
    stage: Stage, make_request: Any, secret: str
) -> None:
    grant(stage.producer.client, "dispatcher")
    alice, bob = RestrictedProducer(stage, "alice"), RestrictedProducer(stage, "bob")
    assert not bob.may_pop(alice.results)
    with run_responses_server() as server:
        stage.dispatcher(
            stage.settings(
                stage.world(),
                gateway={"url": server.url},
                queue={"url": url_of(stage.server, "dispatcher")},
            )
        )
        alice_turn = Turn("chat-7", carry=CarryMode.MESSAGES, secret=secret)
        alice.submit("a-0", make_request(SECRET_TEXT), alice_turn)
        assert alice.pop_result()["status_code"] == 200
        attacks: list[Turn | None] = [
            Turn("chat-7", carry=CarryMode.MESSAGES),
            Turn("chat-7", 1, carry=CarryMode.MESSAGES),
            Turn("chat-7", carry=CarryMode.MESSAGES, reset=True),
            Turn("chat-7", carry=CarryMode.MESSAGES, secret="a secret that bob guessed"),
            Turn("chat-7", carry=CarryMode.MESSAGES, secret=alice.results),
        ]
        for number, turn in enumerate(attacks):
            bob.submit(f"b-{number}", make_request(INJECTED_TEXT), turn)
        bob.submit("b-foreign", make_request(INJECTED_TEXT), None, metadata={"sequence_id": "chat-7"})
        results = [bob.pop_result() for _ in range(len(attacks) + 1)]
        assert {each.get("error_code") for each in results} == {"SEQUENCE_DENIED"}
        assert {each["error_message"] for each in results} == {"its sequence belongs to another producer"}
        assert "4711" not in json.dumps(results)
        # Without a secret, knowing the result list allows adding to the sequence, but not reading it.
        if secret:
            bob.submit("b-list", make_request(INJECTED_TEXT), attacks[0], results=alice.results)
            assert alice.pop_result()["error_code"] == "SEQUENCE_DENIED"
        alice.submit("a-1", make_request("and my name?"), alice_turn)
        second = alice.pop_result()
        assert (second["id"], second["status_code"]) == ("a-1", 200)
        assert INJECTED_TEXT not in json.dumps(second)
        assert INJECTED_TEXT.encode() not in b"".join(server.bodies), "no request of bob was sent"
        assert len(server.bodies) == 2
        if make_request is make_chat_request:
            assert SECRET_TEXT.encode() in server.bodies[1], "the conversation of alice continues"
        else:
            assert b'"previous_response_id":"resp_0"' in server.bodies[1]
