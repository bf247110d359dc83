"""Fake model servers that list models. The bodies follow the documentation of each server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from tests.signals.fakes import serving


def model_object(name: str, owner: str = "vllm", parent: str | None = None) -> dict[str, Any]:
    """Return a model as vLLM lists it."""
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


def models_answer(*names: str, owner: str = "vllm") -> str:
    return json.dumps({"object": "list", "data": [model_object(name, owner) for name in names]})


class FakeServer:
    """One model server. It lists `models`, or answers with `answer` if that is set. `page` is its metrics
    page."""

    def __init__(self, *models: str) -> None:
        self.models = list(models)
        self.owner = "vllm"
        self.answer: web.Response | None = None
        self.slow_s = 0.0
        self.page = ""
        self.requested_paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.max_concurrent = 0
        self.url = self.address = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requested_paths.append(request.path)
        self.headers.append(dict(request.headers))
        self.running += 1
        self.max_concurrent = max(self.max_concurrent, self.running)
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
            return web.Response(
                text=models_answer(*self.models, owner=self.owner), content_type="application/json"
            )
        finally:
            self.running -= 1

    @property
    def list_request_count(self) -> int:
        return sum(path.endswith("/v1/models") for path in self.requested_paths)

    @property
    def page_request_count(self) -> int:
        return sum(path.endswith("/metrics") for path in self.requested_paths)


@contextlib.asynccontextmanager
async def model_server(*models: str, tls: Any = None) -> AsyncIterator[FakeServer]:
    server = FakeServer(*models)
    async with serving(server.handle, tls=tls) as port:
        server.address = f"127.0.0.1:{port}"
        server.url = f"{'https' if tls else 'http'}://{server.address}"
        yield server


def adapters_page(*samples: tuple[float, str, str]) -> str:
    """Return a metrics page of vLLM with adapters. Each sample is a time, the running and the waiting
    adapters."""
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
