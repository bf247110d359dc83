"""Answers of slices: when a generation continues, how it starts again, and the answer of the whole.

That joined texts are those of one call is shown in tests/properties/test_slice_properties.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dispatcher.features.slices.answers import (
    REPLACEMENT,
    Continues,
    Finished,
    SliceResult,
    Unchanged,
    interpret_answer,
)
from dispatcher.features.slices.eligibility import Generation, SliceTerms, WholeReason, check_generation
from dispatcher.features.slices.progress import Progress, Stage, decode_progress, encode_progress

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS = 100
TEN_IDS = b"0,1,2,3,4,5,6,7,8,9"


def make_generation(path: str = COMPLETION, **fields: Any) -> Generation:
    content: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "question"}]} if path == CHAT else {"prompt": "text"}
    )
    payload = msgspec.json.encode({"model": "m", "max_tokens": MAX_TOKENS, **content, **fields})
    generation = check_generation(path, payload, SliceTerms(1, 1, (path,)))
    assert isinstance(generation, Generation)
    return generation


def build_answer(
    text: Any,
    tokens: Any = 10,
    finish_reason: Any = "length",
    prompt_tokens: int = 5,
    cached_tokens: int | None = None,
    **choice: Any,
) -> bytes:
    """Return the answer to a completion. `choice` are further fields of its choice."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": 0,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return msgspec.json.encode(
        {
            "id": "answer",
            "object": "text_completion",
            "created": 7,
            "model": "m",
            "choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **choice}],
            "usage": usage,
        }
    )


def build_chat(
    content: Any, tokens: int = 10, finish_reason: str = "length", prompt: int = 5, **message: Any
) -> bytes:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
    return msgspec.json.encode({"id": "a", "object": "chat.completion", "choices": [choice], "usage": usage})


def make_progress(text: str = "one", stage: Stage = Stage.SLICES, **fields: Any) -> Progress:
    defaults: dict[str, Any] = {
        "slices": 1,
        "tokens": 10,
        "prompt_tokens": 5,
        "response_id": "first",
        "created": 3,
    }
    return Progress(stage, text=text, **(defaults | fields))


def interpret(
    body: bytes,
    progress: Progress | None = None,
    generation: Generation | None = None,
    *,
    status: int = 200,
    asked: int = 10,
    max_kept_bytes: int = 1000,
    **options: Any,
) -> SliceResult:
    return interpret_answer(
        generation or make_generation(),
        progress,
        status,
        body,
        asked_tokens=asked,
        max_kept_bytes=max_kept_bytes,
        **options,
    )


def get_progress(result: SliceResult, stage: Stage = Stage.SLICES) -> Progress:
    assert isinstance(result, Continues), result
    assert result.progress.stage is stage, result
    return result.progress


def get_answer(result: SliceResult) -> dict[str, Any]:
    assert isinstance(result, Finished), result
    return dict(msgspec.json.decode(result.body))


