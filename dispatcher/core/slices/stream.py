"""Answers that are streamed: server-sent events joined to the answer that a call without a stream has.

A stream that breaks off still says what was generated until then, so that only the next tokens are lost.
"""

from __future__ import annotations

from typing import Any

import msgspec

_DATA, _DONE = b"data:", b"[DONE]"
_JOINED_FIELDS = ("delta", "text", "token_ids")
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class _Delta(msgspec.Struct):
    """Part of an event that is added to a chat."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Part(msgspec.Struct):
    """Part of an event that is added to the answer."""

    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event. Errors have no choices."""

    choices: list[_Part]
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


def join_events(received: bytes) -> tuple[bytes, bool] | None:
    """Return the answer that the events contain, and whether it is complete. `None` if there is no event.

    Without a statement of the server, tokens are counted by their ids, or else by the events with a text. In
    an answer that is not complete, `finish_reason` is `length`, as if the call had asked for as many tokens.
    """
    answer = _Answer()
    # The last line has no end yet, unless the stream is complete.
    for line in received.split(b"\n")[:-1]:
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            answer.is_done = True
            break
        try:
            answer.add_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break  # an error, or what comes after it may depend on it
    return answer.build() if answer.fields else None


class _Answer:
    """Answer of which some events are known."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        """Fields of the events, as they were first sent."""
        self.is_done = False
        """True after the event that ends a stream."""
        self._choice: dict[str, Any] = {"index": 0}
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_ids: list[int] = []
        self._text_events = 0
        self._usage: dict[str, Any] | None = None

    def add_event(self, data: bytes) -> None:
        """Add an event. Nothing is added if it raises an exception, because the event is malformed."""
        event = _decode_event(data)
        part = event.choices[0] if event.choices else None
        if not self.fields or part is None or part.finish_reason is not None:
            # Most events add only text, so the names of all their fields are not looked at.
            fields = _decode(data)
            self.fields = {**fields, **self.fields}
            self._choice |= fields["choices"][0] if part is not None else {}
        self._usage = event.usage or self._usage
        self._prompt_ids = self._prompt_ids or event.prompt_token_ids or []
        if part is None:
            return
        self._prompt_ids = self._prompt_ids or part.prompt_token_ids or []
        delta = part.delta
        content = part.text if delta is None else delta.content
        self._text.append(content or "")
        self._text_events += bool(content)
        if delta is not None:
            self._reasoning.append(delta.reasoning_content or delta.reasoning or "")
        self._token_ids += part.token_ids or []

    def build(self) -> tuple[bytes, bool]:
        answer = self.fields
        choice = {name: value for name, value in self._choice.items() if name not in _JOINED_FIELDS}
        # The number of tokens comes after the text, if the server says it.
        has_end = self._usage is not None or self.is_done
        is_complete = choice.get("finish_reason") is not None and has_end
        if choice.get("finish_reason") is None:
            choice["finish_reason"] = "length"
        if self._token_ids:
            choice["token_ids"] = self._token_ids
        if str(answer.get("object", "")).startswith("chat"):
            answer["object"] = "chat.completion"
            choice["message"] = {"role": "assistant", "content": "".join(self._text)}
            if reasoning := "".join(self._reasoning):
                choice["message"]["reasoning_content"] = reasoning
        else:
            choice["text"] = "".join(self._text)
        answer["choices"] = [choice]
        answer["usage"] = self._usage or {
            "prompt_tokens": len(self._prompt_ids),
            "completion_tokens": len(self._token_ids) or self._text_events,
        }
        return _encode(answer), is_complete
