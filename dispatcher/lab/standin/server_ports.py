"""Listeners besides the gateway: the page of the picker, and the model servers.

    /metrics                                              page of the picker
    /servers/N/metrics                                    page of a model server
    /servers/N/v1/models                                  its list of models
    /servers/N/v1/(chat/completions|completions|embeddings)   requests sent to it directly

With `Config.apart` each model server also has its own address, with the same paths without /servers/N, which
refuses connections while the server is gone.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from dispatcher.lab.standin.config import Config
from dispatcher.lab.standin.gateway import Gateway
from dispatcher.lab.standin.http import Exchange, Server
from dispatcher.lab.standin.model_server_page import render_page as server_page
from dispatcher.lab.standin.picker import Picker
from dispatcher.lab.standin.pool import Pool
from dispatcher.lab.standin.serving import ModelServers

_API_PATH = re.compile(r"/servers/([0-9]{1,6})/v1/(models|chat/completions|completions|embeddings)")


class ServerPorts:
    """Listener on one address and, with `Config.apart`, one more per model server."""

    def __init__(
        self, config: Config, picker: Picker, pool: Pool, servers: ModelServers, gateway: Gateway
    ) -> None:
        self.scraped_at: deque[float] = deque(maxlen=10_000)
        """Times at which the newest pages were served."""
        self.server = Server(self._handle_exchange, config.host, config.metrics_port)
        self.listing_fault = "ok"
        """Answer of each server to requests for its list of models."""
        self._config = config
        self._picker, self._pool, self._servers, self._gateway = picker, pool, servers, gateway
        self._own_servers: dict[int, Server] = {}
        """Own server of each model server by number. Each keeps its address even while it is gone."""
        self._listening: set[int] = set()
        self._update_lock = asyncio.Lock()
        self._page_fault = "ok"
        self._frozen_pages: dict[str, bytes] = {}

    async def open(self) -> None:
        await self.server.open()
        await self.update_listeners()

    async def close(self) -> None:
        for server in (self.server, *self._own_servers.values()):
            await server.close()

    async def update_listeners(self) -> None:
        """Open and close the own addresses, so that exactly the present servers listen."""
        if not self._config.apart:
            return
        # Two changes at once could open the same listener twice.
        async with self._update_lock:
            there = set(self._servers.present)
            for number in self._listening - there:
                await self._own_servers[number].close()
            for number in sorted(there - self._listening):
                own = self._own_servers.get(number)
                if own is None:
                    handle = partial(self._handle_exchange, at=f"/servers/{number}")
                    own = self._own_servers[number] = Server(handle, self.server.host)
                # Each server reopens on the port it had, so that its address stays valid.
                await own.open()
            self._listening = there

    @property
    def addresses(self) -> dict[str, int]:
        """Addresses of each present server (host and port, with a path on the shared address), with its
        number."""
        host = self.server.host
        there = self._servers.present
        shared = {f"{host}:{self.server.port}/servers/{number}": number for number in there}
        own = {
            f"{host}:{self._own_servers[number].port}": number
            for number in there
            if number in self._own_servers
        }
        return shared | own

    @property
    def urls(self) -> list[str]:
        """URLs of the own addresses, in the order of the servers."""
        return [f"http://{self.server.host}:{own.port}" for _, own in sorted(self._own_servers.items())]

    async def set_page_fault(self, kind: str) -> None:
        """Set the fault of the pages; `ok` removes it."""
        if kind == "frozen" and self._page_fault != "frozen":
            # Rendered now: the pages stay as they are at this moment.
            self._frozen_pages = {path: make() for path, make in self._get_page_renderers().items()}
        previous, self._page_fault = self._page_fault, kind
        if kind == "gone":
            await self.server.close()
        elif previous == "gone":
            await self.server.open()

    def _get_page_renderers(self) -> dict[str, Callable[[], bytes]]:
        """Return the functions that render each page, by path. A server that is gone has no page."""
        present = self._servers.present
        own = {
            f"/servers/{number}/metrics": partial(
                server_page,
                self._pool,
                place,
                len(present),
                kv_at_full=self._config.kv_at_full,
                engine=self._config.engine,
                adapters=self._servers.get_adapters(number),
            )
            for place, number in enumerate(present)
        }
        return {"/metrics": self._picker.render_page, **own}

    def _handle_exchange(self, exchange: Exchange, at: str = "") -> None:
        path = at + exchange.target.partition("?")[0]
        match = _API_PATH.fullmatch(path)
        if match is None:
            self._answer_scrape(exchange, path)
            return
        number = int(match[1])
        if match[2] == "models":
            self._answer_listing(exchange, number)
        elif number in self._servers.present:
            self._gateway.handle_direct_request(exchange, number)
        else:
            exchange.reset()

    def _answer_listing(self, exchange: Exchange, number: int) -> None:
        """Answer a request for the list of models of a server. A server that is gone resets the
        connection."""
        listing = self._servers.get_listing(number)
        if listing is None:
            exchange.reset()
        elif self.listing_fault != "hang":
            status, body = {
                "ok": (200, listing),
                "error": (500, b"internal error"),
                "garbage": (200, b"<html>sign in</html>"),
                "unauthorized": (401, b'{"error":"Unauthorized"}'),
            }[self.listing_fault]
            exchange.answer(status, body, [("content-type", "application/json")])

    def _answer_scrape(self, exchange: Exchange, path: str) -> None:
        self.scraped_at.append(time.monotonic())
        bearer = f"Bearer {self._config.metrics_token}"
        refused = bool(self._config.metrics_token) and not hmac.compare_digest(
            exchange.headers.get("authorization", "").encode(), bearer.encode()
        )
        # A missing token wins over the fault of the pages.
        kind = "unauthorized" if refused else self._page_fault
        render = self._get_page_renderers().get(path)
        if render is None:
            exchange.answer(404, b"404 page not found\n")
            return
        # The connection stays open without an answer.
        if kind == "hang":
            return
        status, page = {
            "ok": (200, render),
            "frozen": (200, lambda: self._frozen_pages.get(path, b"")),
            "garbage": (200, lambda: b"<html>\n{not metrics} 1 2 3 4\n</html>\n"),
            "empty": (200, lambda: b""),
            "error": (500, lambda: b"internal error\n"),
            "unauthorized": (401, lambda: b"Unauthorized\n"),
        }[kind]
        exchange.answer(status, page(), [("content-type", "text/plain; version=0.0.4; charset=utf-8")])

    def build_report(self) -> dict[str, Any]:
        return {
            "scrapes": len(self.scraped_at),
            "scraped_at": self.scraped_at[-1] if self.scraped_at else None,
        }