class TestContinues:
    def test_slice_that_ends_by_its_length_continues(self) -> None:
        result = interpret(build_answer("one"), version="v2", session_token="server-1")
        progress = get_progress(result)
        assert progress == Progress(
            Stage.SLICES,
            slices=1,
            text="one",
            tokens=10,
            prompt_tokens=5,
            response_id="answer",
            created=7,
            object="text_completion",
            model="m",
            version="v2",
            session_token="server-1",
            cut_tokens=progress.cut_tokens,
        )
        assert isinstance(result, Continues)
        assert result.reason is None

    def test_texts_and_tokens_of_slices_add_up(self) -> None:
        cached = {"usage": {"prompt_tokens": 15, "completion_tokens": 10}}
        details = cached["usage"] | {"prompt_tokens_details": {"cached_tokens": 12}}
        body = msgspec.json.encode(msgspec.json.decode(build_answer(" two")) | {"usage": details})
        progress = get_progress(interpret(body, make_progress(session_token="server-1")))
        assert (progress.text, progress.tokens, progress.slices) == ("one two", 20, 2)
        assert progress.cached_tokens == 12
        assert progress.session_token == "server-1"
        assert (progress.response_id, progress.prompt_tokens) == ("first", 5)

    def test_tokens_are_kept_if_the_server_returns_them(self) -> None:
        ids = [*range(10)]
        progress = get_progress(interpret(build_answer("one", token_ids=ids, prompt_token_ids=[7, 8])))
        assert (progress.token_ids, progress.prompt_token_ids) == (TEN_IDS, b"7,8")
        progress = get_progress(interpret(build_answer("two", token_ids=ids, prompt_tokens=12), progress))
        assert progress.token_ids == TEN_IDS + b"," + TEN_IDS
        assert progress.tokens == 20

    @pytest.mark.parametrize(
        "fields",
        [
            {"token_ids": [1, 2]},
            {"token_ids": [*range(10)]},
            {"token_ids": "abc", "prompt_token_ids": [7]},
            {"token_ids": [None] * 10, "prompt_token_ids": [7]},
        ],
        ids=["too few", "no prompt", "no list", "no numbers"],
    )
    def test_tokens_that_are_not_complete_are_not_used(self, fields: dict[str, Any]) -> None:
        assert get_progress(interpret(build_answer("one", **fields))).token_ids == b""

    def test_part_of_a_character_and_white_space_at_the_end_of_a_chat_are_generated_again(self) -> None:
        assert get_progress(interpret(build_answer("one" + REPLACEMENT))).text == "one"
        assert get_progress(interpret(build_answer("one \n"))).text == "one \n"
        progress = get_progress(
            interpret(build_chat("one \n" + REPLACEMENT), generation=make_generation(CHAT))
        )
        assert progress.text == "one"
        assert progress.cut_tokens >= 5

    @pytest.mark.parametrize(
        ("progress", "prompt_tokens", "kept"),
        [
            pytest.param(make_progress(cut_tokens=4), 12, 7, id="three were cut"),
            pytest.param(make_progress(cut_tokens=9), 6, 1, id="nearly all were cut"),
            pytest.param(make_progress(uncounted_tokens=5), 18, 13, id="more than were counted"),
            pytest.param(make_progress(), 17, 10, id="no more than were generated"),
            pytest.param(make_progress(), 5, 10, id="a server that counts only what is not cached"),
            pytest.param(make_progress(), 400, 10, id="a number that cannot be"),
        ],
    )
    def test_tokens_that_were_left_are_counted_by_the_prompt(
        self, progress: Progress, prompt_tokens: int, kept: int
    ) -> None:
        body = build_answer(" two", prompt_tokens=prompt_tokens)
        assert get_progress(interpret(body, progress)).tokens == kept + 10


class TestFinished:
    def test_answer_has_all_texts_and_the_names_of_the_first_slice(self) -> None:
        body = build_answer(" two", 4, "stop", 15, stop_reason=None, token_ids=[1], prompt_token_ids=[2])
        result = interpret(body, make_progress(cached_tokens=30))
        assert get_answer(result) == {
            "id": "first",
            "object": "text_completion",
            "created": 3,
            "model": "m",
            "choices": [{"index": 0, "text": "one two", "finish_reason": "stop", "stop_reason": None}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 14, "total_tokens": 19},
        }
        assert isinstance(result, Finished)
        assert (result.slices, result.cached_tokens) == (2, 30)

    def test_chat_has_its_text_in_the_message(self) -> None:
        result = interpret(
            build_chat(" two", 4, "stop", refusal=None), make_progress(), make_generation(CHAT)
        )
        (choice,) = get_answer(result)["choices"]
        assert choice["message"] == {"role": "assistant", "content": "one two", "refusal": None}

    def test_generation_that_has_all_its_tokens_has_ended(self) -> None:
        body = build_answer(" two", 10, prompt_tokens=95)
        answer = get_answer(interpret(body, make_progress(tokens=90)))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == MAX_TOKENS

    def test_slice_with_fewer_tokens_than_asked_for_has_filled_the_context(self) -> None:
        answer = get_answer(interpret(build_answer(" two", 9, prompt_tokens=15), make_progress()))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 19

    def test_first_slice_may_be_the_only_one(self) -> None:
        answer = get_answer(interpret(build_answer("one", 3, "stop")))
        assert answer["id"] == "answer"
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}

    @pytest.mark.parametrize(
        ("stop", "before", "text", "expected", "found"),
        [
            (["two"], "one t", "wo three", "one ", "two"),
            (["e t", "ne tw"], "one", " two", "on", "e t"),
            (["two"], "one ", "two", None, None),
            (["one"], "one", " two", None, None),
        ],
        ids=["across", "first of two", "all in the slice", "all before"],
    )
    def test_stop_string_across_a_boundary_ends_the_generation(
        self, stop: list[str], before: str, text: str, expected: str | None, found: str | None
    ) -> None:
        body = build_answer(text, prompt_tokens=15, stop_reason=None)
        result = interpret(body, make_progress(before), make_generation(stop=stop))
        if expected is None:
            get_progress(result)
            return
        (choice,) = get_answer(result)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", found)


