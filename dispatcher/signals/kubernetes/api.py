"""The way to the Kubernetes API: credentials, requests, and every failure in one form.

The client is `kubernetes.aio`, used at the level of requests. Its models and its Watch are left out: a model
of each pod costs a hundred times what is kept of it, and the Watch hides when it lost its place.
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
from dispatcher.ports.network_errors import addressed, words
from dispatcher.settings.watched_files import looks
from dispatcher.signals.kubernetes.cluster import ClusterAccess

_HEAD_S = 10.0
"""An answer must begin within this; a watch's head comes at once, too."""
_LOOK_S = 1.0
"""So often a pause looks whether the credentials have changed."""
_AGAIN_S = 10.0
"""Credentials that are refused are read again so often: a plugin may have new ones, files tell themselves."""
_CLIENT, _CONFIG = "kubernetes.aio.client", "kubernetes.aio.config"
_IN_CLUSTER = "kubernetes.aio.config.incluster_config"


def prepare() -> None:
    """Import what speaks to the API: about a second, for who would rather not spend it in an event loop."""
    for name in (_CLIENT, _CONFIG, _IN_CLUSTER):
        importlib.import_module(name)


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """What is wrong, in one sentence, and what to look at."""

    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what} (look at: {self.hint})" if self.hint else self.what


class ApiError(Exception):
    """The API did not answer, or not with what was asked for."""

    def __init__(
        self, what: str, hint: str = "", *, status: int | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(what)
        self.problem = ClusterProblem(what, hint)
        self.status = status
        """None: no HTTP answer at all, or none that can be read."""
        self.retry_after_s = retry_after_s

    @property
    def standing(self) -> bool:
        """Only a change of configuration or of rights mends it."""
        return self.status in (401, 403, 404)

    @property
    def throttled(self) -> bool:
        """The API server is there, and asks to wait."""
        return self.status == 429

    @property
    def slow(self) -> bool:
        """It took its whole time: no cut that the next try mends."""
        return isinstance(self.__cause__, TimeoutError)

    @property
    def garbled(self) -> bool:
        """It came, and cannot be read."""
        return isinstance(self.__cause__, ValueError)


class Api:
    """The API server. Every failure comes out as an ApiError."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._session: _SharedSession | None = None
        self._read_from = _Files(())
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.client.close()

    @contextlib.asynccontextmanager
    async def get(
        self, path: str, query: Sequence[tuple[str, str]], total_s: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of a 200, to be read inside the block. `total_s`: until the block must be done."""
        hint = str(self._access)
        try:
            async with self._connected() as client, await _request(client, path, query, total_s) as response:
                if response.status != 200:
                    raise await self._failure(response)
                kind = response.headers.get("Content-Type", "nothing")
                if not kind.startswith("application/json"):
                    raise ApiError(f"what answers for the Kubernetes API sends {kind}, no JSON", hint)
                yield response.content
        except TimeoutError as error:
            raise ApiError("the Kubernetes API did not answer in time", hint) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(f"the Kubernetes API cannot be reached: {addressed(error)}", hint) from error
        except ValueError as error:  # a line longer than the buffer, or not the JSON that it should be
            raise ApiError(f"the Kubernetes API's answer cannot be read: {words(error)}", hint) from error

    async def pause(self, seconds: float, wake: asyncio.Event) -> None:
        """Wait, until `wake` is set or the files with the credentials change at the longest."""
        loop = asyncio.get_running_loop()
        until, read_from = loop.time() + seconds, self._read_from
        while (left_s := until - loop.time()) > 0 and not wake.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), min(left_s, _LOOK_S))
            if read_from.changed():
                return

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """A client with the credentials of now, that the server has not refused so far."""
        async with self._connecting:
            session = self._session
            if session is not None and self._read_from.changed():
                # A new token would be read by and by, a new authority or address never.
                self._session = None
                if session.users == 0:
                    await session.client.close()
            if self._session is None:
                made = await self._connect()
                self._session = _SharedSession(made, asyncio.get_running_loop().time())
        session = self._session
        session.users += 1
        try:
            yield session.client
        finally:
            session.users -= 1
            # The watches that began with the old credentials go on with them to their end.
            if session is not self._session and session.users == 0:
                await session.client.close()

    async def _connect(self) -> Any:
        """Read the credentials: at first, and again when they change or the server refuses those we have."""
        self._read_from = _Files(_read_by(self._access))
        if self._access.missing:
            what = f"{self._access} cannot be used: no such file"
            raise ApiError(what, "the environment variable KUBECONFIG, which names it")
        if not {_CLIENT, _CONFIG, _IN_CLUSTER} <= sys.modules.keys():
            await asyncio.to_thread(prepare)  # not in the event loop's time
        client = importlib.import_module(_CLIENT)
        configuration = client.Configuration()
        try:
            if self._access.in_cluster:
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
        except Exception as error:  # whatever a file, a plugin or a certificate makes of it
            raise ApiError(f"{self._access} cannot be used: {words(error)}") from error
        made.user_agent = USER_AGENT
        return made

    async def _failure(self, response: aiohttp.ClientResponse) -> ApiError:
        body = await response.content.read(64 * 1024)
        try:
            message = msgspec.json.decode(body, type=ApiStatus).message
        except msgspec.MsgspecError:
            message = body[:200].decode("utf-8", "replace").strip()
        what = f"the Kubernetes API answered {response.status} ({_line(message) or response.reason})"
        hint = ""
        after = response.headers.get("Retry-After", "")
        retry_after_s = float(after) if after.isascii() and after.isdigit() else 0.0
        if response.status == 401:
            session = self._session
            if session is not None and asyncio.get_running_loop().time() - session.made_at >= _AGAIN_S:
                self._session = None  # rotated or expired: the next request reads the credentials again
            hint = f"the credentials of {self._access}: they are expired, or not yet valid"
        elif response.status == 400:
            hint = f"{self._access}: the server's address, http or https"
        elif response.status == 429:
            what = f"the Kubernetes API server asks to wait{f' {retry_after_s:g} s' if retry_after_s else ''}"
            hint = "its API Priority and Fairness: apiserver_flowcontrol_rejected_requests_total"
        return ApiError(what, hint, status=response.status, retry_after_s=retry_after_s)


