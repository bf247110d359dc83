"""Interactive requests of a real engine whose slots share a small KV memory, beside long batch requests."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.engine import Engine, require_engine, running_engine
from tests.engine.memory_page import render_page, serve_memory_page
from tests.scenarios.processes import POOL, Stage

SLOTS, KV_TOKENS = 16, 4_096
PROMPT, OUTPUT = 600, 200
"""Size of a batch request. Five of them fit into the memory, and fifteen into the slots."""
RATE, SECONDS = 4.0, 10.0
"""Interactive requests per second, of 50 + 20 tokens, and the time for which they come."""


def make_body(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    prompt = [ord("a") + number % 26 for number in range(prompt_tokens)]
    return {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Figures:
    """Outcome of one run."""

    mean_s: float
    """Mean duration of the interactive requests that were answered."""
    failed_share: float
    batch_tokens_per_s: float


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    require_engine()
    from tests.engine.make_model import write_model

    model = Path(tmp_path_factory.mktemp("engine")) / "model.gguf"
    write_model(model, "bytes")
    with running_engine(model, str(SLOTS), str(KV_TOKENS)) as engine:
        yield engine


async def use_interactively(url: str) -> list[tuple[float, bool]]:
    """Send requests at random times. Return the duration of each, and whether it was answered."""
    source = random.Random(1)

    async def send(client: httpx.AsyncClient) -> tuple[float, bool]:
        started_at = time.monotonic()
        answer = await client.post("/v1/completions", json=make_body(50, 20))
        return time.monotonic() - started_at, answer.status_code == 200

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        sent = []
        for _ in range(round(RATE * SECONDS)):
            await asyncio.sleep(source.expovariate(RATE))
            sent.append(tasks.create_task(send(client)))
    return [task.result() for task in sent]


def run(stage: Stage, engine: Engine, page: str, mode: str) -> Figures:
    """Let a dispatcher fill the engine, and use it interactively at the same time."""
    settings = {
        "pool": {"name": POOL},
        "gateway": {"url": engine.url},
        "queue": {"url": stage.server.url, "lease_s": 5},
        "signals": {"source": "vllm", "interval_s": 0.2, "vllm": {"urls": [page]}},
        "budget": {"per_endpoint": SLOTS},
        "retry": {"base_s": 0.5, "max_s": 1.0, "max_attempts": 50},
        "tokens": {"mode": mode},
        "admin": {"host": "127.0.0.1", "port": 0},
        "log": {"format": "json"},
    }
    payload = json.dumps(make_body(PROMPT, OUTPUT)).encode()
    stage.producer.submit(200, payload, endpoint="/v1/completions")
    dispatcher = stage.dispatcher(settings)
    started_at = time.monotonic()
    interactive = asyncio.run(use_interactively(engine.url))
    batch_tokens = dispatcher.metrics()["tokens_total{out}"]
    took_s = time.monotonic() - started_at
    dispatcher.kill()
    stage.producer.client.flushall()
    answered = [duration_s for duration_s, is_answered in interactive if is_answered]
    return Figures(
        statistics.fmean(answered) if answered else math.inf,
        1.0 - len(answered) / len(interactive),
        batch_tokens / took_s,
    )


@pytest.mark.slow
def test_counted_tokens_keep_a_small_memory_usable(stage: Stage, engine: Engine) -> None:
    """llama.cpp ends every running request with an error when its memory is full."""
    with serve_memory_page(engine, KV_TOKENS) as page:
        requests, tokens = (run(stage, engine, page, mode) for mode in ("off", "auto"))
    print(f"requests counted: {requests}\ntokens counted: {tokens}")
    assert requests.failed_share > 0.2
    assert tokens.failed_share < 0.2 * requests.failed_share
    assert tokens.batch_tokens_per_s > 2 * requests.batch_tokens_per_s


def test_page_has_the_tokens_of_running_requests() -> None:
    slots: list[dict[str, Any]] = [
        {"is_processing": True, "n_prompt_tokens": 600},
        {"is_processing": True, "n_prompt_tokens": 424},
        {"is_processing": False, "n_prompt_tokens": 900},
        {"is_processing": False},
    ]
    page = render_page(slots, 4_096)
    assert 'vllm:num_requests_running{model_name="m"} 2\n' in page
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.25\n' in page
    assert 'kv_cache_size_tokens="4096"' in page