class TestErrors:
    @pytest.mark.parametrize("status", [400, 404, 500, 302])
    def test_error_of_the_first_slice_is_that_of_the_request(self, status: int) -> None:
        assert interpret(b"{}", status=status) == Unchanged()

    def test_error_of_a_later_slice_asks_for_the_rest_and_then_starts_again(self) -> None:
        result = interpret(b"{}", make_progress(), status=400)
        progress = get_progress(result, Stage.REST)
        assert isinstance(result, Continues)
        assert (progress.text, result.reason, result.usage) == ("one", WholeReason.BODY, None)
        assert "400" in result.why
        result = interpret(b"{}", progress, status=413)
        assert get_progress(result, Stage.RESTART) == Progress(Stage.RESTART)

    def test_answer_after_the_restart_is_returned_as_it_is(self) -> None:
        assert interpret(build_answer("one", 10), Progress(Stage.RESTART)) == Unchanged()
        assert interpret(b"error", Progress(Stage.RESTART), status=500) == Unchanged()

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", WholeReason.BODY),
            (b"[]", WholeReason.BODY),
            (b"\xff", WholeReason.BODY),
            (b"[" * 100_000, WholeReason.BODY),
            (b'{"choices":[]}', WholeReason.BODY),
            (b'{"choices":[5]}', WholeReason.BODY),
            (b'{"choices":5}', WholeReason.BODY),
            (build_answer(None), WholeReason.BODY),
            (build_answer("a", None), WholeReason.BODY),
            (build_answer("a", finish_reason=None), WholeReason.BODY),
            (build_answer("a").replace(b'"usage"', b'"used"'), WholeReason.BODY),
            (build_answer("a", tokens=-1), WholeReason.BODY),
            (build_answer("a", tokens=2**70), WholeReason.BODY),
            (build_answer("a", tokens=10.5), WholeReason.BODY),
            (build_answer("a", tokens=True), WholeReason.BODY),
            (build_answer("a", tokens="10"), WholeReason.BODY),
            (build_answer("a", prompt_tokens=2**70), WholeReason.BODY),
            (build_answer("a", prompt_tokens=-1), WholeReason.BODY),
            (build_answer("a", prompt_tokens=5).replace(b":5", b":5" + b"0" * 400), WholeReason.BODY),
            (build_answer("a", prompt_tokens=5).replace(b":5", b":NaN"), WholeReason.BODY),
            (build_answer("a", cached_tokens=2**70), WholeReason.BODY),
        ],
    )
    @pytest.mark.parametrize("progress", [None, make_progress()])
    def test_answer_that_cannot_be_joined_starts_the_generation_again(
        self, body: bytes, reason: WholeReason, progress: Progress | None
    ) -> None:
        result = interpret(body, progress)
        get_progress(result, Stage.RESTART)
        assert isinstance(result, Continues)
        assert result.reason is reason
        assert result.why

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (build_chat("a", reasoning="think"), WholeReason.REASONING),
            (build_chat(None, reasoning_content="think"), WholeReason.REASONING),
            (build_chat("a", tool_calls=[{"id": "t"}]), WholeReason.TOOLS),
            (build_chat(None, function_call={"name": "f"}), WholeReason.TOOLS),
            (build_chat(None), WholeReason.BODY),
            (build_answer("a"), WholeReason.BODY),
        ],
    )
    def test_chat_that_cannot_be_joined_starts_again(self, body: bytes, reason: WholeReason) -> None:
        result = interpret(body, generation=make_generation(CHAT))
        get_progress(result, Stage.RESTART)
        assert isinstance(result, Continues)
        assert result.reason is reason

    def test_first_answer_that_has_ended_by_itself_needs_no_joining(self) -> None:
        body = build_chat("a", finish_reason="tool_calls", tool_calls=[{"id": "t"}])
        assert interpret(body, generation=make_generation(CHAT)) == Unchanged()
        get_progress(interpret(body, make_progress(), make_generation(CHAT)), Stage.RESTART)
        unreadable = build_answer("a", finish_reason="stop").replace(b'"created"', b'"\xff"')
        assert interpret(unreadable) == Unchanged()
        get_progress(interpret(unreadable, make_progress()), Stage.RESTART)
        # The stream may have had more.
        get_progress(interpret(body, None, make_generation(CHAT), is_cut=True), Stage.RESTART)

    @pytest.mark.parametrize("created", [2**63, 2**70, -1, 1.5, True, "7", None, [], 10**300])
    def test_time_that_is_none_is_not_kept(self, created: Any) -> None:
        body = build_answer("one").replace(b'"created":7', b'"created":' + msgspec.json.encode(created))
        progress = get_progress(interpret(body))
        assert progress.created == 0
        assert decode_progress(encode_progress(progress)) == progress

    @pytest.mark.parametrize("path", [CHAT, COMPLETION])
    def test_numbers_without_a_meaning_are_passed_on_as_they_are_written(self, path: str) -> None:
        body = (
            build_chat("a", finish_reason="stop", x=2**70) if path == CHAT else build_answer("a", 3, "stop")
        )
        body = body.replace(b'"completion_tokens"', b'"x":1e400,"completion_tokens"')
        result = interpret(body, make_progress(), make_generation(path))
        assert isinstance(result, Finished)
        assert b'"x":1e400' in result.body


