"""Send requests to the Kubernetes API: credentials, connections, and errors in one form.

The client is `kubernetes.aio`, which is used only to send requests. Its models and its Watch are not used: a
model of each pod costs a hundred times as much as the values that are kept of it, and the Watch hides that it
has lost its position.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from dispatcher import USER_AGENT
from dispatcher.common.network_errors import describe_error, describe_error_with_address
from dispatcher.settings.watched_files import file_fingerprint
from dispatcher.signals.kubernetes.cluster import ClusterAccess

_RESPONSE_START_S = 10.0
"""Time until the head of an answer. The head of a watch also comes at once."""
_FILE_CHECK_INTERVAL_S = 1.0
"""Interval at which a pause checks whether the credential files have changed."""
_REREAD_INTERVAL_S = 10.0
"""Interval at which refused credentials are read again. An exec plugin may have new ones, which no change of
a file shows."""
_CLIENT, _CONFIG = "kubernetes.aio.client", "kubernetes.aio.config"
_IN_CLUSTER = "kubernetes.aio.config.incluster_config"


def import_client() -> None:
    """Import the client library. It takes about a second, so callers do it outside of the event loop."""
    for name in (_CLIENT, _CONFIG, _IN_CLUSTER):
        importlib.import_module(name)


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """Problem in one sentence, and a hint what to look at."""

    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what} (look at: {self.hint})" if self.hint else self.what


class ApiError(Exception):
    """The API did not answer, or did not return what was asked for."""

    def __init__(
        self, what: str, hint: str = "", *, status: int | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(what)
        self.problem = ClusterProblem(what, hint)
        self.status = status
        """HTTP status. `None` if there was no HTTP answer, or an unreadable one."""
        self.retry_after_s = retry_after_s

    @property
    def is_permanent(self) -> bool:
        """True if only a change of the configuration or of the rights can solve the problem."""
        return self.status in (401, 403, 404)

    @property
    def is_throttled(self) -> bool:
        """True if the API server asks to wait (429)."""
        return self.status == 429

    @property
    def is_timeout(self) -> bool:
        """True if the request used up its whole time limit."""
        return isinstance(self.__cause__, TimeoutError)

    @property
    def is_malformed(self) -> bool:
        """True if an answer came and cannot be parsed."""
        return isinstance(self.__cause__, ValueError)


class Api:
    """Client of the API server. Every failure is an ApiError."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._session: _SharedSession | None = None
        self._credential_files = _CredentialFiles(())
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.client.close()

    @contextlib.asynccontextmanager
    async def get(
        self, path: str, query: Sequence[tuple[str, str]], total_s: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """Send a GET request, and yield the body of the answer if its status is 200.

        The body must be read inside the block. `total_s` is the time limit for the block.
        """
        hint = self._access.connection_hint
        try:
            async with (
                self._open_client() as client,
                await _send_request(client, path, query, total_s) as response,
            ):
                if response.status != 200:
                    raise await self._read_failure(response)
                kind = response.headers.get("Content-Type", "nothing")
                if not kind.startswith("application/json"):
                    raise ApiError(f"what answers for the Kubernetes API sends {kind}, no JSON", hint)
                yield response.content
        except TimeoutError as error:
            raise ApiError("the Kubernetes API did not answer in time", hint) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientSSLError):
                hint = f"the certificates of {self._access}"
            raise ApiError(
                f"the Kubernetes API cannot be reached: {describe_error_with_address(error)}", hint
            ) from error
        except ValueError as error:  # a line longer than the buffer, or not the JSON that it should be
            raise ApiError(
                f"the Kubernetes API's answer cannot be read: {describe_error(error)}", hint
            ) from error

    async def pause(self, seconds: float, wake: asyncio.Event) -> None:
        """Wait for some seconds. `wake`, or a change of the credential files, ends the wait early."""
        loop = asyncio.get_running_loop()
        until, credential_files = loop.time() + seconds, self._credential_files
        while (left_s := until - loop.time()) > 0 and not wake.is_set():
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _FILE_CHECK_INTERVAL_S)):
                    await wake.wait()
            if credential_files.have_changed():
                return

    @contextlib.asynccontextmanager
    async def _open_client(self) -> AsyncIterator[Any]:
        """Yield a client with the current credentials, which the server has not refused yet."""
        async with self._connecting:
            session = self._session
            if session is not None and self._credential_files.have_changed():
                # The client library reads a new token after a while, but never a new CA or server address.
                self._session = None
                if session.users == 0:
                    await session.client.close()
            if self._session is None:
                made = await self._create_client()
                self._session = _SharedSession(made, asyncio.get_running_loop().time())
        session = self._session
        session.users += 1
        try:
            yield session.client
        finally:
            session.users -= 1
            # Watches that began with the old credentials go on to their end. The last one closes the client.
            if session is not self._session and session.users == 0:
                await session.client.close()

    async def _create_client(self) -> Any:
        """Read the credentials and return a client.

        This happens for the first request, and again if the files change or the server refuses the
        credentials.
        """
        self._credential_files = _CredentialFiles(_list_credential_files(self._access))
        if self._access.is_kubeconfig_missing:
            what = f"{self._access} cannot be used: no such file"
            raise ApiError(what, "the environment variable KUBECONFIG, which names it")
        if not {_CLIENT, _CONFIG, _IN_CLUSTER} <= sys.modules.keys():
            await asyncio.to_thread(import_client)  # the import would block the event loop for about a second
        client = importlib.import_module(_CLIENT)
        configuration = client.Configuration()
        try:
            if self._access.is_in_cluster:
                loader = importlib.import_module(_IN_CLUSTER).InClusterConfigLoader(
                    token_filename=str(self._access.service_account / "token"),
                    cert_filename=str(self._access.service_account / "ca.crt"),
                    environ=self._access.environ,
                )
                loader.load_and_set(configuration)
            else:
                await importlib.import_module(_CONFIG).load_kube_config(
                    self._access.kubeconfig, client_configuration=configuration, persist_config=False
                )
            made = client.ApiClient(configuration)
        except Exception as error:  # files, exec plugins and certificates can raise anything here
            raise ApiError(f"{self._access} cannot be used: {describe_error(error)}") from error
        made.user_agent = USER_AGENT
        return made

    async def _read_failure(self, response: aiohttp.ClientResponse) -> ApiError:
        body = await response.content.read(64 * 1024)
        try:
            message = msgspec.json.decode(body, type=ApiStatus).message
        except msgspec.MsgspecError:
            message = body[:200].decode("utf-8", "replace").strip()
        what = f"the Kubernetes API answered {response.status} ({_join_lines(message) or response.reason})"
        hint = ""
        after = response.headers.get("Retry-After", "")
        retry_after_s = float(after) if after.isascii() and after.isdigit() else 0.0
        if response.status == 401:
            session = self._session
            if (
                session is not None
                and asyncio.get_running_loop().time() - session.made_at >= _REREAD_INTERVAL_S
            ):
                # The credentials may have been rotated: the next request reads them again. Not at once, so
                # that refused credentials do not run an exec plugin for each request.
                self._session = None
            hint = f"the credentials of {self._access}: they are expired, or not yet valid"
        elif response.status == 400:
            hint = f"{self._access}: the server's address, http or https"
        elif response.status == 429:
            what = f"the Kubernetes API server asks to wait{f' {retry_after_s:g} s' if retry_after_s else ''}"
            hint = "its API Priority and Fairness: apiserver_flowcontrol_rejected_requests_total"
        return ApiError(what, hint, status=response.status, retry_after_s=retry_after_s)


