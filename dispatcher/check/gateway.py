"""Check the gateway with one GET request, and judge the answer as the dispatcher judges answers.

A gateway does no inference for a GET.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from dispatcher import USER_AGENT
from dispatcher.check.addresses import CONNECT_S, Address, list_addresses
from dispatcher.check.finding import Finding, Findings, Level, Probe, SlowFinding, make_known_probe
from dispatcher.check.plain_http import RawResponse, send_get
from dispatcher.common.network_errors import describe_error
from dispatcher.requests.outcomes.judge import GatewayRecord, judge_attempt
from dispatcher.requests.outcomes.outcome import Failed, classify_answer
from dispatcher.settings.model import Settings
from dispatcher.settings.watched_files import TokenFileError, read_token

ANSWER_S = 3.0
BEGINNING_BYTES = 1000
"""Number of bytes of the answer's body that are read."""
_WHERE = "gateway.url"
_HINTS = {
    401: "gateway.token_file",
    407: "gateway.token_file",
    404: "gateway.path, the HTTPRoute, or a Host in gateway.headers",
}


def build_probe(settings: Settings, unreachable: Mapping[Address, str]) -> Probe:
    """Return the probe of the gateway. The probe of an unreachable gateway only reports that."""
    gateway = settings.gateway
    [address] = list_addresses([gateway.url])
    if address in unreachable:
        return make_known_probe(Finding("failed", _WHERE, unreachable[address]))
    try:
        tls = gateway.tls.build_context() if gateway.url.scheme == "https" else None
    except OSError as error:
        return make_known_probe(Finding("failed", "gateway.tls", f"cannot be used: {error}"))
    return lambda: _get_once(settings, address, tls)


async def _get_once(settings: Settings, address: Address, tls: ssl.SSLContext | None) -> Findings:
    parts = urlsplit(settings.gateway.url.without_credentials)
    host, port = address
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except OSError as error:  # TimeoutError and ssl.SSLError are subclasses
        hint = "gateway.tls" if isinstance(error, ssl.SSLError) else ""
        # A refusal is independent of time. A time-out may also come from a late event loop.
        refused = isinstance(error, ConnectionRefusedError)
        return [
            Finding("failed", _WHERE, f"{host}:{port}: {describe_error(error)}", hint, is_certain=refused)
        ]
    path = parts.path.rstrip("/") + settings.gateway.path
    try:
        async with asyncio.timeout(ANSWER_S):
            headers = _build_headers(settings, f"{host}:{port}" if parts.port else host)
            answer = await send_get(
                reader, writer, path, headers, body_max_bytes=BEGINNING_BYTES, requires_whole_body=False
            )
    except TimeoutError:
        what = f"{host}:{port} accepted the connection; GET {path} was not answered within {ANSWER_S:g} s"
        return [
            SlowFinding("warning", _WHERE, what, "gateway.url: its port, and http or https; else it is slow")
        ]
    except (OSError, ValueError) as error:
        what = f"{host}:{port} accepts connections, but does not answer HTTP: {describe_error(error)}"
        return [Finding("failed", _WHERE, what, "gateway.url: its port, and http or https")]
    finally:
        writer.transport.abort()
    asked = f"connected ({'TCP' if tls is None else 'TLS'}); GET {path}"
    return [replace(judge_answer(answer, asked, without_tls=tls is None), is_certain=True)]


def judge_answer(answer: RawResponse, request_text: str, *, without_tls: bool) -> Finding:
    """Return what the dispatcher would conclude from this answer to its first request.

    Two answers have a meaning of their own here. A gateway that accepts POST may answer a GET with 405. A 400
    to a request without TLS (`without_tls`) may say that the port expects TLS.
    """
    status = answer.status
    what = f"{request_text} was answered {status}"
    if status == 400 and without_tls and b"HTTPS" in answer.body.upper():  # as nginx and Go's servers put it
        return Finding("failed", _WHERE, f"{what}: that port speaks TLS", "gateway.url: https")
    if status == 405 and _accepts_post(answer):
        return Finding("ok", _WHERE, what)
    itself = classify_answer(status, answer.headers, answer.body, time.time())
    counted, _, _ = judge_attempt(itself, GatewayRecord())
    if not isinstance(counted, Failed):
        hint = "gateway.url, gateway.path and gateway.headers, if requests are answered so too"
        return Finding("ok", _WHERE, what, hint if status == 400 else "")
    if status >= 500:
        hint = "the gateway's endpoint picker and model servers"
        return Finding("warning", _WHERE, what + ("" if answer.body else " with an empty body"), hint)
    if isinstance(itself, Failed):
        level: Level = "failed" if itself.is_intermediary_error else "warning"
        return Finding(level, _WHERE, f"{request_text}: {itself.why}", _HINTS.get(status, _WHERE))
    # A running dispatcher returns such answers to the submitter once a request was answered with 2xx. Until
    # then the address may belong to something that is no gateway (`judge_attempt`).
    if status == 403:
        why = "it forbids that; requests that are answered so get it as their result once another got 2xx"
        return Finding("warning", _WHERE, f"{what}: {why}", "gateway.token_file, gateway.url, gateway.path")
    took = (
        f"takes {answer.headers['allow'][:40]!r} there, and no POST"
        if status == 405
        else "has nothing at this path"
    )
    hint = "gateway.url, gateway.path"
    return Finding("failed", _WHERE, f"{what}: it {took}, and may be no inference gateway", hint)


def _accepts_post(answer: RawResponse) -> bool:
    """Return False if the answer names the allowed methods and POST is not among them."""
    allow = answer.headers.get("allow", "")
    return not allow or "POST" in allow.upper()


def _build_headers(settings: Settings, host: str) -> dict[str, str]:
    gateway = settings.gateway
    headers = {"host": host, "user-agent": USER_AGENT, "accept": "*/*"}
    headers |= {name.lower(): value for name, value in gateway.headers.items()} | {"connection": "close"}
    if gateway.token_file:
        with suppress(TokenFileError):  # `check.settings` reports it
            headers["authorization"] = f"Bearer {read_token(gateway.token_file)}"
    elif gateway.url.credentials:
        headers["authorization"] = gateway.url.authorization_header
    return headers