class TestWithoutProgress:
    def test_slice_without_text_asks_for_the_rest_from_what_was_kept(self) -> None:
        progress = get_progress(
            interpret(build_answer("", 2, prompt_tokens=13), make_progress(cut_tokens=3), asked=2), Stage.REST
        )
        assert (progress.text, progress.tokens) == ("one", 8)
        result = interpret(build_answer("", 10, prompt_tokens=13), progress)
        get_progress(result, Stage.RESTART)

    def test_first_slice_without_text_starts_again(self) -> None:
        get_progress(interpret(build_answer(REPLACEMENT)), Stage.RESTART)

    def test_chat_that_begins_with_white_space_starts_again(self) -> None:
        get_progress(interpret(build_chat("\n one"), generation=make_generation(CHAT)), Stage.RESTART)

    def test_tokens_without_text_continue(self) -> None:
        ids = [*range(10)]
        progress = get_progress(interpret(build_answer("", token_ids=ids, prompt_token_ids=[7])))
        assert progress.token_ids == TEN_IDS


class TestTokens:
    BEFORE = make_progress(token_ids=TEN_IDS, prompt_token_ids=b"1,2")

    def test_slice_whose_text_begins_with_a_part_of_a_character_starts_again(self) -> None:
        get_progress(
            interpret(build_answer(REPLACEMENT + "a", token_ids=[*range(10)]), self.BEFORE), Stage.RESTART
        )

    def test_slice_that_ends_with_a_part_of_a_character_is_given_up_for_the_rest(self) -> None:
        body = build_answer("a" + REPLACEMENT, token_ids=[*range(10)])
        progress = get_progress(interpret(body, self.BEFORE), Stage.REST)
        assert (progress.text, progress.token_ids) == ("one", self.BEFORE.token_ids)
        get_progress(interpret(body, progress, asked=5), Stage.RESTART)
        get_progress(interpret(body, self.BEFORE, is_cut=True), Stage.RESTART)
        first = build_answer("a" + REPLACEMENT, token_ids=[*range(10)], prompt_token_ids=[7])
        get_progress(interpret(first), Stage.RESTART)

    def test_prompt_of_tokens_is_continued_only_by_tokens(self) -> None:
        generation = make_generation(prompt=[1, 2])
        body = build_answer("a" * 1000, token_ids=[*range(10)])
        get_progress(interpret(body, self.BEFORE, generation), Stage.RESTART)
        get_progress(interpret(body, self.BEFORE, generation, max_kept_bytes=5000))

    @pytest.mark.parametrize("progress", [None, BEFORE])
    @pytest.mark.parametrize("is_cut", [False, True])
    def test_prompt_of_tokens_starts_again_where_a_server_returns_no_tokens(
        self, progress: Progress | None, is_cut: bool
    ) -> None:
        result = interpret(build_answer("a"), progress, make_generation(prompt=[1, 2]), is_cut=is_cut)
        get_progress(result, Stage.RESTART)
        assert isinstance(result, Continues)
        assert result.reason is WholeReason.PROMPT


