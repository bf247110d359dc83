"""Models that each model server of the live world serves, how they change, and the answer for unknown models.

Until models are configured, every server serves any name at no extra cost and lists one model, `m`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dispatcher.lab.standin.config import Adapter, Config, Roll
from dispatcher.lab.standin.generation_api import GenerationConfig

DEFAULT_MODEL = "m"
"""Model that is listed while any name is served."""


@dataclass(slots=True)
class _ServerState:
    models: list[str]
    adapters: list[str] = field(default_factory=list)
    loading: list[str] = field(default_factory=list)
    is_gone: bool = False
    warm: set[str] = field(default_factory=set)
    """Models that had a request since the server began to serve them."""
    last_pick: int = 0
    """Number of the pick that last chose this server."""


class _ModelField(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(_ModelField).decode


class ModelServers:
    """Model servers behind a picker that uses them in turn, within the servers that a request lists, and
    ignores models.

    `on_change` is called when servers go or come back.
    """

    def __init__(self, config: Config, on_change: Callable[[], None]) -> None:
        self._config = config
        self._on_change = on_change
        self._servers: list[_ServerState] = []
        self._configured_models: Sequence[Sequence[str]] = [[]]
        self._pick_count = 0
        self.listing_count = 0
        """Number of requests for a list of models."""
        self.unknown_count = 0
        """Number of requests for a model that their server did not serve."""
        self.serve_models(parse_models(config.models))
        self.set_server_count(config.endpoints)

    @property
    def present(self) -> list[int]:
        """Numbers of the servers that are not gone."""
        return [number for number, server in enumerate(self._servers) if not server.is_gone]

    @property
    def present_share(self) -> float:
        """Share of the servers that are not gone."""
        return len(self.present) / len(self._servers) if self._servers else 0.0

    def set_server_count(self, servers: int) -> None:
        """Change the number of servers."""
        del self._servers[max(0, servers) :]
        while len(self._servers) < servers:
            self._servers.append(_ServerState([*self._get_configured_models(len(self._servers))]))

    def serve_models(self, models: Sequence[Sequence[str]] | None) -> None:
        """Serve these models from now on, and no adapter. The last entry is for all further servers. `None`
        serves any name."""
        self._checks_models, self._configured_models = models is not None, models or [[]]
        for number, server in enumerate(self._servers):
            self._replace_models(server, self._get_configured_models(number))

    def _get_configured_models(self, number: int) -> Sequence[str]:
        """Return the models that are configured for a server."""
        return self._configured_models[min(number, len(self._configured_models) - 1)]

    def _replace_models(self, server: _ServerState, models: Sequence[str]) -> None:
        server.models = [*models]
        server.adapters, server.loading = [], []
        server.warm.clear()

    async def replace_servers(self, roll: Roll) -> None:
        """Replace each server, one after the other."""
        # A replacement names models, so that from now on unknown ones are rejected.
        if not self._checks_models:
            self.serve_models([[DEFAULT_MODEL]])
        for server in [*self._servers]:
            server.is_gone = True
            self._on_change()
            await asyncio.sleep(roll.gone_s)
            self._replace_models(server, roll.to)
            server.is_gone = False
            self._on_change()
            await asyncio.sleep(roll.pause_s)
        # Servers that are added later serve the new models, too.
        self._configured_models = [roll.to]

    async def load_adapter(self, adapter: Adapter) -> None:
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

    def pick_server(self, allowed: Collection[int] | None = None) -> int | None:
        """Return the server whose turn it is among the allowed ones, -1 if all servers are equal, or `None`
        if no allowed one is there."""
        # Without models and cold starts the choice has no effect.
        if allowed is None and not (self._checks_models or self._config.cold_s):
            return -1
        candidates = [number for number in self.present if allowed is None or number in allowed]
        if not candidates:
            return -1 if allowed is None else None
        # The least recently picked: round robin even while servers come and go.
        number = min(candidates, key=lambda each: self._servers[each].last_pick)
        self._pick_count += 1
        self._servers[number].last_pick = self._pick_count
        return number

    def visit_server(self, number: int, body: bytes) -> _Visit:
        """Return what a request finds at the server with this number; -1 stands for any server."""
        if not 0 <= number < len(self._servers):
            return _NO_SERVER
        server = self._servers[number]
        try:
            model = _decode(body).model
        except msgspec.MsgspecError:
            model = ""
        if self._checks_models and model and model not in (*server.models, *server.adapters):
            self.unknown_count += 1
            return _Visit(number, model, 0.0, is_unknown=True)
        return _Visit(number, model, 0.0 if model in server.warm else self._config.cold_s)

    def mark_warm(self, visit: _Visit) -> None:
        """Record that the server accepted the request, so that its model is warm there."""
        if 0 <= visit.number < len(self._servers):
            self._servers[visit.number].warm.add(visit.model)

    # Lists and reports.

    def get_listing(self, number: int) -> bytes | None:
        """Return the list of models of a server in the format of vLLM, or `None` if the server is gone."""
        self.listing_count += 1
        return _build_listing(self._build_cards(number)) if number in self.present else None

    def get_gateway_listing(self) -> bytes:
        """Return the list of a gateway that combines the lists of all servers."""
        self.listing_count += 1
        return _build_listing([card for number in self.present for card in self._build_cards(number)])

    def get_adapters(self, number: int) -> tuple[list[str], list[str]] | None:
        """Return the running and the waiting adapters of a server, or `None` if it has none."""
        server = self._servers[number]
        return (server.adapters, server.loading) if server.adapters or server.loading else None

    def build_report(self) -> dict[str, Any]:
        return {
            "lists": self.listing_count,
            "unknown": self.unknown_count,
            "servers": [
                None if server.is_gone else [card["id"] for card in self._build_cards(number)]
                for number, server in enumerate(self._servers)
            ],
        }

    def _build_cards(self, number: int) -> list[dict[str, Any]]:
        server = self._servers[number]
        models = server.models if self._checks_models else [DEFAULT_MODEL]
        parent = models[0] if models else None
        return [
            *(self._build_card(name, None) for name in models),
            *(self._build_card(name, parent) for name in server.adapters),
        ]

    def _build_card(self, name: str, parent: str | None) -> dict[str, Any]:
        generation = self._config.generation or GenerationConfig()
        return {
            "id": name,
            "object": "model",
            "created": 1_764_000_000,
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": generation.context_length,
        }


@dataclass(frozen=True, slots=True)
class _Visit:
    """Result of a request at a server: whether its model is known there, and warm."""

    number: int
    model: str
    cold_s: float
    """Extra time of the request."""
    is_unknown: bool = False


_NO_SERVER = _Visit(-1, "", 0.0)


def build_not_found(model: str) -> str:
    """Return the body of the 404 of vLLM for a model that it does not serve."""
    error = {
        "message": f"The model `{model}` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    return msgspec.json.encode({"error": error}).decode()


def _build_listing(cards: Sequence[dict[str, Any]]) -> bytes:
    unique: dict[str, dict[str, Any]] = {}
    for card in cards:
        # A model of several servers is listed once.
        unique.setdefault(card["id"], card)
    return msgspec.json.encode({"object": "list", "data": [*unique.values()]})


def parse_models(text: str) -> list[list[str]] | None:
    """Parse models such as `a,b;a`: those of the first server, and of all others. `None` if the text is
    empty."""
    if not text:
        return None
    return [[name.strip() for name in each.split(",") if name.strip()] for each in text.split(";")]
