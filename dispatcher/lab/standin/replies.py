"""Answers of the live world, and their bytes."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.lab.standin.http import Exchange, encode_chunk
from dispatcher.lab.standin.list_models import BadCallError, parse_call
from dispatcher.requests.headers import AFFINITY_TOKEN, DROP_REASON

_DIMS = 8
"""Length of a vector."""


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Kind of answer to a request. As `"sim": {…}` in a payload it applies to that request only."""

    kind: Literal["ok", "status", "reset", "cut", "slow", "hang"] = "ok"
    """`status`: answer at once, without the pool. `reset`: reset the connection when the request has arrived.
    `cut`: close it after half of the answer. `slow`: send the second half `slow_s` after the first. `hang`:
    keep the slot and never answer."""
    status: int = 200
    reason: str = ""
    """Value of the header with the drop reason."""
    retry_after: str = ""
    body: str | None = None
    slow_s: float = 1.0
    seconds: float | None = None
    """Duration in the pool."""
    echo: bool = False
    """True to return the body of the request."""
    answer_bytes: int = 0
    """Length of the generated text."""
    events: int = 0
    """Number of server-sent events, for a chunked stream."""
    gzip: bool = False
    generation: GenerationConfig | None = None
    """Behaviour of the server that generates the text, in place of the one of the world."""

    @property
    def has_own_content(self) -> bool:
        """True if the content of the answer is given, so that no text is generated."""
        return self.echo or self.body is not None or bool(self.events or self.answer_bytes)


def build_plain_text(status: int, body: str, reason: str = "") -> Answer:
    """Return an answer that is sent at once, without the pool."""
    return Answer(kind="status", status=status, body=body, reason=reason)


def build_content(
    exchange: Exchange, id_: str, server: str, answer: Answer, generated: int, completion: bytes = b""
) -> tuple[list[tuple[str, str]], bytes, bool]:
    """Build headers and body of an answer. The third value is True if the body is chunked.

    `completion` is the body if the text is generated.
    """
    headers = build_headers(server, answer)
    if completion:
        body, kind = completion, "application/json"
    elif answer.echo:
        body, kind = exchange.body, "application/json"
    elif answer.body is not None or answer.kind == "status":
        body = (answer.body or "").encode()
        kind = "application/json" if body.startswith(b"{") else "text/plain"
        kind = "text/event-stream" if body.startswith(b"data:") else kind
    elif answer.events:
        # A stream of the OpenAI API ends with [DONE].
        parts = [
            b"data: " + each + b"\n\n" for each in (*_build_events(exchange, id_, answer.events), b"[DONE]")
        ]
        headers.append(("content-type", "text/event-stream"))
        return headers, b"".join(map(encode_chunk, parts)) + encode_chunk(b""), True
    else:
        body = _build_embeddings(exchange) or _build_completion(
            exchange, id_, "x" * answer.answer_bytes or "ok", generated
        )
        kind = "application/json"
    if body:
        headers.append(("content-type", kind))
    if answer.gzip:
        headers.append(("content-encoding", "gzip"))
        # Without a timestamp the same answer always has the same bytes.
        body = gzip.compress(body, mtime=0)
    return headers, body, False


def build_headers(server: str, answer: Answer) -> list[tuple[str, str]]:
    """Build the headers that do not depend on the body."""
    headers = [(AFFINITY_TOKEN, server)] if server else []
    if answer.reason:
        headers.append((DROP_REASON, answer.reason))
    if answer.retry_after:
        headers.append(("retry-after", answer.retry_after))
    return headers


class _ModelField(msgspec.Struct):
    model: str = "m"


def _build_completion(exchange: Exchange, id_: str, text: str, generated: int) -> bytes:
    """Build the answer to a completion or, depending on the path, to a chat completion."""
    # About four bytes per token.
    prompt_tokens = len(exchange.body) // 4
    choice = {"message": {"role": "assistant", "content": text}} if _is_chat(exchange) else {"text": text}
    return msgspec.json.encode(
        {
            **_build_common_fields(exchange, id_, "chat.completion"),
            "choices": [{"index": 0, **choice, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": prompt_tokens + generated,
            },
        }
    )


def _build_events(exchange: Exchange, id_: str, count: int) -> Iterator[bytes]:
    """Yield the events of a streamed completion or chat completion."""
    head = _build_common_fields(exchange, id_, "chat.completion.chunk")
    for n in range(count):
        text = f"t{n}"
        choice = {"delta": {"role": "assistant", "content": text}} if _is_chat(exchange) else {"text": text}
        last = "stop" if n == count - 1 else None
        yield msgspec.json.encode({**head, "choices": [{"index": 0, **choice, "finish_reason": last}]})


def _build_common_fields(exchange: Exchange, id_: str, chat: str) -> dict[str, Any]:
    try:
        model = msgspec.json.decode(exchange.body, type=_ModelField).model
    except msgspec.DecodeError:
        model = _ModelField().model
    object_ = chat if _is_chat(exchange) else "text_completion"
    return {"id": id_, "object": object_, "created": int(time.time()), "model": model}


def _is_chat(exchange: Exchange) -> bool:
    return exchange.target.partition("?")[0].endswith("/chat/completions")


def _build_embeddings(exchange: Exchange) -> bytes:
    """Build the answer to a request for embeddings, or return an empty body if the request is none."""
    if not exchange.target.partition("?")[0].endswith("/embeddings"):
        return b""
    try:
        call = parse_call(exchange.target, exchange.body, model="m", dims=_DIMS, index_last=False)
    except BadCallError:
        return b""
    return msgspec.json.encode(call.make_answer(False))
