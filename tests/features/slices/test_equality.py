"""The check whether a model continues its generations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from dispatcher.features.slices.eligibility import WholeReason
from dispatcher.features.slices.equality import (
    CASES,
    MAX_SHOWN_CHARS,
    MAX_UNEQUAL,
    WHOLE_TOKENS,
    Case,
    Continuation,
    EqualityCheck,
)
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
        (CHAT, {"ignores_last_answer": True}, WholeReason.UNEQUAL),
        (CHAT, {"reasoning": "reasoning"}, WholeReason.REASONING),
        (CHAT, {"reasoning": "reasoning_content"}, WholeReason.REASONING),
        (CHAT, {"rejects_unknown_fields": True}, WholeReason.BODY),
        (COMPLETION, {"merged_tokens": True, "no_token_ids": True}, WholeReason.UNEQUAL),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_server_that_does_not_continue_generations_has_a_reason(
    path: str, config: dict[str, Any], reason: WholeReason, is_streamed: bool
) -> None:
    check = run_check(Server(**config), path, is_streamed=is_streamed)
    assert check.continuation is None
    assert not check.is_undecided
    assert check.reason is reason
    assert check.why


def test_texts_that_are_not_equal_are_shown_from_their_first_difference() -> None:
    check = run_check(Server(merged_tokens=True, no_token_ids=True), COMPLETION)
    assert check.difference is not None
    whole, sliced = check.difference.whole, check.difference.sliced
    assert whole != sliced
    assert max(len(whole), len(sliced)) <= MAX_SHOWN_CHARS
    assert whole.isprintable()
    assert not check.is_new_message


@pytest.mark.parametrize("is_streamed", [False, True])
def test_server_that_answers_a_message_again_is_named_as_such(is_streamed: bool) -> None:
    check = run_check(Server(ignores_last_answer=True), CHAT, is_streamed=is_streamed)
    assert check.is_new_message
    assert check.why == "the server has begun a new message instead of continuing the last one"
    assert check.difference is not None


def test_unequal_server_is_compared_several_times() -> None:
    server = Server(merged_tokens=True, no_token_ids=True)
    run_check(server, COMPLETION)
    wholes = sum(body["max_tokens"] == WHOLE_TOKENS for body in server.bodies)
    assert MAX_UNEQUAL <= wholes < MAX_UNEQUAL + len(CASES)


class ChangedServer(Server):
    """Server whose answers of the given numbers have another text."""

    def __init__(self, *changed: int, **config: Any) -> None:
        super().__init__(**config)
        self.changed = changed

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        status, answer = super().answer(path, body)
        if len(self.bodies) not in self.changed:
            return status, answer
        decoded = msgspec.json.decode(answer)
        decoded["choices"][0]["text"] += "!"
        return status, msgspec.json.encode(decoded)


def test_one_equal_comparison_of_each_prompt_is_enough() -> None:
    check = run_check(ChangedServer(1), COMPLETION)
    assert check.continuation is Continuation.TOKEN_IDS
    assert (check.why, check.difference) == ("", None)


@pytest.mark.parametrize("case", CASES)
def test_each_prompt_has_to_be_equal(case: Case) -> None:
    class UnequalServer(Server):
        def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
            status, answer = super().answer(path, body)
            decoded = msgspec.json.decode(answer)
            if self.bodies[-1]["prompt"] == case.prompt:  # not a continued one
                decoded["choices"][0]["text"] = "!" + decoded["choices"][0]["text"][1:]
            return status, msgspec.json.encode(decoded)

    assert run_check(Server(no_token_ids=True), COMPLETION).continuation is Continuation.TEXT
    check = run_check(UnequalServer(no_token_ids=True), COMPLETION)
    assert check.continuation is None
    assert check.reason is WholeReason.UNEQUAL


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_cost_of_a_check_of_an_equal_server_is_bounded(path: str) -> None:
    server = Server()
    run_check(server, path)
    assert len(server.bodies) == sum(1 + len(case.slice_tokens) + 1 for case in CASES) == 15
    assert sum(body["max_tokens"] for body in server.bodies) <= 2 * WHOLE_TOKENS * len(CASES) + 10


def test_prompt_whose_generation_ends_too_early_is_left_out() -> None:
    class BriefServer(Server):
        def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
            if CASES[1].prompt in msgspec.json.decode(body)["prompt"]:
                return 200, msgspec.json.encode(WHOLE)
            return super().answer(path, body)

    assert run_check(BriefServer(no_token_ids=True), COMPLETION).continuation is Continuation.TEXT


@dataclass
class UnsteadyServer(Server):
    """Server that is not equal at first, and then does not continue its generations."""

    ends_early: bool

    def __post_init__(self) -> None:
        super().__init__(no_token_ids=True)

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        status, generated = super().answer(path, body)
        asks_whole = [each["max_tokens"] == WHOLE_TOKENS for each in self.bodies]
        if sum(asks_whole) == 1:
            return status, generated.replace(b'"text":"', b'"text":"!') if asks_whole[-1] else generated
        if not self.bodies[-1]["prompt"].startswith(CASES[0].prompt):
            return status, generated
        if self.ends_early:
            return 200, msgspec.json.encode(WHOLE)
        return (status, generated) if asks_whole[-1] else (200, b"{")


@pytest.mark.parametrize("ends_early", [False, True])
def test_prompt_that_was_not_equal_is_not_left_out(ends_early: bool) -> None:
    check = run_check(UnsteadyServer(ends_early), COMPLETION)
    assert check.continuation is None
    assert check.is_undecided is ends_early


def test_answer_that_cannot_be_continued_says_nothing_of_others() -> None:
    """A chat template strips the white space that one answer begins with."""

    class SpaceServer(Server):
        def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
            status, answer = super().answer(path, body)
            decoded = msgspec.json.decode(answer)
            if CASES[0].message in str(self.bodies[-1]):
                decoded["choices"][0]["message"]["content"] = "  " + "a" * self.bodies[-1]["max_tokens"]
            return status, msgspec.json.encode(decoded)

    assert run_check(SpaceServer(), CHAT).continuation is Continuation.TEXT


WHOLE = {
    "choices": [{"text": "one two", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 6},
}


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"{}", "the server answered 500"),
        (200, b"{", "malformed answer: "),
        (200, b'{"choices":[]}', "malformed answer: "),
        (200, b"[]", "malformed answer: Expected `object`, got `array`"),
        (200, b"\xff", "malformed answer: "),
        (200, msgspec.json.encode(WHOLE), "the generation ended too early"),
        *(
            (
                200,
                b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":%b}}' % tokens,
                "malformed answer: ",
            )
            for tokens in (b"null", b'"8"', b"-1", b"1e400", b"1" * 400, b"true", b"8.5")
        ),
    ],
)
def test_check_whose_whole_generation_shows_nothing_is_undecided(status: int, body: bytes, why: str) -> None:
    check = EqualityCheck(COMPLETION, "")
    while next_body := check.next_body:
        assert b'"model"' not in next_body
        check.record_answer(status, body)
    assert check.is_undecided
    assert check.continuation is None
    assert check.why.startswith(why)


GARBAGE = [
    *((200, b"{"), (200, b"[]"), (404, b""), (200, b'{"choices":[{"text":5}]}'), (200, b"data: {\n")),
    *(
        (200, b'{"choices":[{"text":"a","finish_reason":"length"}],"usage":%b}' % usage)
        for usage in (
            b'{"prompt_tokens":5,"completion_tokens":"8"}',
            b'{"prompt_tokens":"5","completion_tokens":8}',
            b'{"prompt_tokens":5,"completion_tokens":-8}',
        )
    ),
]
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
