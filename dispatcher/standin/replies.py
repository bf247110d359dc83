"""How the live world answers a request, and the bytes of that answer."""

from __future__ import annotations

import gzip
from typing import Literal

import msgspec

from dispatcher.core.headers import DROP_REASON, SESSION_TOKEN
from dispatcher.standin.listmodels import BadCallError, read
from dispatcher.standin.wire import Exchange, chunk

_DIMS = 8
"""Numbers of a vector."""


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a request is answered; as `"sim": {…}` in a payload, for that request alone."""

    kind: Literal["ok", "status", "reset", "cut", "slow", "hang"] = "ok"
    """`status`: at once, without the pool. `reset`: the connection ends when the request is there. `cut`: it
    ends after half of the answer. `slow`: the answer's second half comes slow_s after the first. `hang`: the
    request holds its slot and is never answered."""
    status: int = 200
    reason: str = ""
    """The drop reason's header."""
    retry_after: str = ""
    body: str | None = None
    slow_s: float = 1.0
    seconds: float | None = None
    """How long it runs in the pool."""
    echo: bool = False
    """The answer's body is the request's."""
    answer_bytes: int = 0
    """The generated text is so long."""
    events: int = 0
    """The answer is a stream of so many server-sent events, chunked."""
    gzip: bool = False


def plain_text(status: int, body: str, reason: str = "") -> Answer:
    """An answer at once, without the pool."""
    return Answer(kind="status", status=status, body=body, reason=reason)


def content(
    exchange: Exchange, id_: str, server: str, how: Answer, generated: int
) -> tuple[list[tuple[str, str]], bytes, bool]:
    """Headers and body of an answer, and whether the body is chunked."""
    headers = [(SESSION_TOKEN, server)] if server else []
    if how.reason:
        headers.append((DROP_REASON, how.reason))
    if how.retry_after:
        headers.append(("retry-after", how.retry_after))
    if how.echo:
        body, kind = exchange.body, "application/json"
    elif how.body is not None or how.kind == "status":
        body = (how.body or "").encode()
        kind = "application/json" if body.startswith(b"{") else "text/plain"
        kind = "text/event-stream" if body.startswith(b"data:") else kind
    elif how.events:
        parts = [f'data: {{"id":"{id_}","choices":[{{"text":"t{n}"}}]}}\n\n' for n in range(how.events)]
        parts.append("data: [DONE]\n\n")
        headers.append(("content-type", "text/event-stream"))
        return headers, b"".join(chunk(part.encode()) for part in parts) + chunk(b""), True
    else:
        body = _embeddings(exchange) or _completion(id_, how.answer_bytes, len(exchange.body) // 4, generated)
        kind = "application/json"
    if body:
        headers.append(("content-type", kind))
    if how.gzip:
        headers.append(("content-encoding", "gzip"))
        body = gzip.compress(body, mtime=0)
    return headers, body, False


def _completion(id_: str, length: int, read: int, generated: int) -> bytes:
    text = "x" * length or "ok"
    return msgspec.json.encode(
        {
            "id": id_,
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": generated,
                "total_tokens": read + generated,
            },
        }
    )


def _embeddings(exchange: Exchange) -> bytes:
    """Vectors of what it asks for; empty: it asks for none."""
    if not exchange.target.partition("?")[0].endswith("/embeddings"):
        return b""
    try:
        asked = read(exchange.target, exchange.body, model="m", dims=_DIMS, index_last=False)
    except BadCallError:
        return b""
    return msgspec.json.encode(asked.answer(False))
