"""Implement `ports.Gateway` over HTTP. Each attempt uses the settings and credentials of its time.

An attempt that ends without an answer may be the fault of the request, or of a gateway that died with all
requests it had. To tell the two apart, the dispatcher opens a connection to the gateway then: if it accepts
none, the gateway is unreachable.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from dispatcher import USER_AGENT
from dispatcher.core.gateway.outcome import Delivered, Failed, Refused, TooLate, Unreachable
from dispatcher.core.requests.headers import INFERENCE_TTL
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.routing import Route
from dispatcher.forward.buffers import AnswerBuffers, AnswerHold
from dispatcher.forward.exchange import exchange
from dispatcher.forward.transport import CONNECT_S, Prepared, Progress, Wire, Wires, running
from dispatcher.ports import Forwarded
from dispatcher.ports.network_errors import words
from dispatcher.settings import GatewaySettings, TlsSettings
from dispatcher.settings.small_files import BackgroundRead
from dispatcher.settings.watched_files import looks, read_token_blocking
from dispatcher.telemetry.tracing import going_to

WATCH_S = 1.0
"""Shortest time between two checks of the token and certificate files."""

T = TypeVar("T")


class _Watched(Generic[T]):
    """A value made from files that other programs replace. It is made again when a file has changed.

    If a changed file cannot be read, the old value stays in force and the read is tried again.
    """

    def __init__(self, paths: Sequence[str], make: Callable[[], T]) -> None:
        self.paths = tuple(paths)
        self.value: T | None = None
        self.fault = ""
        self._make = make
        self._look_at = float("-inf")
        self._look = BackgroundRead(self._made_anew)
        self._looking = 0
        """Number of attempts that wait for the current check of the files."""
        self._seen: object = None
        self._made: object = None
        """Result of the last check, the same object for all attempts that waited for it."""

    async def refresh(self, now: float) -> bool:
        """Check the files, at most every FILE_CHECK_INTERVAL_S. Return whether the value was made again.

        An attempt that comes while another one checks the files goes on with the current value. It waits only
        if there is no value yet.
        """
        if now < self._look_at and not (self._looking and self.value is None):
            return False
        self._look_at = now + WATCH_S
        self._looking += 1
        try:
            made = await self._look()
        except TimeoutError as error:
            # A hanging file system (NFS, for example) must not stop the attempts: the old value stays.
            self.fault = f"{', '.join(filter(None, self.paths))} cannot be read: {error}"
            return False
        except (OSError, ValueError) as error:
            self.fault = str(error)
            return False
        finally:
            self._looking -= 1
        self.fault = ""
        # All attempts that waited get the same object. Only the first of them reports a new value.
        if made is None or made is self._made:
            return False
        self._made, (self._seen, self.value) = made, made
        return True

    def _made_anew(self) -> tuple[object, T] | None:
        """Return the state of the files and the value made from them. `None` if the files have not changed.

        Runs in a thread.
        """
        # The state is taken before the files are read: a file that is replaced in between is read again.
        seen = [looks(path) for path in self.paths if path]
        if seen == self._seen and not self.fault:
            return None
        return seen, self._make()


class _Plan:
    """Values derived from the options that are the same for all requests."""

    def __init__(self, options: GatewaySettings, subset_header: str) -> None:
        self.secure = options.url.scheme == "https"
        self.timeout_s = options.timeout_s
        self.max_response_bytes = options.max_response_bytes
        self.inference_ttl_s = options.inference_ttl_s
        self.route = Route(options, user_agent=USER_AGENT, subset_header=subset_header)
        self.basic = options.url.authorization
        self._base = options.url.bare.rstrip("/")
        address = urlsplit(self._base)
        self.host, self.port = address.hostname or "", address.port or (443 if self.secure else 80)

    def url(self, endpoint: str) -> str | Refused:
        path = self.route.path(endpoint)
        return path if isinstance(path, Refused) else self._base + path


class HttpGateway:
    """Implements `ports.Gateway` over HTTP/1.1.

    Options may change at any time: running attempts end with the old options, the next one uses the new ones.
    Connections are opened as needed and kept alive. A request never waits for a connection, because the limit
    already bounds the number of requests in flight.
    """

    def __init__(self, options: GatewaySettings, *, subset_header: str = "") -> None:
        self._wires = Wires()
        self._tries: dict[str, Progress] = {}
        self.buffers = AnswerBuffers(options.max_buffered_bytes, options.max_response_bytes)
        self._options: GatewaySettings | None = None
        self.reconfigure(options, subset_header=subset_header)

    def reconfigure(self, options: GatewaySettings, *, subset_header: str = "") -> None:
        """Use these options from the next request on. `subset_header` is passed to `Route`."""
        self._plan = _Plan(options, subset_header)
        self.buffers.resize(options.max_buffered_bytes, options.max_response_bytes)
        before, self._options = self._options, options
        if before is None or before.token_file != options.token_file:
            self._bearer = _Watched([options.token_file], lambda: _bearer(options.token_file))
        if before is None or (before.tls, before.url) != (options.tls, options.url):
            tls, secure = options.tls, self._plan.secure
            files = [tls.ca_file, tls.cert_file, tls.key_file] if secure else []
            self._tls = _Watched(files, lambda: _tls_context(tls, secure=secure))

    async def prepare(self) -> None:
        """Read the token and the TLS files in advance, so that the first request does not wait for them."""
        await self._refresh(asyncio.get_running_loop().time())

    def resize(self, limit: int) -> None:
        """Keep no more connections than `max_requests` requests can use at once."""
        wire = self._wires.current
        if wire is not None:
            wire.connector.close_idle(max(0, limit - wire.running))

    def connected(self, token: str) -> float | None:
        """Return the time since which a running attempt has a connection. `None` if it has none yet."""
        current = self._tries.get(token)
        return None if current is None else current.connected_at

    async def aclose(self) -> None:
        """Close every connection."""
        await self._wires.aclose()

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool] = lambda: True
    ) -> Forwarded:
        """Send one attempt, until `deadline` (loop time) or gateway.timeout_s, whichever is first."""
        now = asyncio.get_running_loop().time
        started = now()
        if deadline <= started:
            return Forwarded(TooLate(), started, started)
        wire = await self._refresh(started)
        # The plan is read after the files, without an await in between. The settings may have changed during
        # the reads, and a token must only go to its own gateway.
        plan = self._plan
        url = plan.url(request.endpoint)
        if isinstance(url, Refused):
            return Forwarded(url, started, started)
        if isinstance(wire, Unreachable):
            return Forwarded(wire, started, started)
        headers = plan.route.headers_for(request, self._bearer.value or plan.basic, going_to(url))
        ends = min(deadline, started + plan.timeout_s)
        if plan.inference_ttl_s is not None:
            headers[INFERENCE_TTL] = _go_duration(min(plan.inference_ttl_s, ends - started))
        hold = AnswerHold(self.buffers)
        current = self._tries[token] = Progress(may_send=may_send, hold=hold, deadline=deadline)
        if request.session is not None:
            current.token_header = request.session.token_header
        prepared = Prepared(url, headers, request.payload, current)
        running.set(current)
        wire.running += 1
        kept = False
        try:
            async with asyncio.timeout_at(ends) as current.timer:
                outcome = await exchange(wire, prepared, current, plan.max_response_bytes)
            kept = isinstance(outcome, Delivered | Failed) and bool(outcome.body)
        except TimeoutError:
            # The end of the attempt may have been moved: time without memory for the answer is not the
            # gateway's fault. It is never moved beyond the deadline.
            late = current.timer is not None and current.timer.when() == deadline
            outcome = TooLate() if late else Failed(f"no answer within {plan.timeout_s:g} s")
        finally:
            # An answer that becomes a result keeps its memory until the queue has confirmed the result. The
            # dispatch loop frees it then.
            if not kept:
                hold.free()
            wire.running -= 1
            current.end()
            self._tries.pop(token, None)
        try:
            await self._wires.close_unused()
        except asyncio.CancelledError:
            hold.free()  # the caller never gets the answer
            raise
        ended = now()
        # The attempt ended without an answer. A gateway that takes no new connection now died with all
        # requests it had, and the request is not charged with a failed attempt.
        if isinstance(outcome, Failed) and outcome.status is None and deadline - ended > CONNECT_S:
            why = await _connect_and_close(wire, plan)
            outcome = Unreachable(f"{outcome.why}, and now {why}") if why else outcome
        if current.connected_at is None:
            return Forwarded(outcome, ended, ended)
        # If the request was sent twice, the time since the start includes the exchange on the kept
        # connection, and does not say how long opening the new one took.
        opened_s = None if current.reused or current.fresh else current.connected_at - started
        held = hold if kept else None
        return Forwarded(
            outcome, current.connected_at, ended, opened_s, current.token, current.queued_s, held
        )

    async def _refresh(self, now: float) -> Wire | Unreachable:
        """Return the transport to use, after a check of the files that rotate: certificates and token."""
        while True:
            tls, bearer = self._tls, self._bearer
            if await tls.refresh(now) and tls is self._tls and tls.value is not None:
                self._wires.renew(tls.value)
            await bearer.refresh(now)
            # `reconfigure` may have replaced either one during the awaits: then both are checked again.
            if (tls, bearer) == (self._tls, self._bearer):
                break
        if self._wires.current is None or self._tls.value is None:
            return Unreachable(f"gateway.tls: {self._tls.fault}")
        if self._bearer.value is None:
            return Unreachable(f"gateway.token_file: {self._bearer.fault}")
        return self._wires.current


def _go_duration(seconds: float) -> str:
    """Return a time as a Go duration. It is never 0, which would mean no limit."""
    return f"{max(1, int(seconds * 1000))}ms"


async def _connect_and_close(wire: Wire, plan: _Plan) -> str:
    """Connect to the gateway and close the connection. Return why that failed, or an empty string."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(
                plan.host, plan.port, ssl=wire.tls if plan.secure else None
            )
    except TimeoutError:
        return f"no connection within {CONNECT_S:g} s"
    except OSError as error:
        return f"no connection: {plan.host}:{plan.port}: {words(error)}"
    writer.transport.abort()
    return ""


def _tls_context(options: TlsSettings, *, secure: bool) -> ssl.SSLContext:
    if not secure:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the transport requires one, and does not use it
    return options.context()


def _bearer(token_file: str) -> str:
    """Return the Authorization header with the token of the file. Empty if there is no file."""
    return f"Bearer {read_token_blocking(token_file)}" if token_file else ""