class ApiStatus(msgspec.Struct):
    """The object by which the API says that it will not."""

    message: str = ""
    reason: str = ""
    code: int | None = None


@dataclass(slots=True, eq=False)
class _SharedSession:
    client: Any
    made_at: float
    users: int = 0


class _Files:
    """Files as they were when this was made. Looked at, not read: it is done each second."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._were = self._are()

    def changed(self) -> bool:
        return self._are() != self._were

    def _are(self) -> list[tuple[int, int, int] | None]:
        return [looks(path) for path in self._paths]


class _NamedFiles(msgspec.Struct):
    """What a cluster or a user of a kubeconfig names files by."""

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


def _read_by(access: ClusterAccess) -> tuple[Path, ...]:
    """The files that the credentials are read from, those that a kubeconfig names included."""
    if access.in_cluster:
        return (access.service_account / "token", access.service_account / "ca.crt")
    configs = access.kubeconfigs
    return (*configs, *(each for config in configs for each in _named_in(config)))


def _named_in(kubeconfig: Path) -> list[Path]:
    """The files that a kubeconfig names. Where it cannot be read, the client says so."""
    try:
        read = msgspec.yaml.decode(kubeconfig.read_bytes(), type=_Kubeconfig)
    except (OSError, ValueError):
        return []
    entries = [
        each
        for entry in (*(read.clusters or ()), *(read.users or ()))
        for each in (entry.cluster, entry.user)
    ]
    named = [name for each in entries for name in (each.authority, each.token, each.certificate, each.key)]
    return [kubeconfig.parent / name for name in named if name]


async def _request(
    client: Any, path: str, query: Sequence[tuple[str, str]], total_s: float
) -> aiohttp.ClientResponse:
    async with asyncio.timeout(_HEAD_S):
        try:
            method, url, headers, _, _ = await client.param_serialize(
                "GET",
                path,
                query_params=list(query),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
            )
        except Exception as error:  # it reads the token's file now and then
            raise ApiError(f"the token cannot be read: {words(error)}") from error
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=5.0)
        answer = await client.call_api(method, url, headers, _request_timeout=timeout)
    response: aiohttp.ClientResponse = answer.response
    return response


def _line(text: str) -> str:
    return " ".join(text.split())
