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
AFFINITY_ID = "x-session-id"
AFFINITY_TOKEN = "x-session-token"  # noqa: S105 -- the name of a header
"""Header by which llm-d keeps requests at one server: in an answer the server that it came from, in a request
the server to use."""
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
        # Identity of the caller, as gateways and authenticating proxies state it.
        *("api-key", "x-api-key", "x-scope-orgid", "x-tenant-id", "x-org-id", "x-account-id", "x-user"),
        *("x-username", "x-email", "x-groups", "x-roles", "x-userinfo", "x-principal", "x-id-token"),
        *("x-access-token", "x-anonymous-consumer"),
        # Address of the caller.
        *("true-client-ip", "x-client-ip", "x-real-ip", "x-cluster-client-ip", "fastly-client-ip"),
        # Method, and the part of the answer that is wanted: a dispatcher needs a whole answer to a POST.
        *("x-http-method", "x-http-method-override", "x-method-override"),
        *("range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range"),
        # State at a model server, and values that are handed on from service to service.
        *(AFFINITY_ID, AFFINITY_TOKEN, "baggage"),
    }
)
RESTRICTED_PREFIXES = (
    "cf-",
    "impersonate-",
    "remote-",
    "ssl-client-",
    "tailscale-",
    "test-epp-",
    "x-amzn-mtls-",
    "x-amzn-oidc-",
    "x-auth-",
    "x-authenticated-",
    "x-authentik-",
    "x-client-cert",
    "x-consumer-",
    "x-credential-",
    "x-goog-authenticated-",
    "x-goog-iap-",
    "x-jwt-",
    "x-ms-client-principal",
    "x-ms-token-",
    "x-oidc-",
    "x-original-",
    "x-pomerium-",
    "x-remote-",
    "x-rewrite-",
    "x-slo-",
    "x-ssl-",
    "x-user-",
    "x-vouch-",
    "x-webauth-",
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