class TestSize:
    def test_slice_beyond_the_kept_bytes_is_given_up_for_the_rest_in_one_call(self) -> None:
        before = make_progress()
        result = interpret(build_answer("é" * 490, prompt_tokens=15), before)
        assert get_progress(result, Stage.REST) == replace(before, stage=Stage.REST)
        assert isinstance(result, Continues)
        assert result.reason is WholeReason.TOO_LARGE
        get_progress(interpret(build_answer("é" * 470, prompt_tokens=15), before))

    @pytest.mark.parametrize("progress", [None, make_progress("one", Stage.REST)])
    def test_generation_that_cannot_be_kept_at_all_starts_again(self, progress: Progress | None) -> None:
        result = interpret(build_answer("é" * 490, prompt_tokens=15), progress)
        get_progress(result, Stage.RESTART)
        assert isinstance(result, Continues)
        assert result.reason is WholeReason.TOO_LARGE

    @pytest.mark.parametrize("name", ["id", "model", "object"])
    def test_names_count_towards_the_kept_bytes(self, name: str) -> None:
        body = msgspec.json.encode(msgspec.json.decode(build_answer("one")) | {name: "n" * 1000})
        get_progress(interpret(body), Stage.RESTART)
        get_progress(interpret(body, max_kept_bytes=1100))

    def test_session_token_counts_towards_the_kept_bytes(self) -> None:
        before = make_progress()
        result = interpret(build_answer("two", prompt_tokens=15), before, session_token="s" * 1000)
        assert get_progress(result, Stage.REST) == replace(before, stage=Stage.REST)

    def test_rest_that_ends_early_is_asked_for_again(self) -> None:
        before = make_progress("é" * 400, Stage.REST)
        result = interpret(build_answer(" two", 10, prompt_tokens=15), before)
        assert get_progress(result, Stage.REST).text.endswith("é two")
        assert isinstance(result, Continues)
        assert result.reason is None


class TestRepeatedText:
    CHAT = make_generation(CHAT)
    BEFORE = make_progress(repeats_text=True)

    def test_first_slice_says_for_all_whether_the_server_repeats_the_text(self) -> None:
        progress = get_progress(interpret(build_chat("one"), None, self.CHAT, repeats_text=True))
        assert progress.text == "one"
        progress = get_progress(interpret(build_chat("one two"), progress, self.CHAT))
        assert progress.text == "one two"
        assert (
            get_progress(interpret(build_chat("one two three"), progress, self.CHAT)).text == "one two three"
        )

    def test_answer_that_does_not_repeat_the_beginning_starts_again(self) -> None:
        get_progress(interpret(build_chat(" two"), self.BEFORE, self.CHAT, repeats_text=True), Stage.RESTART)

    def test_answer_that_repeats_the_beginning_unexpectedly_starts_again(self) -> None:
        result = interpret(build_chat("one two"), make_progress(), self.CHAT)
        get_progress(result, Stage.RESTART)
        assert isinstance(result, Continues)
        assert result.reason is WholeReason.UNEQUAL

    def test_completion_may_repeat_itself(self) -> None:
        assert get_progress(interpret(build_answer("one"), make_progress("one"))).text == "oneone"