class ApiStatus(msgspec.Struct):
    """Status object, with which the API describes an error."""

    message: str = ""
    reason: str = ""
    code: int | None = None


@dataclass(slots=True, eq=False)
class _SharedSession:
    client: Any
    made_at: float
    users: int = 0


class _CredentialFiles:
    """States of files at one time, for detecting changes.

    The files are not read, because the check runs every second.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._states = self._read_states()

    def have_changed(self) -> bool:
        return self._read_states() != self._states

    def _read_states(self) -> list[tuple[int, int, int] | None]:
        return [file_fingerprint(path) for path in self._paths]


class _NamedFiles(msgspec.Struct):
    """The fields of a cluster or a user in a kubeconfig that name files."""

    authority: str = msgspec.field(default="", name="certificate-authority")
    token: str = msgspec.field(default="", name="tokenFile")
    certificate: str = msgspec.field(default="", name="client-certificate")
    key: str = msgspec.field(default="", name="client-key")


class _KubeconfigEntry(msgspec.Struct):
    cluster: _NamedFiles = msgspec.field(default_factory=_NamedFiles)
    user: _NamedFiles = msgspec.field(default_factory=_NamedFiles)


class _Kubeconfig(msgspec.Struct):
    clusters: list[_KubeconfigEntry] | None = None
    users: list[_KubeconfigEntry] | None = None


def _list_credential_files(access: ClusterAccess) -> tuple[Path, ...]:
    """Return the files that have the credentials, including those that a kubeconfig names."""
    if access.is_in_cluster:
        return (access.service_account / "token", access.service_account / "ca.crt")
    configs = access.kubeconfigs
    return (*configs, *(each for config in configs for each in _list_named_files(config)))


def _list_named_files(kubeconfig: Path) -> list[Path]:
    """Return the files that a kubeconfig names. If it cannot be read, the client reports the error later."""
    try:
        kubeconfig_content = msgspec.yaml.decode(kubeconfig.read_bytes(), type=_Kubeconfig)
    except (OSError, ValueError):
        return []
    entries = [
        each
        for entry in (*(kubeconfig_content.clusters or ()), *(kubeconfig_content.users or ()))
        for each in (entry.cluster, entry.user)
    ]
    named = [name for each in entries for name in (each.authority, each.token, each.certificate, each.key)]
    return [kubeconfig.parent / name for name in named if name]


async def _send_request(
    client: Any, path: str, query: Sequence[tuple[str, str]], total_s: float
) -> aiohttp.ClientResponse:
    async with asyncio.timeout(_RESPONSE_START_S):
        try:
            method, url, headers, _, _ = await client.param_serialize(
                "GET",
                path,
                query_params=list(query),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
            )
        except Exception as error:  # the library reads the token file again from time to time
            raise ApiError(f"the token cannot be read: {describe_error(error)}") from error
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=5.0)
        answer = await client.call_api(method, url, headers, _request_timeout=timeout)
    response: aiohttp.ClientResponse = answer.response
    return response


def _join_lines(text: str) -> str:
    return " ".join(text.split())
