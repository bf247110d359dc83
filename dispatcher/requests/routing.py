"""Compute the path and headers with which a request reaches the gateway, or why it must not be sent.

Producers control only the payload: they cannot choose another host, a path that is not allowed, or a header
that belongs to the connection, carries credentials, or controls the gateway or the endpoint picker. A path
that is not allowed rejects the request, because it was set on purpose. A header that is not allowed is
dropped, because producers copy whole sets of headers. docs/reference/forwarding.md has the tables, and a
test checks them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from urllib.parse import quote

from dispatcher.common.patterns import matches_any
from dispatcher.requests.headers import (
    FAIRNESS_ID,
    OBJECTIVE,
    REQUEST_ID,
    is_forwardable,
    is_restricted,
    normalize_name,
)
from dispatcher.requests.outcomes.outcome import Refused
from dispatcher.requests.request import Request

MAX_ENDPOINT_CHARS = 2048

_PATH = re.compile(r"(?:/[A-Za-z0-9\-._~!$&'()*+,=:]+)+/?")
_VISIBLE = re.compile(r"[!-~]+")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[!-~](?:[ -~]{0,510}[!-~])?")


class RouteOptions(Protocol):
    """Settings `gateway` that determine paths and headers."""

    @property
    def path(self) -> str: ...
    @property
    def allowed_paths(self) -> Sequence[str]: ...
    @property
    def allowed_headers(self) -> Sequence[str] | None: ...
    @property
    def objective(self) -> str: ...
    @property
    def fairness_from(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class Route:
    """Routing rules for one set of options."""

    def __init__(
        self,
        options: RouteOptions,
        *,
        user_agent: str,
        subset_header: str = "",
        reserved_headers: Iterable[str] = (),
    ) -> None:
        """`subset_header` is the name of the header that lists the model servers a request may go to. Empty
        for no such header. `reserved_headers` are the names of further headers that a caller cannot set.
        """
        self._path = options.path
        self._allowed_paths = options.allowed_paths
        allowed = options.allowed_headers
        self._allowed_headers = None if allowed is None else [normalize_name(pattern) for pattern in allowed]
        """Patterns of the callers' headers that are allowed. `None` allows all headers that are not
        restricted."""
        self._fairness_from = options.fairness_from
        operator_headers = {name.lower(): value for name, value in options.headers.items()}
        if options.objective:
            operator_headers[OBJECTIVE] = options.objective
        self._operator_headers = frozenset(operator_headers)
        """Headers that the operator set. A caller cannot override them."""
        self._subset_header = subset_header.lower()
        self._reserved_headers = self._operator_headers | {
            normalize_name(name) for name in (subset_header, *reserved_headers)
        }
        """Headers that a caller cannot set, even if `allowed_headers` lists them."""
        self._base_headers = {
            "accept": "*/*",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": user_agent,
        } | operator_headers

    def choose_path(self, endpoint: str) -> str | Refused:
        """Return the path for a request: the default path, or the request's own path if it is plain and
        allowed."""
        if not endpoint or endpoint == self._path:
            return self._path
        if len(endpoint) > MAX_ENDPOINT_CHARS:
            return Refused(f"data.endpoint: longer than {MAX_ENDPOINT_CHARS} characters")
        if not is_plain_path(endpoint):
            return Refused(f"data.endpoint: {endpoint[:100]!r} is not a plain path")
        if not matches_any(self._allowed_paths, endpoint):
            return Refused(f"data.endpoint: {endpoint[:100]!r} is not among gateway.allowed_paths")
        return endpoint

    def build_headers(self, request: Request, bearer: str, traceparent: str = "") -> dict[str, str]:
        """Return the headers of a request, with names in lower case.

        `bearer` is the Authorization header, or empty. `traceparent` is that of the dispatcher's own span and
        replaces the one of the producer.
        """
        headers = self._base_headers.copy()
        if request.headers:
            headers.update(self._select_headers(request.headers))
        # These come after the caller's headers, so that a caller cannot override them.
        if request.affinity is not None:
            for name, value in request.affinity.headers.items():
                headers[name] = _header_safe(value)
        if self._subset_header and request.endpoints:
            headers[self._subset_header] = _header_safe(request.endpoints)
        if bearer:
            headers["authorization"] = bearer
        headers[REQUEST_ID] = _header_safe(request.id)
        metadata = request.metadata
        if metadata:
            if fairness_id := metadata.get(self._fairness_from):
                headers[FAIRNESS_ID] = _header_safe(fairness_id)
            trace, state = parse_trace_context(request)
            if trace:
                headers["traceparent"] = trace
            if state:
                headers["tracestate"] = state
        if traceparent:
            headers["traceparent"] = traceparent
        return headers

    def _select_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that the caller may set. Of equal names the last one counts."""
        lowered = {name.lower(): value for name, value in headers.items()}
        # RFC 9110 7.6.1: a Connection header names further headers that belong to the connection.
        connection_headers = {name.strip() for name in lowered.get("connection", "").lower().split(",")}
        return {
            name: value
            for name, value in lowered.items()
            if is_forwardable(known := normalize_name(name))
            and known not in self._reserved_headers
            and name not in connection_headers
            and self._is_allowed(known)
        }

    def _is_allowed(self, normalized_name: str) -> bool:
        return (
            matches_any(self._allowed_headers, normalized_name)
            if self._allowed_headers is not None
            else not is_restricted(normalized_name)
        )


def is_plain_path(path: str) -> bool:
    """Return whether a path consists of letters, digits and some punctuation between single slashes, without
    dot segments, escapes or a query.

    Such a path needs no normalization, which gateway and model server might do in different ways.
    """
    return _PATH.fullmatch(path) is not None and {".", ".."}.isdisjoint(path.split("/"))


def parse_trace_context(request: Request) -> tuple[str, str]:
    """Return the producer's traceparent and tracestate. Each is empty if it is missing or malformed."""
    metadata = request.metadata
    trace = metadata.get("traceparent", "")
    if not _TRACEPARENT.fullmatch(trace):
        return "", ""
    state = metadata.get("tracestate", "")
    return trace, state if _TRACESTATE.fullmatch(state) else ""


def _header_safe(value: str) -> str:
    """Return the value unchanged if it is visible ASCII, else percent-encoded."""
    return value if _VISIBLE.fullmatch(value) else quote(value, safe="!#$&'()*+,/:;=?@[]~")
