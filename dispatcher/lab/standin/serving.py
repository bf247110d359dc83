"""Which model server of the live world serves which models, how that changes, and what an unknown one gets.

As long as nothing is said of models, any name is served by any server, at no cost, and each lists one, `m`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

ANY = "m"
"""What is listed where any name is served."""
_LISTS = re.compile(r"/servers/([0-9]{1,6})/v1/models")
_ASKS = re.compile(r"/servers/([0-9]{1,6})/v1/(?:chat/completions|completions|embeddings)")


class Roll(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Servers are replaced one by one, the first at once. What runs on one that goes runs to its end."""

    to: list[str]
    """What each serves when it is back."""
    gone_s: float = 1.0
    """So long it is away: it answers nothing, and its slots are gone."""
    pause_s: float = 0.0
    """From its return until the next one goes."""


class Adapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter that is loaded while the servers run."""

    name: str
    after_s: float = 0.0
    """Loading begins after this,"""
    takes_s: float = 0.0
    """and takes so long: meanwhile the server's page has it among those that wait."""
    servers: list[int] | None = None
    """None: all."""


@dataclass(slots=True)
class _ServerState:
    models: list[str]
    adapters: list[str] = field(default_factory=list)
    loading: list[str] = field(default_factory=list)
    gone: bool = False
    warm: set[str] = field(default_factory=set)
    """Models that had a request since the server began to serve them."""
    picked: int = 0
    """Which of all picks it was that chose it last."""


class _Named(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(_Named).decode


class ModelServers:
    """So many model servers, behind a picker that takes them in turn, of those that a request names where it
    names some, and looks at no model.

    `models`: of each server, the last for those after it; None: any name is served. `cold_s`: so much longer
    the first request to a model takes on each server. `changed` is called when servers go or come back.
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
        """So often any list was asked for."""
        self.unknown = 0
        """Requests whose model the server that they came to did not serve."""
        self.serve(models)
        self.resize(servers)

    @property
    def present(self) -> list[int]:
        """The numbers of those that are there."""
        return [number for number, server in enumerate(self._servers) if not server.gone]

    @property
    def share(self) -> float:
        """What part of all servers that is."""
        return len(self.present) / len(self._servers) if self._servers else 0.0

    def resize(self, servers: int) -> None:
        """So many from now on."""
        del self._servers[max(0, servers) :]
        while len(self._servers) < servers:
            self._servers.append(_ServerState([*self._told(len(self._servers))]))

    def serve(self, models: Sequence[Sequence[str]] | None) -> None:
        """Serve these from now on, and no adapter; None: any name."""
        self._by_name, self._given = models is not None, models or [[]]
        for number, server in enumerate(self._servers):
            self._replace(server, self._told(number))

    def _told(self, number: int) -> Sequence[str]:
        """What a server is to serve."""
        return self._given[min(number, len(self._given) - 1)]

    def _replace(self, server: _ServerState, models: Sequence[str]) -> None:
        server.models = [*models]
        server.adapters, server.loading = [], []
        server.warm.clear()

    async def roll(self, roll: Roll) -> None:
        """Replace each server, one after the other."""
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
        self._given = [roll.to]

    async def load(self, adapter: Adapter) -> None:
        """Load an adapter where the server stays what it is."""
        await asyncio.sleep(adapter.after_s)
        chosen = range(len(self._servers)) if adapter.servers is None else adapter.servers
        loading = [self._servers[number] for number in chosen if 0 <= number < len(self._servers)]
        for server in loading:
            server.loading.append(adapter.name)
        await asyncio.sleep(adapter.takes_s)
        for server in loading:
            if adapter.name in server.loading:  # it was not replaced meanwhile
                server.loading.remove(adapter.name)
                server.adapters.append(adapter.name)

    # What a request meets.

    def pick(self, among: Collection[int] | None = None) -> int | None:
        """The server whose turn it is, of those; -1: all are alike; None: none of those is there."""
        if among is None and not (self._by_name or self.cold_s):
            return -1
        there = [number for number in self.present if among is None or number in among]
        if not there:
            return -1 if among is None else None
        number = min(there, key=lambda each: self._servers[each].picked)
        self._picks += 1
        self._servers[number].picked = self._picks
        return number

    def meet(self, number: int, body: bytes) -> _Met:
        """A request comes to the server with this number; -1: to any."""
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
        """The request was taken in there."""
        if 0 <= met.number < len(self._servers):
            self._servers[met.number].warm.add(met.model)

    # What is shown.

    def listed_by(self, path: str) -> int | None:
        """The number of the server whose list lies at a path."""
        found = _LISTS.fullmatch(path)
        return int(found[1]) if found else None

    def asked_at(self, path: str) -> int | None:
        """The number of the server that takes requests at a path."""
        found = _ASKS.fullmatch(path)
        return int(found[1]) if found else None

    def listing(self, number: int) -> bytes | None:
        """The list of a server, as vLLM gives it; None: it is not there."""
        self.lists += 1
        return _list(self._cards(number)) if number in self.present else None

    def union(self) -> bytes:
        """What a gateway that asks all of them lists."""
        self.lists += 1
        return _list([card for number in self.present for card in self._cards(number)])

    def adapters(self, number: int) -> tuple[list[str], list[str]] | None:
        """The adapters of a server that run and that wait; None: it has none."""
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
    """What a request finds at the server that it comes to."""

    number: int
    model: str
    cold_s: float
    """So much longer it takes there."""
    unknown: bool = False


_NOTHING = _Met(-1, "", 0.0)


def not_found(model: str) -> str:
    """The body of vLLM's 404 for a model that it does not serve."""
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
        once.setdefault(card["id"], card)
    return msgspec.json.encode({"object": "list", "data": [*once.values()]})


def parse_models(text: str) -> list[list[str]] | None:
    """`a,b;a`: what the first server lists, and what all after it do; empty: nothing is said of models."""
    if not text:
        return None
    return [[name.strip() for name in each.split(",") if name.strip()] for each in text.split(";")]
