"""Models that each model server of the live world serves, how they change, and the answer for unknown models.

Until models are configured, every server serves any name at no extra cost and lists one model, `m`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

ANY = "m"
"""Model that is listed while any name is served."""
_LISTS = re.compile(r"/servers/([0-9]{1,6})/v1/models")
_ASKS = re.compile(r"/servers/([0-9]{1,6})/v1/(?:chat/completions|completions|embeddings)")


class Roll(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Replacement of the servers one by one, the first at once. Requests that run on a server run to their
    end."""

    to: list[str]
    """Models that each server serves afterwards."""
    gone_s: float = 1.0
    """Time for which a server is gone: it answers nothing, and its slots are missing."""
    pause_s: float = 0.0
    """Time from the return of a server until the next one goes."""


class Adapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapter that is loaded while the servers run."""

    name: str
    after_s: float = 0.0
    """Time until loading starts."""
    takes_s: float = 0.0
    """Time that loading takes. The page of the server lists the adapter as waiting meanwhile."""
    servers: list[int] | None = None
    """Numbers of the servers, or `None` for all."""


@dataclass(slots=True)
class _ServerState:
    models: list[str]
    adapters: list[str] = field(default_factory=list)
    loading: list[str] = field(default_factory=list)
    gone: bool = False
    warm: set[str] = field(default_factory=set)
    """Models that had a request since the server began to serve them."""
    picked: int = 0
    """Number of the pick that last chose this server."""


class _Named(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(_Named).decode


class ModelServers:
    """Model servers behind a picker that uses them in turn, within the servers that a request lists, and
    ignores models.

    `models` are those of each server; the last entry is for all further servers, and `None` serves any name.
    `cold_s` is the extra time of the first request for a model on each server. `on_change` is called when
    servers go or come back.
    """

    def __init__(
        self,
        servers: int,
        models: Sequence[Sequence[str]] | None,
        cold_s: float,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.cold_s = cold_s
        self._changed = changed
        self._servers: list[_ServerState] = []
        self._given: Sequence[Sequence[str]] = [[]]
        self._picks = 0
        self.lists = 0
        """Number of requests for a list of models."""
        self.unknown = 0
        """Number of requests for a model that their server did not serve."""
        self.serve(models)
        self.resize(servers)

    @property
    def present(self) -> list[int]:
        """Numbers of the servers that are not gone."""
        return [number for number, server in enumerate(self._servers) if not server.gone]

    @property
    def share(self) -> float:
        """Share of the servers that are not gone."""
        return len(self.present) / len(self._servers) if self._servers else 0.0

    def resize(self, servers: int) -> None:
        """Change the number of servers."""
        del self._servers[max(0, servers) :]
        while len(self._servers) < servers:
            self._servers.append(_ServerState([*self._told(len(self._servers))]))

    def serve(self, models: Sequence[Sequence[str]] | None) -> None:
        """Serve these models from now on, and no adapter; `None` to serve any name."""
        self._by_name, self._given = models is not None, models or [[]]
        for number, server in enumerate(self._servers):
            self._replace(server, self._told(number))

    def _told(self, number: int) -> Sequence[str]:
        """Return the models that are configured for a server."""
        return self._given[min(number, len(self._given) - 1)]

    def _replace(self, server: _ServerState, models: Sequence[str]) -> None:
        server.models = [*models]
        server.adapters, server.loading = [], []
        server.warm.clear()

    async def roll(self, roll: Roll) -> None:
        """Replace each server, one after the other."""
        # A replacement names models, so that from now on unknown ones are rejected.
        if not self._by_name:
            self.serve([[ANY]])
        for server in [*self._servers]:
            server.gone = True
            self._changed()
            await asyncio.sleep(roll.gone_s)
            self._replace(server, roll.to)
            server.gone = False
            self._changed()
            await asyncio.sleep(roll.pause_s)
        # Servers that are added later serve the new models, too.
        self._given = [roll.to]

    async def load(self, adapter: Adapter) -> None:
        """Load an adapter on servers that stay otherwise unchanged."""
        await asyncio.sleep(adapter.after_s)
        chosen = range(len(self._servers)) if adapter.servers is None else adapter.servers
        loading = [self._servers[number] for number in chosen if 0 <= number < len(self._servers)]
        for server in loading:
            server.loading.append(adapter.name)
        await asyncio.sleep(adapter.takes_s)
        for server in loading:
            if adapter.name in server.loading:  # the server may have been replaced meanwhile
                server.loading.remove(adapter.name)
                server.adapters.append(adapter.name)

    # Requests.

    def pick(self, among: Collection[int] | None = None) -> int | None:
        """Return the server whose turn it is among the allowed ones, -1 if all servers are equal, or `None`
        if no allowed one is there."""
        # Without models and cold starts the choice has no effect.
        if among is None and not (self._by_name or self.cold_s):
            return -1
        there = [number for number in self.present if among is None or number in among]
        if not there:
            return -1 if among is None else None
        # The least recently picked: round robin even while servers come and go.
        number = min(there, key=lambda each: self._servers[each].picked)
        self._picks += 1
        self._servers[number].picked = self._picks
        return number

    def meet(self, number: int, body: bytes) -> _Met:
        """Return what a request finds at the server with this number; -1 stands for any server."""
        if not 0 <= number < len(self._servers):
            return _NOTHING
        server = self._servers[number]
        try:
            model = _decode(body).model
        except msgspec.MsgspecError:
            model = ""
        if self._by_name and model and model not in (*server.models, *server.adapters):
            self.unknown += 1
            return _Met(number, model, 0.0, unknown=True)
        return _Met(number, model, 0.0 if model in server.warm else self.cold_s)

    def warmed(self, met: _Met) -> None:
        """Record that the server accepted the request, so that its model is warm there."""
        if 0 <= met.number < len(self._servers):
            self._servers[met.number].warm.add(met.model)

    # Lists and reports.

    def listed_by(self, path: str) -> int | None:
        """Return the number of the server whose list of models is at this path, or `None`."""
        found = _LISTS.fullmatch(path)
        return int(found[1]) if found else None

    def asked_at(self, path: str) -> int | None:
        """Return the number of the server that takes requests at this path, or `None`."""
        found = _ASKS.fullmatch(path)
        return int(found[1]) if found else None

    def listing(self, number: int) -> bytes | None:
        """Return the list of models of a server in the format of vLLM, or `None` if the server is gone."""
        self.lists += 1
        return _list(self._cards(number)) if number in self.present else None

    def union(self) -> bytes:
        """Return the list of a gateway that combines the lists of all servers."""
        self.lists += 1
        return _list([card for number in self.present for card in self._cards(number)])

    def adapters(self, number: int) -> tuple[list[str], list[str]] | None:
        """Return the running and the waiting adapters of a server, or `None` if it has none."""
        server = self._servers[number]
        return (server.adapters, server.loading) if server.adapters or server.loading else None

    def report(self) -> dict[str, Any]:
        return {
            "lists": self.lists,
            "unknown": self.unknown,
            "servers": [
                None if server.gone else [card["id"] for card in self._cards(number)]
                for number, server in enumerate(self._servers)
            ],
        }

    def _cards(self, number: int) -> list[dict[str, Any]]:
        server = self._servers[number]
        models = server.models if self._by_name else [ANY]
        parent = models[0] if models else None
        return [*(_card(name, None) for name in models), *(_card(name, parent) for name in server.adapters)]


@dataclass(frozen=True, slots=True)
class _Met:
    """Result of a request at a server: whether its model is known there, and warm."""

    number: int
    model: str
    cold_s: float
    """Extra time of the request."""
    unknown: bool = False


_NOTHING = _Met(-1, "", 0.0)


def not_found(model: str) -> str:
    """Return the body of the 404 of vLLM for a model that it does not serve."""
    error = {
        "message": f"The model `{model}` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    return msgspec.json.encode({"error": error}).decode()


def _card(name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 1_764_000_000,
        "owned_by": "vllm",
        "root": name,
        "parent": parent,
        "max_model_len": 32_768,
    }


def _list(cards: Sequence[dict[str, Any]]) -> bytes:
    once: dict[str, dict[str, Any]] = {}
    for card in cards:
        # A model of several servers is listed once.
        once.setdefault(card["id"], card)
    return msgspec.json.encode({"object": "list", "data": [*once.values()]})


def parse_models(text: str) -> list[list[str]] | None:
    """Parse models such as `a,b;a`: those of the first server, and of all others. `None` if the text is
    empty."""
    if not text:
        return None
    return [[name.strip() for name in each.split(",") if name.strip()] for each in text.split(";")]
