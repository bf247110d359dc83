"""Watch which models the pool serves. Every endpoint is asked at an interval, in rounds.

    serving.urls, else signals.vllm.urls,
    else the pool's ready endpoints from the Kubernetes watch ──▶ each of them is asked
    no endpoint is known, or serving.observe is gateway       ──▶ the gateway is asked, for all

A round also has the names that the cluster's InferenceModelRewrites turn into a listed model. An endpoint
that cannot be read is in the round with the reason. An endpoint that has left the list is not in the next
round. `features.models.availability` decides what both mean for the models.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from dispatcher.features.models.availability import GATEWAY, Listing
from dispatcher.features.models.listing import ListClient, ListTarget
from dispatcher.features.models.settings import (
    LIST_PATH,
    ServingSettings,
    find_serving,
    get_models,
    is_observing_models,
)
from dispatcher.features.models.versions import FamilyIndex, FamilyTerms
from dispatcher.gateway.direct import ServerAccess
from dispatcher.settings.model import GatewaySettings, Settings
from dispatcher.settings.small_files import BackgroundRead
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import SecretUrl
from dispatcher.settings.watched_files import TokenFileError, TokenReader, file_fingerprint
from dispatcher.signals.kubernetes.capacity import Endpoints
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from dispatcher.signals.kubernetes.rewrites import RewriteWatch

if TYPE_CHECKING:
    from dispatcher.kernel.hooks import KnownEndpoints

MAX_CONCURRENT = 16
"""Largest number of endpoints that are asked at the same time."""
MAX_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_SHARE = 5.0, 1.0, 0.9
"""Bounds of the time limit for one endpoint, and the share of the interval that it is between them."""
DISCOVERY_WAIT_S = 10.0
"""Time for the Kubernetes watch to find the endpoints, before the gateway is asked in their place."""
ROUND_GAP_S = 0.5
"""Shortest time between two rounds, however often the endpoints change."""
_MATCHED_WITHOUT_PAUSE = 256
"""Number of new names that are matched before other tasks may run. It takes 4 ms."""
_NOT_ASKED = "no model server was asked for its models yet"
_BY_GATEWAY = "the gateway is asked for all models, so no model server is known"


_KnownServers = Mapping[str, ServerAccess | str] | str
"""Access to the model servers by the name of the endpoint, or the reason why a server, or all of them, cannot
be accessed."""


@dataclass(frozen=True, slots=True)
class _Round:
    listings: tuple[Listing, ...]
    servers: _KnownServers


class ModelWatch:
    """Asks the endpoints for their models, and calls `on_round` in the event loop with each complete round.

    A round has one listing for each endpoint, in a fixed order. It is empty if no endpoint is ready. A round
    begins every `serving.interval_s`, and at once when the endpoints or the settings change. A round that
    began under previous settings is dropped.
    """

    def __init__(
        self,
        settings: Settings,
        on_round: Callable[[Sequence[Listing]], None],
        *,
        access: ClusterAccess,
        discovery_wait_s: float = DISCOVERY_WAIT_S,
    ) -> None:
        self._settings, self._serving = settings, find_serving(settings)
        self._discovery_wait_s = discovery_wait_s
        self._on_round = on_round
        self._access = access
        self._rewrites = RewriteWatch(settings.pool, self._request_round, access=access)
        self._endpoints: KnownEndpoints = Endpoints()
        self._tokens = TokenReader()
        self._changed = asyncio.Event()
        self._generation = 0
        self._client: ListClient | None = None
        self._client_inputs: object = None
        """Settings and states of the files from which the client was made."""
        self._tls: ssl.SSLContext | None = None
        self._known_servers: _KnownServers = _NOT_ASKED
        self._matched_names: Set[str] = frozenset()
        """Names in the previous round."""

    def update_endpoints(self, endpoints: KnownEndpoints) -> None:
        """Take the endpoints that the Kubernetes watch knows now. A change starts a new round."""
        before, self._endpoints = self._endpoints, endpoints
        if _extract_discovery(before) != _extract_discovery(endpoints):
            self._request_round()

    def reconfigure(self, settings: Settings, access: ClusterAccess) -> None:
        """Use these settings from now on. They may end the observation.

        If `access` has changed, the rewrites are watched anew.
        """
        before, self._settings, self._serving = self._settings, settings, find_serving(settings)
        elsewhere, self._access = access != self._access, access
        if elsewhere:
            self._rewrites = RewriteWatch(settings.pool, self._request_round, access=access)
        if elsewhere or _extract_round_settings(before) != _extract_round_settings(settings):
            self._generation += 1  # drops the round that runs now
            self._known_servers = _NOT_ASKED
            self._request_round()

    @property
    def max_answer_bytes(self) -> int:
        """Largest size of an answer of a server to other requests, in bytes."""
        return self._settings.gateway.max_response_bytes

    def find_server(self, endpoint: str) -> ServerAccess | str:
        """Return the access to an endpoint of the newest round, or a sentence that says why there is none."""
        if isinstance(self._known_servers, str):
            return self._known_servers
        return self._known_servers.get(endpoint, "no model server of that name is known")

    async def ask_once(self) -> Sequence[Listing]:
        """Ask each endpoint once and return the listings. Rewritten names are missing, because only `run`
        watches the rewrites."""
        try:
            return (await self._ask_all()).listings
        finally:
            await self._close_client()

    async def run(self) -> None:
        """Run rounds until cancelled. While the settings do not observe models, nothing is asked."""
        try:
            while True:
                while not is_observing_models(self._settings):
                    self._changed.clear()
                    await self._changed.wait()
                async with asyncio.TaskGroup() as tasks:
                    rewrites = self._rewrites
                    beside = tasks.create_task(rewrites.run(), name="watch of rewrites")
                    await self._run_rounds(rewrites)
                    beside.cancel()
                await self._close_client()
        finally:
            await self._close_client()

    async def _run_rounds(self, rewrites: RewriteWatch) -> None:
        """Run rounds while the settings observe models, and until there is another watch of rewrites."""
        loop = asyncio.get_running_loop()
        waits_until = loop.time() + self._discovery_wait_s
        while is_observing_models(self._settings) and self._rewrites is rewrites:
            self._changed.clear()
            if self._is_discovery_pending and loop.time() < waits_until:
                await self._wait_for_change(waits_until)
                continue
            began_at, generation = loop.time(), self._generation
            finished_round = await self._ask_all()
            if generation == self._generation:
                self._known_servers = finished_round.servers
                self._on_round(finished_round.listings)
            # The event of a change is not awaited here, so that endpoints that change all the time do not
            # start a round each.
            await asyncio.sleep(began_at + min(ROUND_GAP_S, self._serving.interval_s) - loop.time())
            # The intervals vary, so that replicas that were started together do not ask at the same time.
            await self._wait_for_change(began_at + self._serving.interval_s * random.uniform(0.9, 1.1))
        self._known_servers = _NOT_ASKED

    def _request_round(self) -> None:
        self._changed.set()

    @property
    def _is_discovery_pending(self) -> bool:
        """True if the endpoints or the rewrites are still unknown, and Kubernetes may still report them."""
        serving, found = self._serving, self._endpoints
        asks = serving.observe in ("auto", "endpoints") and not serving.urls
        unknown = asks and found.addresses is None and found.has_cluster and not found.is_complete
        return unknown or not self._rewrites.is_settled

    async def _wait_for_change(self, until: float) -> None:
        """Wait until the given time, or until the endpoints or the settings change."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()

    async def _ask_all(self) -> _Round:
        settings = self._settings
        now = asyncio.get_running_loop().time()
        asks_gateway = self._asks_gateway()
        try:
            targets = (
                (await self._load_gateway_target(),) if asks_gateway else await self._list_server_targets()
            )
        except TokenFileError as error:
            setting = "gateway.token_file" if asks_gateway else self._token_setting
            return self._build_failed_round(now, f"{setting}: {error}")
        if targets is None:
            where = "serving.urls, or run where the Kubernetes watch works"
            problem = f"no model server is known: {where}"
            return _Round((Listing("endpoints", now, None, problem=problem),), problem)
        try:
            client = await self._prepare_client(
                settings.gateway.tls if asks_gateway else self._serving.tls, targets
            )
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            return self._build_failed_round(now, f"{'gateway' if asks_gateway else 'serving'}.tls: {error}")
        configured_names = frozenset(model.name for model in get_models(settings))
        # No server lists a name that is rewritten, so it must not cause a look at the metrics page.
        listable = configured_names - self._rewrites.aliases.exact.keys()
        places = asyncio.Semaphore(MAX_CONCURRENT)

        async def ask_target(target: ListTarget) -> Listing:
            async with places:
                found = await client.fetch_listing(target, listable)
            if found.models is None:
                # An unreachable gateway does not mean that the servers behind it are down.
                return replace(found, is_down=found.is_down and not asks_gateway)
            return replace(found, models=self._rewrites.aliases.add_aliases(found.models, configured_names))

        async with asyncio.TaskGroup() as tasks:
            ask_tasks = [tasks.create_task(ask_target(target)) for target in targets]
        await self._match_new_names(task.result() for task in ask_tasks)
        tls = self._tls
        known: _KnownServers = {target.endpoint: _build_access(target, tls) for target in targets}
        return _Round(tuple(task.result() for task in ask_tasks), _BY_GATEWAY if asks_gateway else known)

    async def _match_new_names(self, listings: Iterable[Listing]) -> None:
        """Match new names against the templates of the settings, a few at a time.

        A server may list 10,000 new names in each round, and the callbacks of the round would match them all
        without a pause for other tasks.
        """
        names = dict.fromkeys(name for each in listings for name in each.models or ())
        before, self._matched_names = self._matched_names, names.keys()
        models = get_models(self._settings)
        families = [FamilyTerms(each.name, each.version_template) for each in models if each.is_family]
        if not families:
            return
        membership = FamilyIndex(families)
        for at, name in enumerate(names.keys() - before):
            membership.find_families(name)  # `features.models.versions` caches the result for the callbacks
            if at % _MATCHED_WITHOUT_PAUSE == _MATCHED_WITHOUT_PAUSE - 1:
                await asyncio.sleep(0)

    # Targets.

    def _asks_gateway(self) -> bool:
        serving = self._serving
        nowhere = not serving.urls and self._endpoints.addresses is None
        return serving.observe == "gateway" or (serving.observe == "auto" and nowhere)

    async def _list_server_targets(self) -> tuple[ListTarget, ...] | None:
        """Return the model servers as targets. `None` if none is known. Raises TokenFileError."""
        serving = self._serving
        if not serving.urls and self._endpoints.addresses is None:
            return None
        token = f"Bearer {await self._tokens.read_token(serving.token_file)}" if serving.token_file else ""
        if serving.urls:
            return tuple(_build_server_target(url, token, self._token_setting) for url in serving.urls)
        scheme = "https" if serving.tls != TlsSettings() else "http"
        found = [SecretUrl(f"{scheme}://{address}") for address in self._endpoints.addresses or ()]
        return tuple(_build_server_target(url, token, self._token_setting) for url in found)

    async def _load_gateway_target(self) -> ListTarget:
        """Return the gateway as a target. Raises TokenFileError."""
        gateway = self._settings.gateway
        token = await self._tokens.read_token(gateway.token_file) if gateway.token_file else ""
        return _build_gateway_target(gateway, token)

    @property
    def _token_setting(self) -> str:
        """Key of the setting that has the token file of the servers."""
        taken = self._serving.token_file and not self._settings.get_section(ServingSettings).token_file
        return "signals.vllm.token_file" if taken else "serving.token_file"

    def _build_failed_round(self, now: float, problem: str) -> _Round:
        """Return a round in which no endpoint could be asked."""
        if self._asks_gateway():
            names = [GATEWAY]
        elif urls := self._serving.urls:
            names = [_format_label(url) for url in urls]
        else:
            names = list(self._endpoints.addresses or ())
        return _Round(tuple(Listing(name, now, None, problem=problem) for name in names), problem)

    # Client.

    async def _prepare_client(self, tls: TlsSettings, targets: Sequence[ListTarget]) -> ListClient:
        """Return the client for these settings. It is made again if the settings or their files have changed.

        Raises OSError.
        """
        secure = any(target.url.startswith("https:") for target in targets)
        files = [tls.ca_file, tls.cert_file, tls.key_file] if secure else []
        made_of = (tls, secure, self._timeout_s, [file_fingerprint(path) for path in files if path])
        if self._client is None or made_of != self._client_inputs:
            await self._close_client()
            # Read in a thread, because reading the system's certificates would block the event loop.
            self._tls = await BackgroundRead(tls.build_context)() if secure else None
            self._client, self._client_inputs = (
                ListClient(self._tls or True, timeout_s=self._timeout_s),
                made_of,
            )
        self._client.forget_pages(target.metrics_url for target in targets)
        return self._client

    @property
    def _timeout_s(self) -> float:
        return max(MIN_TIMEOUT_S, min(MAX_TIMEOUT_S, TIMEOUT_SHARE * self._serving.interval_s))

    async def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def _extract_discovery(endpoints: KnownEndpoints) -> tuple[object, ...]:
    """Return the parts of the Kubernetes watch's state that decide which endpoints are asked."""
    return endpoints.addresses, endpoints.has_cluster, endpoints.is_complete


