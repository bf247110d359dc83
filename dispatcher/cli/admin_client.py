"""Client of the admin port of a running dispatcher: status and readiness."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dispatcher import USER_AGENT
from dispatcher.check.plain_http import RawResponse, send_get
from dispatcher.common.network_errors import describe_error

if TYPE_CHECKING:
    from dispatcher.settings.model import AdminSettings
    from dispatcher.telemetry.status import Status

TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 1 << 20
"""Largest answer in bytes that is read."""
_LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what is listened on
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
DEFAULT_PORT = 8080


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Address of the admin port of a dispatcher."""

    host: str
    port: int
    token_file: str = ""
    url: str = ""
    """Host and port as the user gave them. Empty if the address comes from the settings."""

    def __str__(self) -> str:
        if self.url:
            return self.url
        host_and_port = f"{self.host}:{self.port}"
        return f"admin.port {self.port} of this machine" if self.host in _LOOPBACK else host_and_port


class StatusProblemKind(StrEnum):
    """Kind of reason why the state of a dispatcher is not known."""

    NO_ADDRESS = "no-address"
    """No option and no configuration says where to ask."""
    BAD_TOKEN_FILE = "bad-token-file"  # noqa: S105 - a kind, no token
    """`admin.token_file` cannot be read, or holds no token."""
    UNAUTHORIZED = "unauthorized"
    """The dispatcher wants a token, and got none or another one."""
    NOT_LISTENING = "not-listening"
    """The connection was refused."""
    UNREACHABLE = "unreachable"
    """The connection failed in another way, or the answer took too long."""
    NOT_A_DISPATCHER = "not-a-dispatcher"
    """Another program answers at the address."""


@dataclass(frozen=True, slots=True)
class StatusProblem:
    """Reason why the state of a dispatcher is not known: the kind for code, the message for people."""

    kind: StatusProblemKind
    message: str

    def __str__(self) -> str:
        return self.message


def parse_admin_address(admin: AdminSettings | None, url: str = "") -> AdminAddress | None:
    """Return the admin address from a URL or, if there is none, from the settings.

    Return `None` if there are neither. Raises ValueError if the URL is not `http://host:port`.
    """
    token_file = admin.token_file if admin else ""
    if not url:
        if admin is None:
            return None
        # A dispatcher that listens on all interfaces is asked on the loopback one.
        return AdminAddress(_LOOPBACK_OF_WILDCARD.get(admin.host, admin.host), admin.port, token_file)
    parts = urlsplit(url if "://" in url else f"http://{url}")
    # A path, a query or a user would be ignored without a word, so they are refused.
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError("give http://host:port of a dispatcher's admin port")
    return AdminAddress(
        parts.hostname,
        parts.port or DEFAULT_PORT,
        token_file,
        f"{parts.hostname}:{parts.port or DEFAULT_PORT}",
    )


async def fetch_status(address: AdminAddress) -> Status | StatusProblem:
    """Return the status of the dispatcher, or the reason why it is not known."""
    document = await fetch_status_document(address)
    if isinstance(document, StatusProblem):
        return document
    # Imported here because the import takes tens of milliseconds, and often no dispatcher answers.
    from dispatcher.telemetry.status import decode_status

    return decode_status(document)


async def fetch_status_document(address: AdminAddress) -> dict[str, Any] | StatusProblem:
    """Return /status as the dispatcher sends it, or the reason why it is not known."""
    answer = await _fetch_page(address, "/status")
    if isinstance(answer, StatusProblem):
        return answer
    if answer.status == 401:
        requirement = (
            "another token than admin.token_file has"
            if address.token_file
            else "a token; admin.token_file names none"
        )
        return StatusProblem(StatusProblemKind.UNAUTHORIZED, f"{address} wants {requirement}")
    try:
        status = json.loads(answer.body) if answer.status == 200 else None
    except ValueError:
        status = None
    # Another program on that port may answer JSON, too; every dispatcher sends an explanation.
    if isinstance(status, dict) and "explanation" in status:
        return status
    return _make_not_a_dispatcher(address)


async def find_readiness_problem(address: AdminAddress) -> str | None:
    """Return why the dispatcher is not ready or does not answer. `None` if it is ready."""
    answer = await _fetch_page(address, "/readyz")
    if isinstance(answer, StatusProblem):
        return str(answer)
    if answer.status == 503:
        return answer.body.decode(errors="replace").strip() or "it is not ready"
    return None if answer.status == 200 else str(_make_not_a_dispatcher(address))


def _make_not_a_dispatcher(address: AdminAddress) -> StatusProblem:
    return StatusProblem(StatusProblemKind.NOT_A_DISPATCHER, f"what answers on {address} is no dispatcher")


async def _fetch_page(address: AdminAddress, path: str) -> RawResponse | StatusProblem:
    """Return the answer of the admin port, or the reason why there is none."""
    token = ""
    if address.token_file:
        from dispatcher.settings.watched_files import TokenFileError, read_token

        try:
            token = read_token(address.token_file)
        except TokenFileError as error:
            return StatusProblem(StatusProblemKind.BAD_TOKEN_FILE, f"admin.token_file: {error}")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _send_request(address, path, token)
    except ConnectionRefusedError:
        return StatusProblem(StatusProblemKind.NOT_LISTENING, f"nothing listens on {address}")
    except (ConnectionResetError, ValueError):  # something listens there, but does not speak HTTP
        return _make_not_a_dispatcher(address)
    except OSError as error:
        return StatusProblem(StatusProblemKind.UNREACHABLE, f"{address}: {describe_error(error)}")


async def _send_request(address: AdminAddress, path: str, token: str) -> RawResponse:
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=MAX_ANSWER_BYTES)
    headers = {"host": f"{address.host}:{address.port}", "user-agent": USER_AGENT, "connection": "close"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    try:
        return await send_get(reader, writer, path, headers, body_max_bytes=MAX_ANSWER_BYTES)
    finally:
        writer.close()
