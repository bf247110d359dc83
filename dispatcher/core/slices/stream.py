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
    """Part of a chat message in an event."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Part(msgspec.Struct):
    """Part of the answer in an event."""

    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


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
            event = _decode(data)
            if "choices" not in event:  # an error
                break
            answer.add_event(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
            break  # what comes after it may depend on it
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
        self._usage: Any = None

    def add_event(self, event: dict[str, Any]) -> None:
        """Add an event. Nothing is added if it raises an exception, because the event is malformed."""
        part = event["choices"][0] if event["choices"] else None
        added = msgspec.convert(part or {}, _Part)
        prompt_ids = added.prompt_token_ids or _convert_ids(event.get("prompt_token_ids"))
        self._prompt_ids = self._prompt_ids or prompt_ids
        self.fields = {**event, **self.fields}
        self._usage = event.get("usage") or self._usage
        if part is None:
            return
        delta = added.delta
        content = added.text if delta is None else delta.content
        self._choice |= {name: value for name, value in part.items() if name not in _JOINED_FIELDS}
        self._text.append(content or "")
        self._text_events += bool(content)
        if delta is not None:
            self._reasoning.append(delta.reasoning_content or delta.reasoning or "")
        self._token_ids += added.token_ids or []

    def build(self) -> tuple[bytes, bool]:
        answer, choice = self.fields, self._choice
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


def _convert_ids(ids: Any) -> list[int]:
    return msgspec.convert(ids or [], list[int])
