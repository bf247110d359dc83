"""The check whether a model continues its generations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dispatcher.core.slices.eligibility import WholeReason
from dispatcher.core.slices.equality import MAX_ROUNDS, Continuation, EqualityCheck
from dispatcher.lab.standin.generation_api import GenerationConfig, InvalidRequestError, parse_request

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class Server:
    """Server that generates text. `repeats` lets it repeat the beginning of a message that it continues."""

    def __init__(self, *, repeats: bool = False, **config: Any) -> None:
        self.config = GenerationConfig(**{"end_probability": 0.0, **config})
        self.repeats = repeats
        self.bodies: list[dict[str, Any]] = []

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.bodies.append(msgspec.json.decode(body))
        try:
            parsed = parse_request(body, is_chat=path == CHAT, config=self.config)
        except InvalidRequestError as error:
            return 400, error.build_body().encode()
        generated = parsed.generate_answer(0)
        if parsed.is_stream:
            return 200, b"".join(b"data: %b\n\n" % event.data for event in generated.build_events("a", 1))
        answer = msgspec.json.decode(generated.build_body("a", 1))
        last = self.bodies[-1].get("messages", [{}])[-1]
        if self.repeats and last.get("role") == "assistant":
            message = answer["choices"][0]["message"]
            message["content"] = last["content"] + message["content"]
        return 200, msgspec.json.encode(answer)


def run_check(server: Server, path: str, **options: Any) -> EqualityCheck:
    check = EqualityCheck(path, "m", **options)
    for _ in range(100):
        body = check.next_body
        if body is None:
            return check
        check.record_answer(*server.answer(path, body))
    raise AssertionError("the check does not end")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "config", "expected"),
    [
        (COMPLETION, {}, Continuation.TOKEN_IDS),
        (COMPLETION, {"merged_tokens": True}, Continuation.TOKEN_IDS),
        (COMPLETION, {"no_token_ids": True}, Continuation.TEXT),
        (COMPLETION, {"rejects_unknown_fields": True}, Continuation.TEXT),
        (COMPLETION, {"no_token_ids": True, "replaces_incomplete": True}, Continuation.TEXT),
        (CHAT, {}, Continuation.TEXT),
        (CHAT, {"trims_content": True}, Continuation.TEXT),
    ],
)
def test_server_that_continues_generations_is_equal(
    path: str, config: dict[str, Any], expected: Continuation, is_streamed: bool
) -> None:
    check = run_check(Server(**config), path, is_streamed=is_streamed)
    assert check.continuation is expected
    assert not check.is_undecided
    assert check.why == ""


def test_server_that_repeats_the_message_is_equal_by_repeated_text() -> None:
    check = run_check(Server(repeats=True), CHAT)
    assert check.continuation is Continuation.REPEATED_TEXT
    assert check.why == ""


@pytest.mark.parametrize(
    ("path", "config", "reason"),
    [
        (CHAT, {"ignores_continue": True}, WholeReason.UNEQUAL),
        (CHAT, {"reasoning": "reasoning"}, WholeReason.REASONING),
        (CHAT, {"reasoning": "reasoning_content"}, WholeReason.REASONING),
        (CHAT, {"rejects_unknown_fields": True}, WholeReason.BODY),
        (COMPLETION, {"merged_tokens": True, "no_token_ids": True}, WholeReason.UNEQUAL),
    ],
)
def test_server_that_does_not_continue_generations_has_a_reason(
    path: str, config: dict[str, Any], reason: WholeReason
) -> None:
    check = run_check(Server(**config), path)
    assert check.continuation is None
    assert not check.is_undecided
    assert check.reason is reason
    assert check.why


def test_unequal_server_is_compared_several_times() -> None:
    server = Server(merged_tokens=True, no_token_ids=True)
    run_check(server, COMPLETION)
    assert sum(body["max_tokens"] == 24 for body in server.bodies) == MAX_ROUNDS


def test_one_equal_comparison_is_enough() -> None:
    class UnsteadyServer(Server):
        def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
            status, answer = super().answer(path, body)
            if len(self.bodies) == 1:
                decoded = msgspec.json.decode(answer)
                decoded["choices"][0]["text"] += "!"
                return status, msgspec.json.encode(decoded)
            return status, answer

    check = run_check(UnsteadyServer(), COMPLETION)
    assert check.continuation is not None
    assert check.why == ""


WHOLE = {
    "choices": [{"text": "one two", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 8},
}


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"{}", "the server answered 500"),
        (200, b"{", "the server answered 200"),
        (200, b'{"choices":[]}', "the server answered 200"),
        (200, b"[]", "the server answered 200"),
        (200, msgspec.json.encode(WHOLE), "the generation ended too early"),
        (
            200,
            msgspec.json.encode(WHOLE | {"usage": {"completion_tokens": None}}),
            "the generation ended too early",
        ),
    ],
)
def test_check_whose_whole_generation_shows_nothing_is_undecided(status: int, body: bytes, why: str) -> None:
    check = EqualityCheck(COMPLETION, "")
    assert b'"model"' not in (check.next_body or b"")
    check.record_answer(status, body)
    assert check.is_undecided
    assert check.next_body is None
    assert (check.continuation, check.why) == (None, why)


GARBAGE = [(200, b"{"), (200, b"[]"), (404, b""), (200, b'{"choices":[{"text":5}]}'), (200, b"data: {\n")]
"""Answers that no slice should have."""


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("answer", GARBAGE)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_check_ends_whatever_slices_return(path: str, answer: tuple[int, bytes], is_streamed: bool) -> None:
    server, check = Server(), EqualityCheck(path, "m", is_streamed=is_streamed)
    for number in range(100):
        body = check.next_body
        if body is None:
            break
        check.record_answer(*(server.answer(path, body) if number == 0 else answer))
    assert check.next_body is None
    assert check.continuation is None
