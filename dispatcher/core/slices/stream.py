"""Answers that are streamed: server-sent events joined to the answer that a call without a stream has.

A stream that breaks off still says what was generated until then, so that only the next tokens are lost.
"""

from __future__ import annotations

from typing import Any

import msgspec

_DATA, _DONE = b"data:", b"[DONE]"
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


def join_events(received: bytes) -> tuple[bytes, bool] | None:
    """Return the answer that the events contain, and whether it is complete. `None` if there is no event.

    Without a statement of the server, tokens are counted by their ids, or else by the events with a text. In
    an answer that is not complete, `finish_reason` is `length`, as if the call had asked for as many tokens.
    """
    answer: dict[str, Any] = {}
    choice: dict[str, Any] = {"index": 0}
    text: list[str] = []
    reasoning: list[str] = []
    token_ids: list[int] = []
    events = 0
    usage: dict[str, Any] | None = None
    lines = received.split(b"\n")
    # The last line has no end yet, unless the stream is complete.
    for line in lines[:-1]:
        if not line.startswith(_DATA) or (data := line[len(_DATA) :].strip()) == _DONE:
            continue
        try:
            event = _decode(data)
            part = event["choices"][0] if event.get("choices") else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
            break
        if "choices" not in event:  # an error
            break
        answer = {**event, **answer}
        usage = event.get("usage") or usage
        if not isinstance(part, dict):
            continue
        delta = part.get("delta")
        content = part.get("text") if delta is None else delta.get("content")
        choice |= {name: value for name, value in part.items() if name not in ("delta", "text", "token_ids")}
        text.append(content or "")
        events += bool(content)
        if delta is not None:
            reasoning.append(delta.get("reasoning_content") or delta.get("reasoning") or "")
        token_ids += part.get("token_ids") or []
    if not answer:
        return None
    is_complete = choice.get("finish_reason") is not None
    if not is_complete:
        choice["finish_reason"] = "length"
    if token_ids:
        choice["token_ids"] = token_ids
    if str(answer.get("object", "")).startswith("chat"):
        answer["object"] = "chat.completion"
        choice["message"] = {"role": "assistant", "content": "".join(text)}
        if "".join(reasoning):
            choice["message"]["reasoning_content"] = "".join(reasoning)
    else:
        choice["text"] = "".join(text)
    prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or []
    answer["choices"] = [choice]
    answer["usage"] = usage or {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(token_ids) or events,
    }
    return _encode(answer), is_complete
