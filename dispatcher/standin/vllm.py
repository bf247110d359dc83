"""What one model server shows of itself on its /metrics page, under vLLM's names: always of now."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dispatcher.standin.pool import Pool


def page(
    pool: Pool,
    number: int,
    servers: int,
    *,
    kv_at_full: float,
    adapters: tuple[Sequence[str], Sequence[str]] | None = None,
) -> bytes:
    """The page of the server with this number, from 0 on; the pool's requests are spread evenly over all.

    `adapters`: those that run and those that wait, where it has any.
    """

    def share(requests: int) -> int:
        return requests // servers + (number < requests % servers)

    running = share(pool.running)
    used = min(1.0, kv_at_full * running * servers / pool.slots) if pool.slots else 1.0
    gauges = (
        ("num_requests_running", "Number of requests in model execution batches.", running),
        ("num_requests_waiting", "Number of requests waiting to be processed.", share(pool.waiting_inside)),
        ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", used),
    )
    shown = "".join(
        f"# HELP vllm:{name} {text}\n# TYPE vllm:{name} gauge\n"
        f'vllm:{name}{{engine="0",model_name="m"}} {float(value)!r}\n'
        for name, text, value in gauges
    )
    if adapters is not None:
        runs, waits = (",".join(names) for names in adapters)
        name = "vllm:lora_requests_info"
        labels = f'max_lora="4",running_lora_adapters="{runs}",waiting_lora_adapters="{waits}"'
        shown += f"# HELP {name} Running stats on lora requests.\n# TYPE {name} gauge\n"
        shown += f"{name}{{{labels}}} {time.time()!r}\n"
    return shown.encode()
