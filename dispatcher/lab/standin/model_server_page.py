"""Metrics page of one model server in the format of vLLM or SGLang. Its values are always current."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dispatcher.lab.standin.config import Engine
from dispatcher.lab.standin.pool import Pool

_GAUGES: dict[Engine, tuple[str, str, str]] = {
    "vllm": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    "sglang": ("num_running_reqs", "num_queue_reqs", "token_usage"),
}
_LABELS: dict[Engine, str] = {
    "vllm": 'engine="0",model_name="m"',
    "sglang": 'engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"',
}


def render_page(
    pool: Pool,
    number: int,
    servers: int,
    *,
    kv_at_full: float,
    engine: Engine = "vllm",
    adapters: tuple[Sequence[str], Sequence[str]] | None = None,
) -> bytes:
    """Render the page of the server with this number, counted from 0.

    `adapters` are the running and the waiting ones, or `None` if the server has none.
    """

    running, waiting = pool.list_server_counts(servers)[number]
    used = min(1.0, kv_at_full * running * servers / pool.slots) if pool.slots else 1.0
    gauges = (
        ("Number of requests in model execution batches.", running),
        ("Number of requests waiting to be processed.", waiting),
        ("KV-cache usage. 1 means 100 percent usage.", used),
    )
    shown = "".join(
        f"# HELP {engine}:{name} {text}\n# TYPE {engine}:{name} gauge\n"
        f"{engine}:{name}{{{_LABELS[engine]}}} {float(value)!r}\n"
        for name, (text, value) in zip(_GAUGES[engine], gauges, strict=True)
    )
    if adapters is not None:
        runs, waits = (",".join(names) for names in adapters)
        name = "vllm:lora_requests_info"
        labels = f'max_lora="4",running_lora_adapters="{runs}",waiting_lora_adapters="{waits}"'
        shown += f"# HELP {name} Running stats on lora requests.\n# TYPE {name} gauge\n"
        shown += f"{name}{{{labels}}} {time.time()!r}\n"
    return shown.encode()