class TestCutAnswers:
    def test_cut_answer_without_text_leaves_the_progress_as_it_was(self) -> None:
        before = make_progress(uncounted_tokens=4, cut_tokens=3)
        for stage in (Stage.SLICES, Stage.REST):
            progress = replace(before, stage=stage)
            for body in (build_answer("", 0, prompt_tokens=0), build_answer("", 0, prompt_tokens=15)):
                assert get_progress(interpret(body, progress, is_cut=True), stage) == progress

    def test_cut_answer_continues_with_fewer_tokens_than_asked_for(self) -> None:
        progress = get_progress(interpret(build_answer("one", 3), asked=10, is_cut=True))
        assert (progress.text, progress.tokens, progress.uncounted_tokens) == ("one", 3, 0)

    def test_tokens_that_a_cut_answer_may_have_had_are_remembered(self) -> None:
        progress = get_progress(
            interpret(
                build_answer("é two", 2, prompt_tokens=0), make_progress(uncounted_tokens=5), is_cut=True
            )
        )
        assert progress.uncounted_tokens == 4 + 5
        progress = get_progress(
            interpret(build_answer("é two", 2, prompt_tokens=15), make_progress(), is_cut=True)
        )
        assert progress.uncounted_tokens == 4

    def test_tokens_of_a_cut_answer_are_counted_by_their_ids(self) -> None:
        before = make_progress(token_ids=TEN_IDS, prompt_token_ids=b"1")
        progress = get_progress(interpret(build_answer(" two", 2, token_ids=[8, 9]), before, is_cut=True))
        assert (progress.tokens, progress.uncounted_tokens) == (12, 0)

    def test_what_was_cut_off_before_is_remembered_until_it_is_counted(self) -> None:
        before = make_progress(cut_tokens=6)
        unknown = get_progress(interpret(build_answer("two", 1, prompt_tokens=0), before, is_cut=True))
        known = get_progress(interpret(build_answer("two", 1, prompt_tokens=13), before, is_cut=True))
        assert unknown.cut_tokens == known.cut_tokens + 6

    def test_text_that_may_be_held_back_for_a_stop_string_is_not_kept_with_its_tokens(self) -> None:
        before = make_progress(token_ids=TEN_IDS, prompt_token_ids=b"1")
        body = build_answer(" two", 2, token_ids=[8, 9])
        get_progress(interpret(body, before, make_generation(stop="x"), is_cut=True), Stage.RESTART)

    @pytest.mark.parametrize("finish_reason", ["stop", "length"])
    def test_cut_answer_does_not_end_a_generation(self, finish_reason: str) -> None:
        before = make_progress(tokens=95)
        get_progress(interpret(build_answer("a", 5, finish_reason), before, is_cut=True), Stage.RESTART)

    def test_stop_string_in_a_cut_answer_ends_the_generation(self) -> None:
        result = interpret(
            build_answer("wo", 2), make_progress("one t"), make_generation(stop="tw"), is_cut=True
        )
        assert get_answer(result)["choices"][0]["text"] == "one "

    def test_answer_after_the_last_token_is_not_used(self) -> None:
        before = make_progress("whole", tokens=97, uncounted_tokens=5)
        body = build_answer("!", 1, "stop", prompt_tokens=105, stop_reason=7)
        (choice,) = get_answer(interpret(body, before, asked=1))["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("whole", "length", None)
        get_progress(interpret(body, before, asked=1, is_cut=True), Stage.RESTART)
