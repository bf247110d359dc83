"""The check that slices and whole generations are equal on a model, before the first request is sliced.

A short greedy generation is run whole, and then in slices, by the same functions that slice requests. Text,
number of tokens and finish_reason must be equal. Greedy answers of real servers are sometimes not the same
twice, so unequal answers are compared again, and one equal comparison is enough: a server that cannot
continue a generation is never equal.

    whole ──▶ slices ──▶ equal: token ids, or text          completions ask for token ids first, and
      ▲          │                                          are continued by text if there are none
      └──────────┴─ unequal: once more, MAX_ROUNDS times
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from dispatcher.core.slices.answers import Continues, Finished, interpret_answer
from dispatcher.core.slices.bodies import build_slice_body, compute_slice_tokens
from dispatcher.core.slices.eligibility import (
    CHAT_SUFFIX,
    Generation,
    SliceTerms,
    WholeReason,
    check_generation,
)
from dispatcher.core.slices.progress import Progress, Stage
from dispatcher.core.slices.stream import join_events

MAX_ROUNDS = 3
_SLICE_TOKENS, _WHOLE_TOKENS = 8, 24
_MAX_KEPT_BYTES = 1 << 20
_PROMPT = "one, two, three, four, five, six, seven, eight, nine, ten, eleven,"
_MESSAGE = "Write the numbers from one to one hundred as words, separated by commas, and nothing else."


class Continuation(StrEnum):
    """How the generations of a model are continued."""

    TOKEN_IDS = "token ids"  # noqa: S105 -- no password
    TEXT = "text"
    REPEATED_TEXT = "repeated text"
    """By the text, which the answers of the server begin with."""


class _Kind(StrEnum):
    WHOLE = "whole"
    SLICES = "slices"


class EqualityCheck:
    """One check. Send `next_body` until it is `None`, and report each answer."""

    def __init__(
        self, path: str, model: str, template_options: msgspec.Raw | None = None, *, is_streamed: bool = False
    ) -> None:
        """Begin the check of `model`. `template_options` are the `chat_template_kwargs` of the requests.

        `is_streamed` says that slices ask for streams.
        """
        self._is_streamed = is_streamed
        self._path = path
        self._payload = _build_payload(path, model, template_options)
        generation = check_generation(path, self._payload, SliceTerms(_SLICE_TOKENS, 1, (path,)))
        assert isinstance(generation, Generation)  # noqa: S101 -- the payload is our own
        self._generation = generation
        self.continuation: Continuation | None = None
        """How generations are continued. `None` while that is not known, and if they are not equal."""
        self.is_undecided = False
        """True if the answers say nothing: an error, or a generation that ended too early."""
        self.reason = WholeReason.UNEQUAL
        self.why = ""
        """Sentence that says what was not equal."""
        self._round = 1
        self._kind: _Kind | None = _Kind.WHOLE
        self._wants_token_ids = not generation.is_chat
        self._repeats_text = False
        self._whole: tuple[Any, ...] = ()
        self._progress: Progress | None = None
        self._asked_tokens = 0

    @property
    def next_body(self) -> bytes | None:
        """Body of the next call. `None` if the check has ended."""
        if self._kind is None:
            return None
        if self._kind is _Kind.WHOLE:
            return self._payload
        self._asked_tokens = compute_slice_tokens(self._generation, self._progress, _SLICE_TOKENS)
        return build_slice_body(
            self._generation,
            self._progress,
            self._asked_tokens,
            wants_token_ids=self._wants_token_ids,
            is_streamed=self._is_streamed,
        )

    def record_answer(self, status: int, body: bytes) -> None:
        """Record the final answer to the call with `next_body`."""
        if self._kind is _Kind.WHOLE:
            self._record_whole(status, body)
        else:
            self._record_slice(status, body)

    def _record_whole(self, status: int, body: bytes) -> None:
        summary = _summarize(body, is_chat=self._generation.is_chat) if 200 <= status < 300 else None
        if summary is None or summary[1] is None or summary[1] <= _SLICE_TOKENS:
            self.is_undecided, self._kind = True, None
            self.why = (
                f"the server answered {status}" if summary is None else "the generation ended too early"
            )
            return
        self._whole, self._kind, self._progress = summary, _Kind.SLICES, None

    def _record_slice(self, status: int, body: bytes) -> None:
        is_rejected = self._progress is None and not 200 <= status < 300
        if is_rejected and self._wants_token_ids:
            self._restart_slices(wants_token_ids=False)  # the server may not know the field
            return
        joined = join_events(body) if self._is_streamed and 200 <= status < 300 else None
        if joined is not None:
            body = joined[0]
        result = interpret_answer(
            self._generation,
            self._progress,
            status,
            body,
            asked_tokens=self._asked_tokens,
            max_kept_bytes=_MAX_KEPT_BYTES,
            repeats_text=self._repeats_text,
        )
        match result:
            case Continues(progress, _, reason, why) if progress.stage is Stage.RESTART:
                self._end_round(why, reason)
            case Continues(progress):
                self._progress = progress
            case Finished(whole_body):
                self._compare(whole_body)
            case _:
                self._compare(body)

    def _compare(self, body: bytes) -> None:
        if _summarize(body, is_chat=self._generation.is_chat) != self._whole:
            self._end_round("the same generation in slices had another text", None)
            return
        has_token_ids = self._progress is not None and bool(self._progress.token_ids)
        by_text = Continuation.REPEATED_TEXT if self._repeats_text else Continuation.TEXT
        self.continuation = Continuation.TOKEN_IDS if has_token_ids else by_text
        self._kind, self.why = None, ""

    def _end_round(self, why: str, reason: WholeReason | None) -> None:
        """Continue after slices that were not equal to the whole."""
        if not self._repeats_text:  # that was only a trial
            self.why, self.reason = why, reason or WholeReason.UNEQUAL
        is_unequal = self.reason is WholeReason.UNEQUAL
        if self._wants_token_ids and self._progress is not None and self._progress.token_ids:
            self._restart_slices(wants_token_ids=False)
        elif is_unequal and self._generation.is_chat and not self._repeats_text:
            # Some servers answer with the whole message, and not only with its continuation.
            self._restart_slices(wants_token_ids=False, repeats_text=True)
        elif is_unequal and self._round < MAX_ROUNDS:
            self._round += 1
            self._kind, self._wants_token_ids = _Kind.WHOLE, not self._generation.is_chat
            self._repeats_text = False
        else:
            self._kind = None

    def _restart_slices(self, *, wants_token_ids: bool, repeats_text: bool = False) -> None:
        self._progress = None
        self._wants_token_ids, self._repeats_text = wants_token_ids, repeats_text


def _build_payload(path: str, model: str, template_options: msgspec.Raw | None) -> bytes:
    fields: dict[str, Any] = {"model": model} if model else {}
    fields |= {"max_tokens": _WHOLE_TOKENS, "temperature": 0}
    if path.endswith(CHAT_SUFFIX):
        fields["messages"] = [{"role": "user", "content": _MESSAGE}]
        if template_options is not None:
            fields["chat_template_kwargs"] = template_options
    else:
        fields["prompt"] = _PROMPT
    return msgspec.json.encode(fields)


def _summarize(body: bytes, *, is_chat: bool) -> tuple[Any, ...] | None:
    """Return text, number of tokens and finish_reason of an answer. `None` if it has none."""
    try:
        answer = msgspec.json.decode(body)
        choice = answer["choices"][0]
        text = choice["message"]["content"] if is_chat else choice["text"]
        return text, answer["usage"]["completion_tokens"], choice["finish_reason"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return None
