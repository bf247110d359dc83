"""Answers that are streamed: server-sent events joined to the answer that a call without a stream has.

A stream that breaks off still says what was generated until then, so that only the next tokens are lost.
Joining takes a time that is proportional to the length of the stream, because it runs on the event loop.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

MAX_EVENTS = 100_000
"""Largest number of events that are read. A longer stream is treated as if it had broken off there."""
MAX_EVENT_BYTES = 2 * 1024 * 1024
"""Length of the longest event that is read. The first event has all token ids of the prompt. Without the
limit, a list of small objects would take 30 times its length in memory."""
_DATA, _DONE = b"data:", b"[DONE]"
_JOINED_FIELDS = ("delta", "text", "token_ids")
_encode = msgspec.json.Encoder().encode
# Fields without a meaning here are passed on as they are written.
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _Delta(msgspec.Struct):
    """Part of an event that is added to a chat."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Part(msgspec.Struct):
    """Part of an event that is added to the answer."""

    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event. Errors have no choices."""

    choices: list[_Part]
    usage: dict[str, msgspec.Raw] | None = None
    prompt_token_ids: list[_TokenId] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


def join_events(received: bytes) -> tuple[bytes, bool] | None:
    """Return the answer that the events contain, and whether it is complete. `None` if there is no event.

    Without a statement of the server, tokens are counted by their ids, or else by the events with a text. In
    an answer that is not complete, `finish_reason` is `length`, as if the call had asked for as many tokens.
    """
    answer = _Answer()
    for data in _list_events(received):
        if data == _DONE:
            answer.is_done = True
            break
        if len(data) > MAX_EVENT_BYTES:
            break
        try:
            answer.add_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break  # an error, or what comes after it may depend on it
    return answer.build() if answer.fields else None


def _list_events(received: bytes) -> list[bytes]:
    """Return the data of the events whose line has ended, and at most MAX_EVENTS of them."""
    first, *others = received.split(b"\n" + _DATA, MAX_EVENTS)
    lines = [first[len(_DATA) :], *others] if first.startswith(_DATA) else others
    if lines and (len(others) == MAX_EVENTS or b"\n" not in lines[-1]):
        del lines[-1]  # the rest of its line may still have to come
    return [line.partition(b"\n")[0].strip() for line in lines]


class _Answer:
    """Answer with the events that have come so far."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        """Fields of the events, as they were first sent."""
        self.is_done = False
        """True after the event that ends a stream."""
        self._choice: dict[str, Any] = {"index": 0}
        self._finish_reason: str | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_ids: list[int] = []
        self._text_events = 0
        self._has_all_ids = True
        """False if an event had text and no token ids."""
        self._usage: dict[str, msgspec.Raw] | None = None

    def add_event(self, data: bytes) -> None:
        """Add an event. Nothing is added if it raises an exception, because the event is malformed."""
        event = _decode_event(data)
        part = event.choices[0] if event.choices else None
        if not self.fields or part is None or part.finish_reason is not None:
            # Most events add only text, so the names of all their fields are not looked at.
            fields = _decode_fields(data)
            choice = {} if part is None else _decode_choices(fields["choices"])[0]
            for name, value in fields.items():
                self.fields.setdefault(name, value)
            self._choice |= choice
        self._usage = event.usage or self._usage
        self._prompt_ids = self._prompt_ids or event.prompt_token_ids or []
        if part is None:
            return
        self._finish_reason = part.finish_reason or self._finish_reason
        self._prompt_ids = self._prompt_ids or part.prompt_token_ids or []
        delta = part.delta
        content = part.text if delta is None else delta.content
        self._text.append(content or "")
        self._text_events += bool(content)
        self._has_all_ids &= bool(part.token_ids) or not content
        if delta is not None:
            self._reasoning.append(delta.reasoning_content or delta.reasoning or "")
        self._token_ids += part.token_ids or []

    def build(self) -> tuple[bytes, bool]:
        answer = self.fields
        choice = {name: value for name, value in self._choice.items() if name not in _JOINED_FIELDS}
        # The number of tokens comes after the text, if the server says it.
        has_end = self._usage is not None or self.is_done
        is_complete = self._finish_reason is not None and has_end
        choice["finish_reason"] = self._finish_reason or "length"
        # Without a number of tokens from the server, missing ids would not be noticed.
        token_ids = self._token_ids if self._has_all_ids or self._usage is not None else []
        if token_ids:
            choice["token_ids"] = token_ids
        if bytes(answer.get("object", b"")).startswith(b'"chat'):
            answer["object"] = "chat.completion"
            choice["message"] = {"role": "assistant", "content": "".join(self._text)}
            if reasoning := "".join(self._reasoning):
                choice["message"]["reasoning_content"] = reasoning
        else:
            choice["text"] = "".join(self._text)
        answer["choices"] = [choice]
        answer["usage"] = self._usage or {
            "prompt_tokens": len(self._prompt_ids),
            "completion_tokens": len(token_ids) or self._text_events,
        }
        return _encode(answer), is_complete
