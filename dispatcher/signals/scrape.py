"""Scrape the metrics pages of all replicas, which are found by URL, by DNS name or by the Kubernetes watch.

The caller interprets the series (`parse` of `Scraper.scrape_replicas`). If one replica does not answer, its
part of the load is unknown, and the whole scrape fails until the replica answers or leaves the list.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from dispatcher.common.network_errors import describe_error
from dispatcher.limit.budget import Reason
from dispatcher.limit.poll import ReadFailure
from dispatcher.settings.watched_files import TokenFileError, TokenReader
from dispatcher.signals.blocking_call import BlockingCalls, StillRunningError
from dispatcher.signals.exposition import MalformedPageError, OptionalSeries, PageParser

SLICE_BYTES = 64 * 1024
"""Number of bytes that are parsed before other tasks run."""
PAGE_MAX_BYTES = 32 * 1024 * 1024
_ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Targets:
    """Replicas to scrape. The first one that is set counts: urls, service, addresses of the watch."""

    urls: tuple[str, ...] = ()
    """URLs, one per replica. A URL without a path gets the path /metrics."""
    service: str = ""
    """DNS name of a headless Service. Every address behind the name is a replica."""
    namespace: str = "default"
    port: int = 9090
    is_secure: bool = False
    """True to use https for addresses that were found by name or by the watch."""


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    url: str
    label: str
    """Host and port for messages, without the parts of a URL that may be secret."""
    server_name: str = ""
    """Name in the certificate, if the URL has an IP address."""


@dataclass(frozen=True, slots=True)
class SeriesSelection:
    """Series to read from the pages."""

    names: Set[str]
    optional: tuple[OptionalSeries, ...] = ()
    """Groups of optional series, which are kept apart."""


class Scraper:
    """Scrapes the page of every replica. Only one scrape may run at a time.

    `setting` is the key of the settings that have the targets, such as `signals.epp`. `target_kind` describes
    the targets in messages. `refusal_hints` are the hints for a page that is refused with a token, and for
    one that is refused without a token.
    """

    def __init__(
        self,
        setting: str,
        target_kind: str,
        targets: Targets,
        *,
        timeout_s: float,
        token_file: str = "",
        refusal_hints: tuple[str, str],
        tls: ssl.SSLContext | None = None,
        page_max_bytes: int = PAGE_MAX_BYTES,
    ) -> None:
        self._setting, self._target_kind = setting, target_kind
        self._targets = targets
        self._timeout_s = timeout_s
        self._token_file, self._refusal_hints = token_file, refusal_hints
        self._tokens = TokenReader()
        secure = targets.is_secure or any(url.startswith("https:") for url in targets.urls)
        # Created here and not for the first page, because reading the system's certificates takes a while.
        self._tls = tls or _tls_context(secure)
        self._page_max_bytes = page_max_bytes
        self.replica_addresses: tuple[str, ...] | None = None
        """Addresses of the replicas from the Kubernetes watch, with or without a port."""
        self._resolver = BlockingCalls(f"{setting}-dns")
        self._client: httpx.AsyncClient | None = None

    async def scrape_replicas(
        self,
        selection: SeriesSelection,
        parse: Callable[[ScrapeTarget, PageParser, float, float], T | ReadFailure],
    ) -> list[T] | ReadFailure:
        """Scrape all replicas and return the results of `parse`, one per replica.

        `parse` gets the target, its page, and the times at which the request was sent and the page was
        complete. A network error is an Unread, never an exception.
        """
        token = await self._read_token()
        if isinstance(token, ReadFailure):
            return token
        targets = await self._resolve_targets()
        if isinstance(targets, ReadFailure):
            return targets
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._scrape_target(target, token, selection, parse)) for target in targets
            ]
        answers: list[T] = []
        for task in tasks:
            answer = task.result()
            if isinstance(answer, ReadFailure):
                return answer
            answers.append(answer)
        return answers

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _read_token(self) -> str | ReadFailure:
        """Read the bearer token. It is read for each scrape, because Kubernetes replaces projected tokens."""
        if not self._token_file:
            return ""
        try:
            return await self._tokens.read_token(self._token_file)
        except TokenFileError as error:
            return ReadFailure(Reason.UNREADABLE, f"the token file {error}", f"{self._setting}.token_file")

    async def _resolve_targets(self) -> Sequence[ScrapeTarget] | ReadFailure:
        if self._targets.urls:
            try:
                return [_parse_target_url(url) for url in self._targets.urls]
            except httpx.InvalidURL as error:
                return ReadFailure(Reason.UNREADABLE, f"not a URL: {error}", f"{self._setting}.urls")
        if self._targets.service:
            return await self._resolve_service()
        if self.replica_addresses is None:
            return ReadFailure(
                Reason.UNREADABLE,
                f"no {self._target_kind} is known",
                f"{self._setting}.urls or {self._setting}.service; or run where the Kubernetes watch works",
            )
        if not self.replica_addresses:
            return ReadFailure(
                Reason.UNREADABLE, f"the Kubernetes watch sees no ready pod of the {self._target_kind}"
            )
        return [self._build_target(address) for address in self.replica_addresses]

    async def _resolve_service(self) -> Sequence[ScrapeTarget] | ReadFailure:
        service, port = self._targets.service, self._targets.port
        # A short name means a Service in the pool's namespace, which may differ from that of this process.
        names = [service] if "." in service else [f"{service}.{self._targets.namespace}", service]

        def look_up() -> tuple[str, list[str]] | str:
            failure = ""
            for name in names:
                try:
                    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
                except OSError as error:  # includes socket.gaierror
                    failure = failure or describe_error(error)
                else:
                    # `localhost` and dual-stack names have two addresses for one replica, which must not be
                    # scraped twice. So only the addresses of one family are used.
                    families = [entry[0] for entry in found]
                    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
                    return name, sorted({str(entry[4][0]) for entry in found if entry[0] == family})
            return failure

        try:
            answer = await self._resolver.run(look_up, self._timeout_s)
        except (TimeoutError, StillRunningError):
            answer = f"no answer within {self._timeout_s:g} s"
        if isinstance(answer, str):
            return ReadFailure(
                Reason.UNREADABLE,
                f"the service {service} cannot be resolved: {answer}",
                f"{self._setting}.service",
            )
        name, addresses = answer
        return [self._build_target(address, server_name=name) for address in addresses]

    def _build_target(self, address: str, server_name: str = "") -> ScrapeTarget:
        scheme = "https" if self._targets.is_secure else "http"
        if address.startswith("[") or address.count(":") == 1:
            host = address
        else:
            host = f"[{address}]" if ":" in address else address
        if host.endswith("]") or ":" not in host:
            host = f"{host}:{self._targets.port}"
        return ScrapeTarget(
            f"{scheme}://{host}/metrics", host, server_name if self._targets.is_secure else ""
        )

    async def _scrape_target(
        self,
        target: ScrapeTarget,
        token: str,
        selection: SeriesSelection,
        parse: Callable[[ScrapeTarget, PageParser, float, float], T | ReadFailure],
    ) -> T | ReadFailure:
        loop = asyncio.get_running_loop()
        opened_at = loop.time()
        try:
            # The time limit is for the whole page. That of the client only bounds the wait for each piece.
            async with asyncio.timeout(self._timeout_s):
                page = await self._fetch_page(target, token, selection)
        except TimeoutError:
            why, hint = f"no whole answer within {self._timeout_s:g} s", "signals.interval_s allows more time"
            return make_unread(target, why, hint)
        except MalformedPageError as error:
            return make_unread(target, f"the page is malformed: {error}")
        except (httpx.HTTPError, httpx.InvalidURL, aiohttp.ClientError, OSError, ValueError) as error:
            return make_unread(
                target,
                describe_error(error),
                f"{self._setting}: the address, or the network on the way there",
            )
        return page if isinstance(page, ReadFailure) else parse(target, page, opened_at, loop.time())

    async def _fetch_page(
        self, target: ScrapeTarget, token: str, selection: SeriesSelection
    ) -> PageParser | ReadFailure:
        if self._client is None:
            transport = AiohttpTransport(verify=self._tls, trust_env=False)
            self._client = httpx.AsyncClient(
                transport=transport, timeout=self._timeout_s, trust_env=False, follow_redirects=False
            )
        headers = {"Accept": _ACCEPT, "Accept-Encoding": "gzip"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        extensions = {"sni_hostname": target.server_name} if target.server_name else {}
        async with self._client.stream("GET", target.url, headers=headers, extensions=extensions) as response:
            if response.status_code != httpx.codes.OK:
                return self._explain_status(target, response.status_code, bool(token))
            coding = response.headers.get("content-encoding", "identity").strip().lower()
            if coding not in ("identity", "gzip"):
                return make_unread(target, f"the page comes in a coding we did not ask for: {coding}")
            kind = response.headers.get("content-type", "")
            page = PageParser(
                selection.names,
                open_metrics=kind.startswith("application/openmetrics-text"),
                optional=selection.optional,
            )
            async with contextlib.aclosing(
                _decode_body(response.aiter_raw(), gzip=coding == "gzip")
            ) as pieces:
                async for piece in pieces:
                    page.feed(piece)
                    if page.size_bytes > self._page_max_bytes:
                        return make_unread(target, f"the page is larger than {self._page_max_bytes} bytes")
                    # Data that has arrived already is returned without a switch to other tasks.
                    await asyncio.sleep(0)
            page.close()
            return page

    def _explain_status(self, target: ScrapeTarget, status: int, with_token: bool) -> ReadFailure:
        urls = f"{self._setting}.urls"
        if status in (401, 403):
            return make_unread(target, f"HTTP {status}", self._refusal_hints[not with_token])
        if 300 <= status < 400:
            return make_unread(target, f"HTTP {status}: a redirect, which is not followed", urls)
        hints = {400: f"{urls}: http or https", 404: f"{urls}: the path is wrong"}
        return make_unread(target, f"HTTP {status}", hints.get(status, ""))


async def _decode_body(body: AsyncIterator[bytes], *, gzip: bool) -> AsyncGenerator[bytes, None]:
    """Yield the decoded body in pieces of at most SLICE_BYTES.

    A small compressed page can contain a very large one, so the size must be checked while it is decoded.
    """
    if not gzip:
        async for chunk in body:
            for piece in _split_chunk(chunk):
                yield piece
        return
    decoder = zlib.decompressobj(wbits=31)
    try:
        async for chunk in body:
            if decoder.eof:
                raise MalformedPageError("something follows the end of the compressed page")
            while chunk:
                yield decoder.decompress(chunk, SLICE_BYTES)
                chunk = decoder.unconsumed_tail
    except zlib.error as error:
        raise MalformedPageError(f"broken gzip ({error})") from None
    # The decoder may have output left if the last input filled a slice exactly.
    while piece := decoder.decompress(b"", SLICE_BYTES):
        yield piece
    if not decoder.eof:
        raise MalformedPageError("the compressed page ends too early")


def _split_chunk(chunk: bytes) -> Iterator[bytes]:
    if len(chunk) <= SLICE_BYTES:
        yield chunk
        return
    for at in range(0, len(chunk), SLICE_BYTES):
        yield chunk[at : at + SLICE_BYTES]


def _tls_context(secure: bool) -> ssl.SSLContext:
    if not secure:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the transport requires one, and does not use it
    return httpx.create_ssl_context(trust_env=False)


def _parse_target_url(url: str) -> ScrapeTarget:
    parsed = httpx.URL(url)
    if parsed.path in ("", "/"):
        parsed = parsed.copy_with(path="/metrics")
    return ScrapeTarget(str(parsed), parsed.netloc.decode("ascii", "replace"))


def make_unread(target: ScrapeTarget, why: str, hint: str = "") -> ReadFailure:
    return ReadFailure(Reason.UNREADABLE, f"{target.label}: {why}", hint)
