"""Names and values of headers, and which of them operators and callers may set.

Neither an operator (`gateway.headers`) nor a caller (`data.headers`) can set headers that belong to the
connection. Callers are restricted further: docs/reference/forwarding.md has the tables, and a test checks
them.
"""

from __future__ import annotations

import re

NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""Header name (RFC 9110 5.6.2)."""
VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f-\x9f]*")
"""Header value (RFC 9110 5.5). The control characters of Latin-1 are excluded too: the tab is the only
control character that is allowed."""

OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS_ID = "x-llm-d-inference-fairness-id"
OLD_OBJECTIVE = "x-gateway-inference-objective"
OLD_FAIRNESS_ID = "x-gateway-inference-fairness-id"
"""Names of the same headers for endpoint pickers before the router of llm-d."""
REQUEST_ID = "x-request-id"
SESSION_TOKEN = "x-session-token"  # noqa: S105 -- the name of a header
"""Header of llm-d's session affinity: in an answer the server that it came from, in a request the server to
use."""
INFERENCE_TTL = "x-llm-d-inference-ttl"
"""Request header: longest time to wait in the endpoint picker, as a Go duration (llm-d-router#2649)."""
QUEUE_DURATION = "x-llm-d-flow-queue-duration-ms"
"""Response header: milliseconds that the request waited in the endpoint picker (llm-d-router#2490)."""
DROP_REASON = "x-llm-d-request-dropped-reason"
"""Response header: reason why the endpoint picker itself refused the request."""

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection"),
    }
)
"""Headers that belong to the connection, in addition to those that a Connection header names."""

FORBIDDEN_PREFIXES = (
    "proxy-",
    "x-data-parallel-",
    "x-encoder-",
    "x-envoy-",
    "x-forwarded-",
    "x-gateway-",
    "x-llm-d-",
    "x-prefiller-",
)
FORBIDDEN_HEADERS = frozenset(
    {
        *(name for name in HOP_BY_HOP if not name.startswith(FORBIDDEN_PREFIXES)),
        # These describe the path of the message, which begins anew at the dispatcher.
        *("host", "via", "expect", "forwarded"),
        # These are set by the dispatcher.
        *("accept-encoding", "content-encoding", "content-length", "content-type", REQUEST_ID),
        # Credentials: the dispatcher sends its own, not those of the producer.
        *("authorization", "cookie"),
    }
)
"""Headers that a caller must not set. They belong to the connection, are set by the dispatcher, or control
gateway and endpoint picker."""

RESTRICTED_HEADERS = frozenset(
    {
        *("api-key", "x-api-key", "x-session-token", "x-scope-orgid", "x-tenant-id", "x-user-id"),
        *("true-client-ip", "x-client-ip", "x-real-ip", "x-http-method", "x-http-method-override"),
        *("x-method-override", "x-authenticated-user", "x-ms-client-principal"),
    }
)
RESTRICTED_PREFIXES = (
    "test-epp-",
    "x-auth-",
    "x-goog-authenticated-",
    "x-original-",
    "x-remote-",
    "x-rewrite-",
    "x-slo-",
)
"""Headers that are dropped unless `gateway.allowed_headers` lists them. Programs behind a gateway may trust
them as statements of the gateway about the caller."""


def normalize_name(name: str) -> str:
    """Return a header name in the form that is compared. Some programs behind the gateway treat underscores
    as hyphens."""
    return name.lower().replace("_", "-")


def is_forwardable(normalized_name: str) -> bool:
    """Return whether a caller may set the header at all."""
    return normalized_name not in FORBIDDEN_HEADERS and not normalized_name.startswith(FORBIDDEN_PREFIXES)


def is_restricted(normalized_name: str) -> bool:
    """Return whether a caller may set the header only if `gateway.allowed_headers` lists it."""
    return normalized_name in RESTRICTED_HEADERS or normalized_name.startswith(RESTRICTED_PREFIXES)
