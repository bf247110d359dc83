"""Recognition of answers by which a model server refuses a request because it is full.

A 503 without a drop reason may come from a proxy that finds no server, or from a server whose own queue is
full. Only the second is overload, and only the body of the answer shows the difference:

    vLLM from 0.29 on, `--max-num-queued-reqs` and `--max-num-queued-tokens`, 503 (vllm-project/vllm#49445)
        {"error": {"message": "The engine is currently busy and cannot accept new requests. …", "code": 503}}
        {"error": {"message": "The engine has reached its prefill token backlog limit. …", "code": 503}}
    SGLang, `--max-queued-requests`, 503; if a stream was asked for, a 200 with the same as an event
        {"object": "error", "message": "The request queue is full.", "code": 503}
        {"object": "error", "message": "The request is aborted by a higher priority request.", "code": 503}
    Ray Serve from 2.10 on, `max_queued_requests`, 503, plain text (ray.serve.exceptions.BackPressureError)
        Request dropped due to backpressure (num_queued_requests=8, max_queued_requests=8).
    LiteLLM, `max_in_flight_requests_per_worker`, 503
        {"error": {"message": "Worker at capacity: 64 in-flight, 64 queued requests. …", "code": "503"}}
    text-generation-inference, text-embeddings-inference and Infinity, 429 or 503
        {"error": "Model is overloaded", "error_type": "overloaded"}

A message has to begin with one of these phrases. A text that only contains one may quote the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

SERVER_FULL = "server-full"
"""Drop reason that the dispatcher assigns to such an answer, because it has none of its own."""
MAX_INSPECTED_BYTES = 16_384
"""Maximum size of a body that may be a refusal, and length of the end of a stream that is searched for
one."""
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
    return extract_error_text(body).lower().startswith(_PHRASES)


def extract_error_text(body: bytes) -> str:
    """Return the message of an error body in the format of OpenAI, Anthropic or TGI, or the body itself if it
    is plain text. Empty if the body is larger than such an error."""
    if len(body) > MAX_INSPECTED_BYTES:
        return ""
    return (_extract_message(_decode_object(body)) or body.decode(errors="replace")).strip()


def find_stream_error(headers: Mapping[str, str], end: bytes) -> Mapping[str, Any] | None:
    """Return the error with which a stream of events ends, complete or cut. `None` if it ends without one.

    `headers` are those of the answer, with names in lower case. `end` is the last bytes of the stream.
    """
    if not headers.get("content-type", "").lstrip().lower().startswith("text/event-stream"):
        return None
    # The error is the last event, so the search starts at the end.
    for line in reversed(end[-MAX_INSPECTED_BYTES:].splitlines()):
        name, _, value = line.partition(b":")
        value = value.strip()
        if name != b"data" or value == b"[DONE]":
            continue
        event = _decode_object(value)
        return event if "error" in event or event.get("object") == "error" else None
    return None


def is_server_full_error(event: Mapping[str, Any]) -> bool:
    """Return whether an error says that the server's own queue is full."""
    return _extract_message(event).strip().lower().startswith(_PHRASES)


def list_error_texts(event: Mapping[str, Any]) -> list[str]:
    """Return the type, code and reason of an error, as far as these are strings."""
    error = event.get("error")
    fields = error if isinstance(error, dict) else event
    values = (fields.get(name) for name in ("type", "code", "reason"))
    return [each for each in values if isinstance(each, str)]


def _extract_message(event: Mapping[str, Any]) -> str:
    error = event.get("error")
    fields = error if isinstance(error, dict) else event
    message = error if isinstance(error, str) else fields.get("message")
    return message if isinstance(message, str) else ""


def _decode_object(text: bytes) -> Mapping[str, Any]:
    """Return the JSON object in a text. Empty if the text is not a JSON object."""
    if text[:1] != b"{":
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
