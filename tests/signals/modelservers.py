"""Model servers as far as their lists go. Bodies are made after what each server's documentation shows."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from tests.signals.fakes import serving


def card(name: str, owner: str = "vllm", parent: str | None = None) -> dict[str, Any]:
    """A model as vLLM lists it."""
    return {
        "id": name,
        "object": "model",
        "created": 1_764_000_000,
        "owned_by": owner,
        "root": name,
        "parent": parent,
        "max_model_len": 32_768,
        "permission": [{"id": "modelperm-1", "object": "model_permission", "allow_sampling": True}],
    }


def listing(*names: str, owner: str = "vllm") -> str:
    return json.dumps({"object": "list", "data": [card(name, owner) for name in names]})


class FakeServer:
    """One model server. Set `models`, or `answer` for anything else; `adapters`: what its page shows."""

    def __init__(self, *models: str) -> None:
        self.models = list(models)
        self.owner = "vllm"
        self.answer: web.Response | None = None
        self.slow_s = 0.0
        self.page = ""
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.max_limit = 0
        self.url = self.address = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.headers.append(dict(request.headers))
        self.running += 1
        self.max_limit = max(self.max_limit, self.running)
        try:
            if self.slow_s:
                await asyncio.sleep(self.slow_s)
            if request.path.endswith("/metrics"):
                return web.Response(text=self.page)
            if self.answer is not None:
                return web.Response(
                    status=self.answer.status, body=self.answer.body, headers=dict(self.answer.headers)
                )
            if not request.path.endswith("/v1/models"):
                return web.Response(status=404)
            return web.Response(text=listing(*self.models, owner=self.owner), content_type="application/json")
        finally:
            self.running -= 1

    @property
    def lists(self) -> int:
        return sum(path.endswith("/v1/models") for path in self.asked)

    @property
    def pages(self) -> int:
        return sum(path.endswith("/metrics") for path in self.asked)


@contextlib.asynccontextmanager
async def model_server(*models: str, tls: Any = None) -> AsyncIterator[FakeServer]:
    server = FakeServer(*models)
    async with serving(server.handle, tls=tls) as port:
        server.address = f"127.0.0.1:{port}"
        server.url = f"{'https' if tls else 'http'}://{server.address}"
        yield server


def adapters(*samples: tuple[float, str, str]) -> str:
    """A page of vLLM with its adapters: when, running, waiting."""
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="m"} 1.0',
        "# HELP vllm:lora_requests_info Running stats on lora requests.",
        "# TYPE vllm:lora_requests_info gauge",
    ]
    lines += [
        f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{running}",'
        f'waiting_lora_adapters="{waiting}"}} {at!r}'
        for at, running, waiting in samples
    ]
    return "\n".join(lines) + "\n"
