"""Model servers that refuse a request because they are full, recognised by the body of the answer. Pure.

A 503 without a drop reason may come from a proxy that finds no server, or from a server whose own queue is
full. Only the second is overload, and only its body says so:

    vLLM from 0.29 on, `--max-num-queued-reqs` and `--max-num-queued-tokens`, 503 (vllm-project/vllm#49445)
        {"error": {"message": "The engine is currently busy and cannot accept new requests. …", "code": 503}}
        {"error": {"message": "The engine has reached its prefill token backlog limit. …", "code": 503}}
    SGLang, `--max-queued-requests`, 503; where a stream was asked for, a 200 with the same as an event
        {"object": "error", "message": "The request queue is full.", "code": 503}
        {"object": "error", "message": "The request is aborted by a higher priority request.", "code": 503}
    Ray Serve from 2.10 on, `max_queued_requests`, 503, plain text (ray.serve.exceptions.BackPressureError)
        Request dropped due to backpressure (num_queued_requests=8, max_queued_requests=8).
    LiteLLM, `max_in_flight_requests_per_worker`, 503
        {"error": {"message": "Worker at capacity: 64 in-flight, 64 queued requests. …", "code": "503"}}
    text-generation-inference, text-embeddings-inference and Infinity, 429 or 503
        {"error": "Model is overloaded", "error_type": "overloaded"}

A message has to begin with one of these phrases: a text in which one occurs may quote the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

SERVER_FULL = "server-full"
"""Stands in the place of a drop reason, which such an answer does not have."""
LOOKED_AT_BYTES = 16_384
"""A longer body is no refusal, and of a stream only the end is looked at."""
_PHRASES = (
    "the engine is currently busy and cannot accept new requests",
    "the engine has reached its prefill token backlog limit",
    "the request queue is full",
    "the request is aborted by a higher priority request",
    "request dropped due to backpressure",
    "worker at capacity:",
    "model is overloaded",
)


def is_server_full(body: bytes) -> bool:
    """Return whether the body of an error says that the server's own queue is full."""
    if len(body) > LOOKED_AT_BYTES:
        return False
    said = _message(_decoded(body)) or body.decode(errors="replace")
    return said.strip().lower().startswith(_PHRASES)


def error_of_stream(headers: Mapping[str, str], end: bytes) -> Mapping[str, Any] | None:
    """Return the error that a stream of events ends with, complete or cut; None where it ends with none.

    `headers`: of the answer, names in lower case. `end`: the last bytes of the stream.
    """
    if not headers.get("content-type", "").lstrip().lower().startswith("text/event-stream"):
        return None
    for line in reversed(end[-LOOKED_AT_BYTES:].splitlines()):
        name, _, value = line.partition(b":")
        value = value.strip()
        if name != b"data" or value == b"[DONE]":
            continue
        event = _decoded(value)
        return event if "error" in event or event.get("object") == "error" else None
    return None


def is_error_of_full_server(event: Mapping[str, Any]) -> bool:
    """Return whether an error says that the server's own queue is full."""
    return _message(event).strip().lower().startswith(_PHRASES)


def texts_of(event: Mapping[str, Any]) -> list[str]:
    """Return what an error says of its kind: its type, code and reason, where these are texts."""
    error = event.get("error")
    fields = error if isinstance(error, dict) else event
    said = (fields.get(name) for name in ("type", "code", "reason"))
    return [each for each in said if isinstance(each, str)]


def _message(event: Mapping[str, Any]) -> str:
    error = event.get("error")
    fields = error if isinstance(error, dict) else event
    said = error if isinstance(error, str) else fields.get("message")
    return said if isinstance(said, str) else ""


def _decoded(text: bytes) -> Mapping[str, Any]:
    """An object of JSON; empty where it is none."""
    if text[:1] != b"{":
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
