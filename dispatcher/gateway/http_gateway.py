"""Implement `ports.Gateway` over HTTP. Each attempt uses the settings and credentials of its time.

An attempt that ends without an answer may be the fault of the request, or of a gateway that died with all
requests it had. To tell the two apart, the dispatcher opens a connection to the gateway then: if it accepts
none, the gateway is unreachable.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from dispatcher import USER_AGENT
from dispatcher.common.network_errors import describe_error
from dispatcher.gateway.body_priority import set_priority
from dispatcher.gateway.buffers import AnswerBuffer, AnswerBufferPool
from dispatcher.gateway.contract import AttemptResult
from dispatcher.gateway.exchange import send_and_read
from dispatcher.gateway.transport import (
    CONNECT_S,
    AttemptProgress,
    PreparedRequest,
    Transport,
    TransportRotation,
)
from dispatcher.requests.headers import INFERENCE_TTL
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Failed,
    FailureKind,
    Refused,
    TooLate,
    Unreachable,
)
from dispatcher.requests.request import Request
from dispatcher.requests.routing import Route
from dispatcher.settings.model import GatewaySettings
from dispatcher.settings.small_files import BackgroundRead
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.watched_files import file_fingerprint, read_token_blocking
from dispatcher.telemetry.tracing import make_traceparent

FILE_CHECK_INTERVAL_S = 1.0
"""Shortest time between two checks of the token and certificate files."""

T = TypeVar("T")


class _WatchedValue(Generic[T]):
    """A value made from files that other programs replace. It is made again when a file has changed.

    If a changed file cannot be read, the old value stays in force and the read is tried again.
    """

    def __init__(self, paths: Sequence[str], make: Callable[[], T]) -> None:
        self.paths = tuple(paths)
        self.value: T | None = None
        self.fault = ""
        self._make = make
        self._next_check_at = float("-inf")
        self._background_load = BackgroundRead(self._load_if_changed)
        self._waiting_count = 0
        """Number of attempts that wait for the current check of the files."""
        self._file_states: object = None
        self._last_load: object = None
        """Result of the last check, the same object for all attempts that waited for it."""

    async def refresh(self, now: float) -> bool:
        """Check the files, at most every FILE_CHECK_INTERVAL_S. Return whether the value was made again.

        An attempt that comes while another one checks the files goes on with the current value. It waits only
        if there is no value yet.
        """
        if now < self._next_check_at and not (self._waiting_count and self.value is None):
            return False
        self._next_check_at = now + FILE_CHECK_INTERVAL_S
        self._waiting_count += 1
        try:
            loaded = await self._background_load()
        except TimeoutError as error:
            # A hanging file system (NFS, for example) must not stop the attempts: the old value stays.
            self.fault = f"{', '.join(filter(None, self.paths))} cannot be read: {error}"
            return False
        except (OSError, ValueError) as error:
            self.fault = str(error)
            return False
        finally:
            self._waiting_count -= 1
        self.fault = ""
        # All attempts that waited get the same object. Only the first of them reports a new value.
        if loaded is None or loaded is self._last_load:
            return False
        self._last_load, (self._file_states, self.value) = loaded, loaded
        return True

    def _load_if_changed(self) -> tuple[object, T] | None:
        """Return the state of the files and the value made from them. `None` if the files have not changed.

        Runs in a thread.
        """
        # The state is taken before the files are read: a file that is replaced in between is read again.
        file_states = [file_fingerprint(path) for path in self.paths if path]
        if file_states == self._file_states and not self.fault:
            return None
        return file_states, self._make()


class _Plan:
    """Values derived from the options that are the same for all requests."""

    def __init__(self, options: GatewaySettings, subset_header: str, reserved_headers: Iterable[str]) -> None:
        self.is_secure = options.url.scheme == "https"
        self.timeout_s = options.timeout_s
        self.max_response_bytes = options.max_response_bytes
        self.inference_ttl_s = options.inference_ttl_s
        self.body_priority = options.body_priority
        self.route = Route(
            options, user_agent=USER_AGENT, subset_header=subset_header, reserved_headers=reserved_headers
        )
        self.basic_authorization = options.url.authorization_header
        self._base = options.url.without_credentials.rstrip("/")
        address = urlsplit(self._base)
        self.host, self.port = address.hostname or "", address.port or (443 if self.is_secure else 80)

    def build_url(self, endpoint: str) -> str | Refused:
        path = self.route.choose_path(endpoint)
        return path if isinstance(path, Refused) else self._base + path


class HttpGateway:
    """Implements `ports.Gateway` over HTTP/1.1.

    Options may change at any time: running attempts end with the old options, the next one uses the new ones.
    Connections are opened as needed and kept alive. A request never waits for a connection, because the limit
    already bounds the number of requests in flight.
    """

    def __init__(
        self, options: GatewaySettings, *, subset_header: str = "", reserved_headers: Iterable[str] = ()
    ) -> None:
        self._transports = TransportRotation()
        self._attempts: dict[str, AttemptProgress] = {}
        self.buffers = AnswerBufferPool(options.max_buffered_bytes, options.max_response_bytes)
        self._options: GatewaySettings | None = None
        self.reconfigure(options, subset_header=subset_header, reserved_headers=reserved_headers)

    def reconfigure(
        self, options: GatewaySettings, *, subset_header: str = "", reserved_headers: Iterable[str] = ()
    ) -> None:
        """Use these options from the next request on. The names of headers are passed to `Route`."""
        self._plan = _Plan(options, subset_header, reserved_headers)
        self.buffers.set_limits(options.max_buffered_bytes, options.max_response_bytes)
        before, self._options = self._options, options
        if before is None or before.token_file != options.token_file:
            self._bearer = _WatchedValue([options.token_file], lambda: _read_bearer(options.token_file))
        if before is None or (before.tls, before.url) != (options.tls, options.url):
            tls, is_secure = options.tls, self._plan.is_secure
            files = [tls.ca_file, tls.cert_file, tls.key_file] if is_secure else []
            self._tls = _WatchedValue(files, lambda: _tls_context(tls, secure=is_secure))

    async def prepare(self) -> None:
        """Read the token and the TLS files in advance, so that the first request does not wait for them."""
        await self._refresh_transport(asyncio.get_running_loop().time())

    def resize_connection_pool(self, max_requests: int) -> None:
        """Keep no more connections than `max_requests` requests can use at once."""
        transport = self._transports.current
        if transport is not None:
            transport.connector.close_idle(max(0, max_requests - transport.running_count))

    def get_connected_at(self, token: str) -> float | None:
        """Return the time since which a running attempt has a connection. `None` if it has none yet."""
        progress = self._attempts.get(token)
        return None if progress is None else progress.connected_at

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transports.aclose()

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool] = lambda: True
    ) -> AttemptResult:
        """Send one attempt, until `deadline` (loop time) or gateway.timeout_s, whichever is first."""
        now = asyncio.get_running_loop().time
        started_at = now()
        if deadline <= started_at:
            return AttemptResult(TooLate(), started_at, started_at)
        transport = await self._refresh_transport(started_at)
        # The plan is read after the files, without an await in between. The settings may have changed during
        # the reads, and a token must only go to its own gateway.
        plan = self._plan
        url = plan.build_url(request.endpoint)
        if isinstance(url, Refused):
            return AttemptResult(url, started_at, started_at)
        if isinstance(transport, Unreachable):
            return AttemptResult(transport, started_at, started_at)
        headers = plan.route.build_headers(
            request, self._bearer.value or plan.basic_authorization, make_traceparent(url)
        )
        ends_at = min(deadline, started_at + plan.timeout_s)
        if plan.inference_ttl_s is not None:
            headers[INFERENCE_TTL] = _format_go_duration(min(plan.inference_ttl_s, ends_at - started_at))
        buffer = AnswerBuffer(self.buffers)
        progress = self._attempts[token] = AttemptProgress(
            may_send=may_send, buffer=buffer, deadline=deadline
        )
        progress.received = request.received
        if request.affinity is not None:
            progress.token_header = request.affinity.token_header
        payload = request.payload
        if plan.body_priority is not None:
            payload = set_priority(payload, plan.body_priority)
        prepared = PreparedRequest(url, headers, payload)
        transport.running_count += 1
        is_kept = False
        try:
            async with asyncio.timeout_at(ends_at) as progress.timer:
                outcome = await send_and_read(transport, prepared, progress, plan.max_response_bytes)
            is_kept = isinstance(outcome, Delivered | Failed) and bool(outcome.body)
        except TimeoutError:
            # The end of the attempt may have been moved: time without memory for the answer is not the
            # gateway's fault. It is never moved beyond the deadline.
            late = progress.timer is not None and progress.timer.when() == deadline
            outcome = (
                TooLate()
                if late
                else Failed(f"no answer within {plan.timeout_s:g} s", kind=FailureKind.NO_ANSWER_IN_TIME)
            )
        finally:
            # An answer that becomes a result keeps its memory until the queue has confirmed the result. The
            # dispatch loop frees it then.
            if not is_kept:
                buffer.free_share()
            transport.running_count -= 1
            progress.forbid_sending()
            self._attempts.pop(token, None)
        try:
            await self._transports.close_unused()
        except asyncio.CancelledError:
            buffer.free_share()  # the caller never gets the answer
            raise
        ended_at = now()
        # The attempt ended without an answer. A gateway that takes no new connection now died with all
        # requests it had, and the request is not charged with a failed attempt.
        if isinstance(outcome, Failed) and outcome.status is None and deadline - ended_at > CONNECT_S:
            why = await _connect_and_close(transport, plan)
            outcome = Unreachable(f"{outcome.why}, and now {why}", outcome.kind) if why else outcome
        if progress.connected_at is None:
            return AttemptResult(outcome, ended_at, ended_at)
        # If the request was sent twice, the time since the start includes the exchange on the kept
        # connection, and does not say how long opening the new one took.
        opened_s = (
            None
            if progress.is_reused or progress.needs_new_connection
            else progress.connected_at - started_at
        )
        memory = buffer if is_kept else None
        return AttemptResult(
            outcome, progress.connected_at, ended_at, opened_s, progress.token, progress.queued_s, memory
        )

    async def _refresh_transport(self, now: float) -> Transport | Unreachable:
        """Return the transport to use, after a check of the files that rotate: certificates and token."""
        while True:
            tls, bearer = self._tls, self._bearer
            if await tls.refresh(now) and tls is self._tls and tls.value is not None:
                self._transports.replace_current(tls.value)
            await bearer.refresh(now)
            # `reconfigure` may have replaced either one during the awaits: then both are checked again.
            if (tls, bearer) == (self._tls, self._bearer):
                break
        if self._transports.current is None or self._tls.value is None:
            return Unreachable(f"gateway.tls: {self._tls.fault}", FailureKind.NO_CREDENTIALS)
        if self._bearer.value is None:
            return Unreachable(f"gateway.token_file: {self._bearer.fault}", FailureKind.NO_CREDENTIALS)
        return self._transports.current


def _format_go_duration(seconds: float) -> str:
    """Return a time as a Go duration. It is never 0, which would mean no limit."""
    return f"{max(1, int(seconds * 1000))}ms"


async def _connect_and_close(transport: Transport, plan: _Plan) -> str:
    """Connect to the gateway and close the connection. Return why that failed, or an empty string."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(
                plan.host, plan.port, ssl=transport.tls if plan.is_secure else None
            )
    except TimeoutError:
        return f"no connection within {CONNECT_S:g} s"
    except OSError as error:
        return f"no connection: {plan.host}:{plan.port}: {describe_error(error)}"
    writer.transport.abort()
    return ""


def _tls_context(options: TlsSettings, *, secure: bool) -> ssl.SSLContext:
    if not secure:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the transport requires one, and does not use it
    return options.build_context()


def _read_bearer(token_file: str) -> str:
    """Return the Authorization header with the token of the file. Empty if there is no file."""
    return f"Bearer {read_token_blocking(token_file)}" if token_file else ""
