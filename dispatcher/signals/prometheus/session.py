"""Connect to Prometheus: the client library, over a session that bounds the time and the size of answers.

docs/contributing/decisions/0015-third-party-libraries.md says why the library gets a session of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dispatcher.common.network_errors import describe_error
from dispatcher.settings.watched_files import TokenFileError, read_token
from dispatcher.signals.prometheus.instant_query import QueryError, parse_document

ANSWER_MAX_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PrometheusAddress:
    """Address and credentials of Prometheus, or of a server with the same API (Thanos, Mimir)."""

    url: str
    token_file: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Additional headers, such as X-Scope-OrgID."""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    insecure_skip_verify: bool = False


def connect_client(address: PrometheusAddress, session: QuerySession) -> Any:
    """Return the client of the library, over the session."""
    # A caller that runs this in a thread has imported the library before (see PrometheusSource).
    from prometheus_api_client import PrometheusConnect
    from urllib3.util.retry import Retry

    return PrometheusConnect(
        url=address.url.rstrip("/"),
        headers=build_headers(address),
        session=session,
        retry=Retry(0, read=False),
    )


def build_headers(address: PrometheusAddress) -> dict[str, str]:
    """Return the headers of a query, with the token that the file has now. Raises QueryError."""
    headers = dict(address.headers)
    if address.token_file:
        try:
            headers["Authorization"] = f"Bearer {read_token(address.token_file)}"
        except TokenFileError as error:
            raise QueryError(f"the token file {error}", "signals.prometheus.token_file") from None
    return headers


class QuerySession:
    """The part of requests.Session that the client library uses, with a bound on time and size.

    requests bounds only the wait for each piece of an answer, and not the whole answer. It would also follow
    a redirect and send the tenant's headers along.
    """

    def __init__(self, access: PrometheusAddress, timeout_s: float, *, result_type: str = "vector") -> None:
        """Create a session for queries whose result has the type `result_type`."""
        self._timeout_s = timeout_s
        self._result_type = result_type
        self._session: Any = None
        self._mounts: list[tuple[str, Any]] = []
        self.verify: bool | str = access.ca_file or not access.insecure_skip_verify
        self.cert = (access.cert_file, access.key_file or access.cert_file) if access.cert_file else None

    def mount(self, prefix: str, adapter: Any) -> None:
        self._mounts.append((prefix, adapter))

    def request(self, method: str, url: str, **options: Any) -> Any:
        import requests
        import urllib3

        if self._session is None:
            self._session = requests.Session()
            self._session.trust_env = False  # neither a proxy nor a .netrc of the environment
            for prefix, adapter in self._mounts:
                self._session.mount(prefix, adapter)
        options |= {"timeout": self._timeout_s, "allow_redirects": False, "stream": True}
        give_up_at = time.monotonic() + self._timeout_s
        try:
            with self._session.request(method, url, **options) as response:
                body = _read_body(response.raw, give_up_at)
                status, redirect = response.status_code, response.is_redirect
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
                # The message of the original error has the whole URL, with its secrets.
                raise QueryError("not a URL", "signals.prometheus.url") from None
            raise QueryError(describe_error(error)) from None
        return _QueryAnswer(status, parse_document(status, redirect, body, self._result_type))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


@dataclass(frozen=True, slots=True)
class _QueryAnswer:
    """The part of requests.Response that the client library uses."""

    status_code: int
    document: Any

    def json(self) -> Any:
        return self.document


def _read_body(raw: Any, give_up_at: float) -> bytes:
    body = bytearray()
    while piece := raw.read1(64 * 1024, decode_content=True):
        body += piece
        if len(body) > ANSWER_MAX_BYTES:
            raise QueryError(f"the answer is larger than {ANSWER_MAX_BYTES} bytes")
        if time.monotonic() > give_up_at:
            raise QueryError("the answer did not end in time", "signals.interval_s allows more time")
    return bytes(body)
