"""Bodies with which model servers report that their own queue is full (sources: server_overload.py)."""

from __future__ import annotations

VLLM_OVERLOADED = (
    b'{"error":{"message":"The engine is currently busy and cannot accept new requests. Please try again '
    b'later or on a different instance.","type":"Service Unavailable","param":null,"code":503}}'
)
SGLANG_OVERLOADED = (
    b'{"object":"error","message":"The request queue is full.","type":"ServiceUnavailable","code":503}'
)
OVERLOAD_BODIES = [
    VLLM_OVERLOADED,
    VLLM_OVERLOADED.replace(
        b"is currently busy and cannot accept new requests", b"has reached its prefill token backlog limit"
    ),
    SGLANG_OVERLOADED,
    b'{"error":{"message":"The request is aborted by a higher priority request.","code":503}}',
    b"Request dropped due to backpressure (num_queued_requests=2, max_queued_requests=2).",
    b'{"error":{"message":"Worker at capacity: 64 in-flight, 64 queued requests.","code":"503"}}',
    b'{"error":"Model is overloaded","error_type":"overloaded"}',
]
