"""Ask one endpoint which models it lists, and if necessary which adapters it is loading.

    GET /v1/models ──▶ OpenAI's list of models, from vLLM, SGLang, TensorRT-LLM, TGI and gateways
    GET /metrics   ──▶ only from vLLM: the adapters that requests wait for

The list decides which models are served. The metrics page is a hundred times longer than the list. It is only
read while the list of a vLLM lacks a model that the settings name, and only once a minute if the page shows
no adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
import msgspec

from dispatcher import USER_AGENT
from dispatcher.common.network_errors import describe_error, is_connection_refused
from dispatcher.features.models.availability import Listing
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.signals.exposition import PageParser, Sample

LIST_MAX_BYTES = 8 * 1024 * 1024
MAX_NAMES = 10_000
"""Largest number of names that are kept of a list. Names in the settings come before all others."""
MAX_OBJECTS = 50_000
"""Largest number of JSON objects in a list. vLLM has two for each model. Parsing millions of them would block
the event loop."""
ADAPTER_RETRY_S = 60.0
"""Time after which a page that shows no adapters, or that cannot be read, is read again."""
_ADAPTERS = "vllm:lora_requests_info"
_SLICE_BYTES = 64 * 1024
"""Number of bytes of a page that are parsed before other tasks run."""


@dataclass(frozen=True, slots=True)
class ListTarget:
    """Address and credentials of an endpoint's list of models."""

    endpoint: str
    """Name of the endpoint in messages: host and port, or `gateway`."""
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    metrics_url: str = ""
    """URL of the metrics page. Empty if it is not read."""
    token_setting: str = "serving.token_file"  # noqa: S105 -- the name of a setting
    """Key of the setting that has the token file."""
    has_token: bool = False
    """True if the headers have credentials."""


class ParsedList(NamedTuple):
    """Content of a list of models."""

    names: tuple[str, ...]
    is_vllm: bool
    """True if the list is from vLLM."""


class UnreadableListError(Exception):
    """The answer is no list of models. The message is a sentence without the name of the endpoint."""


class _ModelCard(msgspec.Struct, gc=False):
    id: str = ""
    owner: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="owned_by")


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


_decode = msgspec.json.Decoder(_ModelList).decode


