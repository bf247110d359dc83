"""The check that slices and whole generations are equal on a model, before the first request is sliced.

Short greedy generations are run whole, and then in slices, by the same functions that slice requests. Text,
number of tokens and finish_reason must be equal for each prompt. The prompts lead to different kinds of text,
and slices end at different places, because some text is divided into other tokens when it is sent again:
spaces, line ends, digits, punctuation, and characters of several bytes.

    whole ──▶ slices ──▶ equal: next prompt ──▶ all are equal: token ids, or text
      ▲          │
      └──────────┴─ unequal: once more, until MAX_UNEQUAL comparisons were not equal

Greedy answers of real servers are sometimes not the same twice, so one equal comparison of each prompt is
enough: a server that cannot continue a generation is never equal. Completions ask for token ids first. They
are continued by text if there are none, or if the texts are not equal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from dispatcher.common.printable import escape_unprintable, truncate_text
from dispatcher.common.value import Value
from dispatcher.features.slices.answers import Continues, Finished, interpret_answer
from dispatcher.features.slices.bodies import build_slice_body, compute_slice_tokens
from dispatcher.features.slices.eligibility import (
    CHAT_SUFFIX,
    Generation,
    SliceTerms,
    WholeReason,
    check_generation,
)
from dispatcher.features.slices.progress import MAX_KEPT_BYTES, Progress, Stage
from dispatcher.features.slices.stream import join_events

MAX_UNEQUAL = 3
"""Number of comparisons that are not equal after which the model is not equal."""
CHECK_ID = "equality-check"
"""Id under which the calls of a check are sent."""
WHOLE_TOKENS = 24
"""Number of tokens of each generation."""
MAX_SHOWN_CHARS = 120
"""Number of characters that are shown of each of two texts that differ."""
_SHOWN_CHARS_BEFORE = 30
"""Number of characters that are shown before the first difference."""


class Case(Value, frozen=True):
    """One generation that is compared."""

    prompt: str
    """Prompt of a completion."""
    message: str
    """Message of a chat."""
    slice_tokens: tuple[int, ...]
    """Number of tokens of each slice but the last, which has the rest. The second is not longer than the
    first, so that an answer that begins a new message is recognized."""


CASES = (
    Case(
        "one, two, three, four, five, six, seven, eight, nine, ten, eleven,",
        "Write the numbers from one to one hundred as words, separated by commas, and nothing else.",
        (8, 5, 3),
    ),
    Case(
        "1) café, 漢字: 10.50 €; 2) café, 漢字: 11.50 €; 3) café, 漢字: 12.50 €;",
        "Continue this list up to number 20, and write nothing else: "
        "1) café, 漢字: 10.50 €; 2) café, 漢字: 11.50 €; 3) café, 漢字: 12.50 €;",
        (7, 4, 6),
    ),
    Case(
        "def add(a, b):\n    return a + b\n\n\ndef minus(a, b):\n    return a - b\n\n\ndef times(a, b):",
        "Write a Python function for each of the four basic operations, and nothing else.",
        (6, 5, 4),
    ),
)


class Continuation(StrEnum):
    """How the generations of a model are continued."""

    TOKEN_IDS = "token ids"  # noqa: S105 -- no password
    TEXT = "text"
    REPEATED_TEXT = "repeated text"
    """By the text, which the answers of the server begin with."""


class Difference(Value, frozen=True):
    """Two texts that should be equal, from shortly before the first difference."""

    whole: str
    sliced: str


class _Summary(Value, frozen=True):
    """Properties of an answer that must be equal."""

    text: str
    tokens: int
    finish_reason: str | None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str | None = None
    message: _Message | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage


_decode_answer = msgspec.json.Decoder(_Answer).decode


class EqualityCheck:
    """One check. Send `next_body` until it is `None`, and report each answer."""

    def __init__(
        self, path: str, model: str, template_options: msgspec.Raw | None = None, *, is_streamed: bool = False
    ) -> None:
        """Begin the check of `model`. `template_options` are the `chat_template_kwargs` of the requests.

        `is_streamed` says that slices ask for streams.
        """
        self._is_chat = path.endswith(CHAT_SUFFIX)
        self.is_streamed = is_streamed
        self._generations = [_build_generation(path, model, template_options, case) for case in CASES]
        self._mode = Continuation.TEXT if self._is_chat else Continuation.TOKEN_IDS
        self._wholes: dict[int, _Summary] = {}
        """Whole answers by the number of the case."""
        self._case = 0
        self._unequal_count = 0
        """Number of comparisons in this mode that were not equal."""
        self._is_repeated = False
        """True if the case was not equal before."""
        self._has_equal_case = False
        self._has_ended = False
        self._progress: Progress | None = None
        self._asked_tokens = 0
        self._seems_new = False
        """True if the second slice had the text of the first one again."""
        self.continuation: Continuation | None = None
        """How generations are continued. `None` while that is not known, and if they are not equal."""
        self.is_undecided = False
        """True if the answers show nothing: an error, a malformed answer, or generations that all ended too
        early."""
        self.reason = WholeReason.UNEQUAL
        self.why = ""
        """Description of what was not equal, or of why nothing is known."""
        self.difference: Difference | None = None
        """Texts that were not equal."""
        self.is_new_message = False
        """True if the server has answered with a new message instead of continuing the last one."""

    @property
    def next_body(self) -> bytes | None:
        """Body of the next call. `None` if the check has ended."""
        if self._has_ended:
            return None
        generation = self._generations[self._case]
        if self._case not in self._wholes:
            return build_slice_body(generation, None, WHOLE_TOKENS, wants_token_ids=False)
        sizes, number = CASES[self._case].slice_tokens, self._progress.slices if self._progress else 0
        slice_tokens = sizes[number] if number < len(sizes) else WHOLE_TOKENS
        self._asked_tokens = compute_slice_tokens(generation, self._progress, slice_tokens)
        return build_slice_body(
            generation,
            self._progress,
            self._asked_tokens,
            wants_token_ids=self._mode is Continuation.TOKEN_IDS,
            is_streamed=self.is_streamed,
        )

    def record_answer(self, status: int, body: bytes) -> None:
        """Record the final answer to the call with `next_body`."""
        if self._case in self._wholes:
            self._record_slice(status, body)
        else:
            self._record_whole(status, body)

    def _record_whole(self, status: int, body: bytes) -> None:
        summary = _summarize(body, is_chat=self._is_chat) if 200 <= status < 300 else None
        if summary is None:
            self._end_undecided(f"the server answered {status}")
        elif isinstance(summary, str):
            self._end_undecided(f"malformed answer: {summary}")
        elif summary.tokens > CASES[self._case].slice_tokens[0]:
            self._wholes[self._case] = summary
        elif self._is_repeated:
            self._end_undecided("the generation ended too early")
        else:
            self._begin_next_case()

    def _record_slice(self, status: int, body: bytes) -> None:
        is_success = 200 <= status < 300
        if self._progress is None and not is_success and self._mode is Continuation.TOKEN_IDS:
            self._change_mode(Continuation.TEXT)  # the server may not know the field
            return
        joined = join_events(body) if self.is_streamed and is_success else None
        if joined is not None:
            body = joined[0]
        before, text = self._progress.text if self._progress else "", _find_text(body, is_chat=self._is_chat)
        if self._is_chat and self._progress is not None and self._progress.slices == 1 and text:
            if text != before and text.startswith(before) and self._mode is Continuation.TEXT:
                # Some servers answer with the whole message, and not only with its continuation.
                self._change_mode(Continuation.REPEATED_TEXT)
                return
            # The second slice has no more tokens than the first one.
            self._seems_new = before.startswith(text)
        result = interpret_answer(
            self._generations[self._case],
            self._progress,
            status,
            body,
            asked_tokens=self._asked_tokens,
            max_kept_bytes=MAX_KEPT_BYTES,
            repeats_text=self._mode is Continuation.REPEATED_TEXT,
        )
        match result:
            case Continues(Progress(Stage.RESTART), _, WholeReason.BODY, why) if not self._is_repeated:
                # A request with such an answer is sent whole. The answer shows nothing about other requests.
                self.reason, self.why, self.difference = WholeReason.BODY, why, None
                self._begin_next_case()
            case Continues(Progress(Stage.RESTART), _, reason, why):
                self._end_unequal(reason or WholeReason.UNEQUAL, why, before + text)
            case Continues(progress):
                self._progress = progress
            case Finished(whole_body):
                self._compare(whole_body)
            case _:
                self._compare(body)

    def _compare(self, body: bytes) -> None:
        sliced, whole = _summarize(body, is_chat=self._is_chat), self._wholes[self._case]
        if isinstance(sliced, str):
            self._end_unequal(WholeReason.BODY, f"malformed answer: {sliced}", "")
        elif sliced.text != whole.text:
            why = "the same generation in slices had another text"
            self._end_unequal(WholeReason.UNEQUAL, why, sliced.text)
        elif sliced != whole:
            why = (
                f"the same generation in slices had {sliced.tokens} tokens instead of {whole.tokens}"
                if sliced.tokens != whole.tokens
                else "the same generation in slices had another finish_reason"
            )
            self._end_unequal(WholeReason.UNEQUAL, why, "")
        elif not self._returns_token_ids() and self._case:
            self._change_mode(Continuation.TEXT)  # the earlier cases were continued by token ids
        else:
            if not self._returns_token_ids():
                self._mode = Continuation.TEXT
            self._has_equal_case = True
            self._begin_next_case()

    def _returns_token_ids(self) -> bool:
        """Return False if token ids were asked for and not returned."""
        has_token_ids = self._progress is not None and bool(self._progress.token_ids)
        return has_token_ids or self._mode is not Continuation.TOKEN_IDS

    def _begin_case(self, number: int, *, is_repeated: bool = False) -> None:
        self._case, self._is_repeated = number, is_repeated
        self._progress, self._seems_new = None, False

    def _begin_next_case(self) -> None:
        """Begin the next case, or end the check after the last one."""
        self._begin_case(self._case + 1)
        if self._case < len(CASES):
            return
        self._has_ended = True
        if self._has_equal_case:
            self.continuation, self.why = self._mode, ""
            self.difference, self.is_new_message = None, False
        elif not self.why:
            self._end_undecided("the generation ended too early")

    def _end_unequal(self, reason: WholeReason, why: str, sliced_text: str) -> None:
        """Continue after slices that were not equal to the whole."""
        self.reason, self.why, self.is_new_message = reason, why, self._seems_new
        if self._seems_new:
            self.why = "the server has begun a new message instead of continuing the last one"
        whole_text = self._wholes[self._case].text
        self.difference = _shorten(whole_text, sliced_text) if sliced_text not in ("", whole_text) else None
        self._unequal_count += 1
        may_repeat = reason is WholeReason.UNEQUAL and self._unequal_count < MAX_UNEQUAL
        if not self._returns_token_ids():
            self._mode = Continuation.TEXT
        if may_repeat:
            del self._wholes[self._case]
            self._begin_case(self._case, is_repeated=True)
        elif self._mode is Continuation.TOKEN_IDS:
            self._change_mode(Continuation.TEXT)
        else:
            self._has_ended = True

    def _change_mode(self, mode: Continuation) -> None:
        """Compare all cases again, continued in another way."""
        self._mode, self._unequal_count, self._has_equal_case = mode, 0, False
        self._begin_case(0)

    def _end_undecided(self, why: str) -> None:
        self._has_ended, self.is_undecided = True, True
        self.why, self.difference, self.is_new_message = why, None, False


def _build_generation(path: str, model: str, template_options: msgspec.Raw | None, case: Case) -> Generation:
    fields: dict[str, object] = {"model": model} if model else {}
    fields |= {"max_tokens": WHOLE_TOKENS, "temperature": 0}
    if path.endswith(CHAT_SUFFIX):
        fields["messages"] = [{"role": "user", "content": case.message}]
        if template_options is not None:
            fields["chat_template_kwargs"] = template_options
    else:
        fields["prompt"] = case.prompt
    generation = check_generation(path, msgspec.json.encode(fields), SliceTerms(1, 1, (path,)))
    assert isinstance(generation, Generation)  # noqa: S101 -- the payload is our own
    return generation


def _summarize(body: bytes, *, is_chat: bool) -> _Summary | str:
    """Return text, number of tokens and finish_reason of an answer. If it is malformed, return what is
    wrong."""
    try:
        answer = _decode_answer(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)
    choice = answer.choices[0]
    text = (choice.message.content if choice.message else None) if is_chat else choice.text
    return _Summary(text or "", answer.usage.completion_tokens, choice.finish_reason)


def _find_text(body: bytes, *, is_chat: bool) -> str:
    """Return the text of an answer. Empty if it has none, or is malformed."""
    summary = _summarize(body, is_chat=is_chat)
    return "" if isinstance(summary, str) else summary.text


def _shorten(whole: str, sliced: str) -> Difference:
    """Return the texts from shortly before their first difference, short enough to be shown."""
    equal = next(
        (place for place, (one, other) in enumerate(zip(whole, sliced, strict=False)) if one != other),
        min(len(whole), len(sliced)),
    )
    begin = max(0, equal - _SHOWN_CHARS_BEFORE)
    shown = (
        truncate_text(escape_unprintable(text[begin : begin + MAX_SHOWN_CHARS]), MAX_SHOWN_CHARS)
        for text in (whole, sliced)
    )
    return Difference(*shown)
