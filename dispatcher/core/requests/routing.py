"""What of a request reaches the gateway: its path and its headers, or why it must not be sent.

Producers are not trusted with more than their payload: no other host, no path that was not allowed, no
header that belongs to the connection, carries credentials, or steers the gateway or the endpoint picker.
A path that is not allowed refuses the request, for it can only be meant; a header is left out, for producers
copy whole sets of them. docs/forwarding.md has the tables, checked by a test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import quote

from dispatcher.core.gateway.outcome import Refused
from dispatcher.core.patterns import any_fits
from dispatcher.core.requests.headers import FAIRNESS_ID, OBJECTIVE, REQUEST_ID, doubtful, passed_on, plain
from dispatcher.core.requests.request import Request
from dispatcher.core.sequences.turns import Session

ENDPOINT_MOST = 2048

_PATH = re.compile(r"(?:/[A-Za-z0-9\-._~!$&'()*+,=:]+)+/?")
_VISIBLE = re.compile(r"[!-~]+")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[!-~](?:[ -~]{0,510}[!-~])?")


class RouteOptions(Protocol):
    """Settings `gateway`, as far as they decide what is sent where."""

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
    """The rules under one set of options."""

    def __init__(self, options: RouteOptions, *, user_agent: str, subset_header: str = "") -> None:
        """`subset_header`: in which it is said which model servers a request may go to; empty: in none."""
        self._path = options.path
        self._allowed = options.allowed_paths
        allowed = options.allowed_headers
        self._passing = None if allowed is None else [plain(pattern) for pattern in allowed]
        """Patterns of the callers' headers that pass; None: all but the doubtful."""
        self._fairness_from = options.fairness_from
        chosen = {name.lower(): value for name, value in options.headers.items()}
        if options.objective:
            chosen[OBJECTIVE] = options.objective
        self._chosen = frozenset(chosen)
        """What the operator set: a caller cannot change it."""
        self._subset = subset_header.lower()
        self._subset_plain = plain(subset_header)
        self._headers = {
            "accept": "*/*",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": user_agent,
        } | chosen

    def path(self, endpoint: str) -> str | Refused:
        """The path for a request: the default, or its own when that is plain and allowed."""
        if not endpoint or endpoint == self._path:
            return self._path
        if len(endpoint) > ENDPOINT_MOST:
            return Refused(f"data.endpoint: longer than {ENDPOINT_MOST} characters")
        if not is_plain_path(endpoint):
            return Refused(f"data.endpoint: {endpoint[:100]!r} is not a plain path")
        if not any_fits(self._allowed, endpoint):
            return Refused(f"data.endpoint: {endpoint[:100]!r} is not among gateway.allowed_paths")
        return endpoint

    def headers_for(self, request: Request, bearer: str, traceparent: str = "") -> dict[str, str]:
        """Names in lower case. `bearer`: the Authorization header, or empty. `traceparent`: of our own span,
        in the place of the producer's."""
        headers = self._headers.copy()
        if request.headers:
            headers.update(self._passed_on(request.headers, request.session))
        if request.session is not None:
            for name, value in request.session.headers.items():
                headers[name] = _header_safe(value)
        if self._subset and request.endpoints:
            headers[self._subset] = _header_safe(request.endpoints)
        if bearer:
            headers["authorization"] = bearer
        headers[REQUEST_ID] = _header_safe(request.id)
        metadata = request.metadata
        if metadata:
            if fairness_id := metadata.get(self._fairness_from):
                headers[FAIRNESS_ID] = _header_safe(fairness_id)
            trace, state = trace_of(request)
            if trace:
                headers["traceparent"] = trace
            if state:
                headers["tracestate"] = state
        if traceparent:
            headers["traceparent"] = traceparent
        return headers

    def _passed_on(self, headers: Mapping[str, str], session: Session | None) -> dict[str, str]:
        """A caller's headers without those that are not the caller's to set; of equal names the last."""
        lowered = {name.lower(): value for name, value in headers.items()}
        named = {name.strip() for name in lowered.get("connection", "").lower().split(",")}
        ours = () if session is None else {plain(name) for name in (*session.headers, session.token_header)}
        return {
            name: value
            for name, value in lowered.items()
            if passed_on(known := plain(name))
            and known not in self._chosen
            and known != self._subset_plain
            and known not in ours
            and name not in named
            and self._passes(known)
        }

    def _passes(self, known: str) -> bool:
        return any_fits(self._passing, known) if self._passing is not None else not doubtful(known)


def is_plain_path(path: str) -> bool:
    """Letters, digits and a few marks between single slashes; no dot segment, no escape, no query.

    So there is nothing to normalise, which gateway and model server might do in two ways.
    """
    return _PATH.fullmatch(path) is not None and {".", ".."}.isdisjoint(path.split("/"))


def trace_of(request: Request) -> tuple[str, str]:
    """The producer's traceparent and tracestate; empty where there is none, or none that is well-formed."""
    metadata = request.metadata
    trace = metadata.get("traceparent", "")
    if not _TRACEPARENT.fullmatch(trace):
        return "", ""
    state = metadata.get("tracestate", "")
    return trace, state if _TRACESTATE.fullmatch(state) else ""


def _header_safe(value: str) -> str:
    """The value itself where it is visible ASCII, else percent-encoded."""
    return value if _VISIBLE.fullmatch(value) else quote(value, safe="!#$&'()*+,/:;=?@[]~")