class ListClient:
    """Client that reads the lists of models, with one time limit for all endpoints. `aclose` closes it.

    Connections are not kept alive: servers close idle ones after a few seconds, which is about the interval
    between two requests.
    """

    def __init__(self, tls: ssl.SSLContext | bool, *, timeout_s: float) -> None:
        """Create the client. If `tls` is True, the system's authorities verify the certificates."""
        self._tls = tls
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._page_retry_at: dict[str, float] = {}
        """Time at which a page that showed no adapters is read again, by its URL."""

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def forget_pages(self, kept_urls: Iterable[str]) -> None:
        """Forget all metrics pages except those with these URLs."""
        kept = set(kept_urls)
        self._page_retry_at = {url: at for url, at in self._page_retry_at.items() if url in kept}

    async def fetch_listing(self, target: ListTarget, configured_names: Set[str]) -> Listing:
        """Return the listing of an endpoint, within the time limit. An error is the listing's `problem`."""
        asked_at, down = asyncio.get_running_loop().time(), False
        try:
            async with asyncio.timeout(self._timeout_s):
                _, body = await self._get_body(target, target.url, "application/json")
            listed = parse_list(body, configured_names)
        except TimeoutError:
            problem = f"no whole answer within {self._timeout_s:g} s"
        except UnreadableListError as error:
            problem = str(error)
        except Exception as error:  # errors of the network, and of the client with a hostile body
            problem, down = describe_error(error), is_connection_refused(error)
        else:
            loading = await self._find_loading_adapters(target, listed, configured_names)
            return Listing(target.endpoint, asked_at, listed.names, loading)
        return Listing(target.endpoint, asked_at, None, problem=problem, is_down=down)

    async def _find_loading_adapters(
        self, target: ListTarget, listed: ParsedList, configured_names: Set[str]
    ) -> tuple[str, ...]:
        """Return the adapters that the metrics page shows as loading and the list lacks.

        Empty if the page cannot be read. Loading adapters are only shown, and no decision depends on them.
        """
        missing = configured_names - set(listed.names)
        now = asyncio.get_running_loop().time()
        if not (target.metrics_url and listed.is_vllm and missing) or now < self._page_retry_at.get(
            target.metrics_url, now
        ):
            return ()
        samples: list[Sample] = []
        with contextlib.suppress(Exception):  # errors of the network or of the page: see `_page_retry_at`
            async with asyncio.timeout(self._timeout_s):
                kind, body = await self._get_body(target, target.metrics_url, "text/plain;version=0.0.4")
                page = PageParser([_ADAPTERS], open_metrics=kind.startswith("application/openmetrics-text"))
                for at in range(0, len(body), _SLICE_BYTES):
                    page.feed(body[at : at + _SLICE_BYTES])
                    await asyncio.sleep(0)
                samples = page.close()
        if not samples:
            self._page_retry_at[target.metrics_url] = now + ADAPTER_RETRY_S
        return tuple(name for name in find_waiting_adapters(samples) if name in missing)

    async def _get_body(self, target: ListTarget, url: str, accept: str) -> tuple[str, bytes]:
        """Return content type and body of an answer with status 200."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls, limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        headers = {
            "Accept": accept,
            "Accept-Encoding": "identity",
            "User-Agent": USER_AGENT,
            **target.headers,
        }
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise UnreadableListError(_explain_status(target, response.status))
            coding = response.headers.get("Content-Encoding", "identity").strip().lower()
            if coding != "identity":
                raise UnreadableListError(f"the answer comes in a coding we did not ask for: {coding[:40]}")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > LIST_MAX_BYTES:
                    raise UnreadableListError(f"the answer is larger than {LIST_MAX_BYTES} bytes")
            return response.headers.get("Content-Type", ""), bytes(body)


def parse_list(body: bytes, configured_names: Set[str] = frozenset()) -> ParsedList:
    """Return the names in OpenAI's list of models, each once.

    If there are too many, names in `configured_names` are kept first. Raises UnreadableListError.
    """
    # Counting braces is much faster than parsing, and bounds the time that parsing blocks the event loop.
    if body.count(b"{") > MAX_OBJECTS:
        raise UnreadableListError(f"the list of models has more than {MAX_OBJECTS} objects")
    try:
        cards = _decode(body).data
    except RecursionError:
        raise UnreadableListError("the list of models is malformed: it nests too deep") from None
    except ValueError as error:  # includes msgspec's errors and UnicodeDecodeError
        raise UnreadableListError(f"the list of models is malformed: {describe_error(error)}") from None
    names = list(dict.fromkeys(card.id for card in cards if _is_valid_name(card.id)))
    if len(names) > MAX_NAMES:
        names.sort(key=lambda name: name not in configured_names)
    return ParsedList(tuple(names[:MAX_NAMES]), any(bytes(card.owner) == b'"vllm"' for card in cards))


def find_waiting_adapters(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Return the adapters of vLLM for which requests wait and none runs.

    The series has one sample for each state that ever occurred, whose value is the time of that state. Only
    the newest sample counts.
    """
    newest = max(samples, key=lambda sample: sample.value, default=None)
    if newest is None:
        return ()
    running, waiting = (
        [name.strip() for name in newest.labels.get(f"{state}_lora_adapters", "").split(",")]
        for state in ("running", "waiting")
    )
    return tuple(dict.fromkeys(name for name in waiting if name not in running and _is_valid_name(name)))


def _is_valid_name(name: str) -> bool:
    """Return True if a request can use the name and the name can be shown to people."""
    return bool(name) and name.isprintable() and len(name.encode()) <= MAX_MODEL_NAME_BYTES


def _explain_status(target: ListTarget, status: int) -> str:
    if status in (401, 403):
        return f"HTTP {status}: {target.token_setting} " + ("is refused" if target.has_token else "is needed")
    if 300 <= status < 400:
        return f"HTTP {status}: a redirect, which is not followed"
    if status == 404:
        return "HTTP 404: there is no list of models"
    return f"HTTP {status}"
