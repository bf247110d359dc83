"""Names and values of headers, and who may set which. Pure.

What belongs to a connection is nobody's to set: neither an operator's (`gateway.headers`) nor a caller's
(`data.headers`). Beyond that callers are trusted with less: docs/forwarding.md has the tables, checked by a
test.
"""

from __future__ import annotations

import re

NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""RFC 9110 5.6.2."""
VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f-\x9f]*")
"""RFC 9110 5.5, without the control characters of Latin-1 as well: none but the tab, whoever sets it."""

OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS_ID = "x-llm-d-inference-fairness-id"
OLD_OBJECTIVE = "x-gateway-inference-objective"
OLD_FAIRNESS_ID = "x-gateway-inference-fairness-id"
"""As endpoint pickers before llm-d's router have them."""
REQUEST_ID = "x-request-id"
SESSION_TOKEN = "x-session-token"  # noqa: S105 -- the name of a header
"""Of llm-d's session affinity: the server that an answer came from, and that the next request is to go to."""
INFERENCE_TTL = "x-llm-d-inference-ttl"
"""Request header: longest time to wait in the endpoint picker, as a Go duration (llm-d-router#2649)."""
QUEUE_DURATION = "x-llm-d-flow-queue-duration-ms"
"""Response header: milliseconds that the request waited in the endpoint picker (llm-d-router#2490)."""
DROP_REASON = "x-llm-d-request-dropped-reason"
"""In an answer: the endpoint picker itself refused the request."""

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection"),
    }
)
"""What belongs to the connection (beside those that a Connection header names)."""

PREFIXES_NOT_PASSED_ON = (
    "proxy-",
    "x-data-parallel-",
    "x-encoder-",
    "x-envoy-",
    "x-forwarded-",
    "x-gateway-",
    "x-llm-d-",
    "x-prefiller-",
)
NOT_PASSED_ON = frozenset(
    {
        *(name for name in HOP_BY_HOP if not name.startswith(PREFIXES_NOT_PASSED_ON)),
        # The way's, which is ours from here on.
        *("host", "via", "expect", "forwarded"),
        # Ours.
        *("accept-encoding", "content-encoding", "content-length", "content-type", REQUEST_ID),
        # Credentials: those of whoever submits are not those of the dispatcher.
        *("authorization", "cookie"),
    }
)
"""What a caller must not set: what belongs to the connection, to us, or steers gateway and picker."""

DOUBTFUL = frozenset(
    {
        *("api-key", "x-api-key", "x-session-token", "x-scope-orgid", "x-tenant-id", "x-user-id"),
        *("true-client-ip", "x-client-ip", "x-real-ip", "x-http-method", "x-http-method-override"),
        *("x-method-override", "x-authenticated-user", "x-ms-client-principal"),
    }
)
DOUBTFUL_PREFIXES = (
    "test-epp-",
    "x-auth-",
    "x-goog-authenticated-",
    "x-original-",
    "x-remote-",
    "x-rewrite-",
    "x-slo-",
)
"""Left out unless `gateway.allowed_headers` names them: programs behind a gateway may take them for its own
words on who the caller is, or what he is after."""


def plain(name: str) -> str:
    """As some of the programs behind the gateway read it: to them an underscore is a hyphen."""
    return name.lower().replace("_", "-")


def passed_on(plain_name: str) -> bool:
    """Whether a caller may set it at all."""
    return plain_name not in NOT_PASSED_ON and not plain_name.startswith(PREFIXES_NOT_PASSED_ON)


def doubtful(plain_name: str) -> bool:
    """Whether it takes `gateway.allowed_headers` to let it pass."""
    return plain_name in DOUBTFUL or plain_name.startswith(DOUBTFUL_PREFIXES)
