"""One question to one endpoint: which models do you list? And, where that can tell more, which do you load?

    GET /v1/models ──▶ OpenAI's list, as vLLM, SGLang, TensorRT-LLM, TGI and gateways give it
    GET /metrics   ──▶ of vLLM alone: the adapters that requests wait for

The list decides what is served. The page is asked only while a model that the settings name is missing in the
list of a vLLM, and once a minute where it does not show adapters: it is a hundred times longer than the list.
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
from dispatcher.core.models.availability import Listing
from dispatcher.core.requests.lanes import MODEL_BYTES
from dispatcher.ports.network_errors import nobody_listens, words
from dispatcher.signals.exposition import Page, Sample

LIST_MAX_BYTES = 8 * 1024 * 1024
NAMES_MOST = 10_000
"""So many of a list are kept, those that the settings name before all others."""
OBJECTS_MOST = 50_000
"""In a list that is read at all: vLLM has two for each model. Millions would hold up the event loop."""
NO_ADAPTERS_S = 60.0
"""A page that shows no adapters, or that cannot be read, is asked again after this."""
_ADAPTERS = "vllm:lora_requests_info"
_SLICE_BYTES = 64 * 1024
"""Of a page, parsed before the event loop has its turn again."""


@dataclass(frozen=True, slots=True)
class ListTarget:
    """Whom to ask, and how."""

    endpoint: str
    """For people: host and port, or `gateway`."""
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    page: str = ""
    """URL of its metrics; empty: they are not asked for."""
    token: str = "serving.token_file"  # noqa: S105 -- the name of a setting
    """The setting by which it is given a token."""
    with_token: bool = False


class Listed(NamedTuple):
    """What a list says."""

    names: tuple[str, ...]
    vllm: bool
    """Whether it is vLLM's."""


class UnreadableListError(Exception):
    """What an endpoint answers is no list of models; the message is a sentence without the endpoint."""


class _ModelCard(msgspec.Struct, gc=False):
    id: str = ""
    owner: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="owned_by")


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


_decode = msgspec.json.Decoder(_ModelList).decode


class Inquirer:
    """Asks endpoints, each with the same patience. One client for as long as it lives; `aclose` ends it.

    Connections are not kept: servers close idle ones after seconds, about when the next question comes.
    """

    def __init__(self, tls: ssl.SSLContext | bool, *, timeout_s: float) -> None:
        """`tls`: how a server's certificate is verified; True: by the system's authorities."""
        self._tls = tls
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._page_again_at: dict[str, float] = {}
        """When a page that showed no adapters is asked again, by its URL."""

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def forget(self, still: Iterable[str]) -> None:
        """Of endpoints other than those with these pages nothing is remembered."""
        kept = set(still)
        self._page_again_at = {url: at for url, at in self._page_again_at.items() if url in kept}

    async def ask(self, target: ListTarget, wanted: Set[str]) -> Listing:
        """What the endpoint says, within the time-out; whatever goes wrong is the listing's `problem`."""
        asked_at, down = asyncio.get_running_loop().time(), False
        try:
            async with asyncio.timeout(self._timeout_s):
                _, body = await self._get(target, target.url, "application/json")
            listed = read_list(body, wanted)
        except TimeoutError:
            problem = f"no whole answer within {self._timeout_s:g} s"
        except UnreadableListError as error:
            problem = str(error)
        except Exception as error:  # whatever a network, or a hostile body, makes of the client
            problem, down = words(error), nobody_listens(error)
        else:
            loading = await self._loading(target, listed, wanted)
            return Listing(target.endpoint, asked_at, listed.names, loading)
        return Listing(target.endpoint, asked_at, None, problem=problem, down=down)

    async def _loading(self, target: ListTarget, listed: Listed, wanted: Set[str]) -> tuple[str, ...]:
        """Adapters that the page shows and the list does not. Where it cannot be read there are none: it is
        only shown."""
        missing = wanted - set(listed.names)
        now = asyncio.get_running_loop().time()
        if not (target.page and listed.vllm and missing) or now < self._page_again_at.get(target.page, now):
            return ()
        samples: list[Sample] = []
        with contextlib.suppress(Exception):  # as above
            async with asyncio.timeout(self._timeout_s):
                kind, body = await self._get(target, target.page, "text/plain;version=0.0.4")
                page = Page([_ADAPTERS], open_metrics=kind.startswith("application/openmetrics-text"))
                for at in range(0, len(body), _SLICE_BYTES):
                    page.feed(body[at : at + _SLICE_BYTES])
                    await asyncio.sleep(0)
                samples = page.close()
        if not samples:
            self._page_again_at[target.page] = now + NO_ADAPTERS_S
        return tuple(name for name in waiting_adapters(samples) if name in missing)

    async def _get(self, target: ListTarget, url: str, accept: str) -> tuple[str, bytes]:
        """Kind and body of a 200."""
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
                raise UnreadableListError(_refused(target, response.status))
            coding = response.headers.get("Content-Encoding", "identity").strip().lower()
            if coding != "identity":
                raise UnreadableListError(f"the answer comes in a coding we did not ask for: {coding[:40]}")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > LIST_MAX_BYTES:
                    raise UnreadableListError(f"the answer is larger than {LIST_MAX_BYTES} bytes")
            return response.headers.get("Content-Type", ""), bytes(body)


def read_list(body: bytes, wanted: Set[str] = frozenset()) -> Listed:
    """The names of OpenAI's list of models, each once, those in `wanted` before what is too much. Raises
    UnreadableListError."""
    if body.count(b"{") > OBJECTS_MOST:
        raise UnreadableListError(f"the list of models has more than {OBJECTS_MOST} objects")
    try:
        cards = _decode(body).data
    except RecursionError:
        raise UnreadableListError("the list of models is malformed: it nests too deep") from None
    except ValueError as error:  # msgspec's is one, and UnicodeDecodeError
        raise UnreadableListError(f"the list of models is malformed: {words(error)}") from None
    names = list(dict.fromkeys(card.id for card in cards if _may_be_named(card.id)))
    if len(names) > NAMES_MOST:
        names.sort(key=lambda name: name not in wanted)
    return Listed(tuple(names[:NAMES_MOST]), any(bytes(card.owner) == b'"vllm"' for card in cards))


def waiting_adapters(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Adapters of vLLM that requests wait for and none runs with.

    Each state that ever was has a sample, whose value is the time when it was so: the newest counts.
    """
    newest = max(samples, key=lambda sample: sample.value, default=None)
    if newest is None:
        return ()
    running, waiting = (
        [name.strip() for name in newest.labels.get(f"{state}_lora_adapters", "").split(",")]
        for state in ("running", "waiting")
    )
    return tuple(dict.fromkeys(name for name in waiting if name not in running and _may_be_named(name)))


def _may_be_named(name: str) -> bool:
    """Whether a request could name it, and people may be shown it."""
    return bool(name) and name.isprintable() and len(name.encode()) <= MODEL_BYTES


def _refused(target: ListTarget, status: int) -> str:
    if status in (401, 403):
        return f"HTTP {status}: {target.token} " + ("is refused" if target.with_token else "is needed")
    if 300 <= status < 400:
        return f"HTTP {status}: a redirect, which is not followed"
    if status == 404:
        return "HTTP 404: there is no list of models"
    return f"HTTP {status}"