def _extract_round_settings(settings: Settings) -> tuple[object, ...]:
    """Return the settings that decide what a round asks and returns."""
    gateway = settings.gateway
    to_gateway = gateway.url, gateway.headers, gateway.token_file, gateway.tls
    return find_serving(settings), get_models(settings), to_gateway


def _build_server_target(url: SecretUrl, token: str, setting: str) -> ListTarget:
    parts = urlsplit(url.without_credentials)
    path = LIST_PATH if parts.path in ("", "/") else parts.path
    page = f"{path.removesuffix(LIST_PATH)}/metrics" if path.endswith(LIST_PATH) else ""
    authorization = token or url.authorization_header
    return ListTarget(
        _format_label(url),
        urlunsplit(parts._replace(path=path)),
        {"Authorization": authorization} if authorization else {},
        metrics_url=urlunsplit((parts.scheme, parts.netloc, page, "", "")) if page else "",
        token_setting=setting,
        has_token=bool(authorization),
    )


def _build_access(target: ListTarget, tls: ssl.SSLContext | None) -> ServerAccess | str:
    url = target.url.rstrip("/")
    base = url.removesuffix(LIST_PATH)
    if base == url:
        return f"its list of models is not at {LIST_PATH}, so it is not known where it takes requests"
    return ServerAccess(base, target.headers, tls)


def _format_label(url: SecretUrl) -> str:
    """Return host and port, and the part of the path that distinguishes servers of the same address."""
    parts = urlsplit(url.without_credentials)
    return parts.netloc + parts.path.rstrip("/").removesuffix(LIST_PATH)


def _build_gateway_target(gateway: GatewaySettings, token: str) -> ListTarget:
    """Return the gateway as a target, with the headers that all requests to it have in common."""
    headers = dict(gateway.headers)
    if token:
        headers["Authorization"] = f"Bearer {token}"
    elif basic := gateway.url.authorization_header:
        headers.setdefault("Authorization", basic)
    return ListTarget(
        GATEWAY,
        gateway.url.without_credentials.rstrip("/") + LIST_PATH,
        headers,
        token_setting="gateway.token_file",  # noqa: S106 -- the name of a setting
        has_token=any(name.lower() == "authorization" for name in headers),
    )
