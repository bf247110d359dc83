"""Metrics page of an endpoint picker, with the delays and blind spots of the real one."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from statistics import pstdev

from dispatcher.lab.standin.config import Config
from dispatcher.lab.standin.model import KV_AT_FULL, TOKEN_S, WAITING_AT_FULL
from dispatcher.lab.standin.pool import Job, Pool, take_share

PRIORITIES = (0, -10)
"""Priorities of realtime and of batch requests."""
TTFT_BOUNDS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5),
    *(2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0),
)
TPOT_BOUNDS = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0),
)
"""Buckets of the histograms of the real picker."""


class Histogram:
    """One series of a histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def format_lines(self, name: str, labels: str) -> list[str]:
        totals = list(accumulate(self._counts))
        bounds = (*(f"{bound:g}" for bound in self._bounds), "+Inf")
        return [
            *(
                f'{name}_bucket{{{labels},le="{bound}"}} {count}'
                for bound, count in zip(bounds, totals, strict=True)
            ),
            f"{name}_sum{{{labels}}} {self._sum:.17g}",
            f"{name}_count{{{labels}}} {totals[-1]}",
        ]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """State of the pool at one moment, as the picker knows it."""

    at: float
    running: int
    waiting: int
    """Requests that wait in the model servers."""
    queued: tuple[int, int]
    """Realtime and batch requests that wait in the picker."""
    endpoints: int
    slots: int
    servers: tuple[tuple[int, int], ...] = ()
    """Running and waiting requests of each model server."""
    sent: tuple[int, int] = (0, 0)
    """Realtime and batch requests that are in the model servers."""


class Picker:
    """Endpoint picker in front of a pool, with its metrics page.

    `declared` is the number of requests that the picker assumes all endpoints can run together
    (maxConcurrency of the concurrency detector × endpoints). It sends no more than that to the model servers
    and queues the others. If it assumes too much, the surplus waits in the model servers, where the queue
    metric of the picker does not show it.

    The utilization detector decides by the metrics of the model servers instead, which the picker reads every
    `metrics_refresh_s`. Until they show full servers, every request of a burst is sent; after that none is.
    """

    def __init__(self, config: Config) -> None:
        self.endpoints = config.endpoints
        self.declared = config.slots if config.declared is None else config.declared
        self._config = config
        self._is_cold = config.cold
        self._started_at = time.time()
        self._server_snapshot: _Snapshot | None = None
        """State of the model servers when their metrics were last read."""
        self._history: deque[_Snapshot] = deque()
        self._averages = (0.0, 0.0, 0.0, 0.0)
        self._has_had_requests = False
        self._ttft: dict[bool, Histogram] = {}
        self._tpot: dict[bool, Histogram] = {}
        """Histograms by whether requests are batch. The first request of each kind creates one, as in the
        real picker."""
        self.flushed_at: float | None = None
        """Time at which the averages were last renewed."""

    @property
    def admission_limit(self) -> float:
        """Number of requests that may be in the model servers at once. The others wait in the picker."""
        if not self._config.flow_control:
            return inf
        if self._config.detector == "concurrency":
            return self.declared
        servers = self._server_snapshot
        return inf if servers is None or self._compute_saturation(servers) < 1.0 else 0.0

    def refresh_metrics(self) -> None:
        """Read the metrics of the model servers."""
        self._server_snapshot = self._get_visible_snapshot()

    async def refresh_metrics_periodically(self, on_refresh: Callable[[], None]) -> None:
        """Read the metrics of the model servers every `metrics_refresh_s` until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.refresh_metrics()
            on_refresh()
            # Without the maximum a delayed loop would catch up with a burst of readings.
            due = max(due + self._config.metrics_refresh_s, loop.time())
            await asyncio.sleep(due - loop.time())

    def record_pool_state(self, pool: Pool) -> None:
        """Record the state of the pool. Called at each change of it."""
        lag_s = self._config.lag_s
        if lag_s <= 0:
            # Without a delay only the newest state is ever shown.
            self._history.clear()
        now = time.monotonic()
        while len(self._history) > 1 and self._history[1].at <= now - lag_s:
            self._history.popleft()
        self._has_had_requests = self._has_had_requests or pool.running + pool.waiting > 0
        servers = tuple(pool.list_server_counts(self.endpoints))
        self._history.append(
            _Snapshot(
                now,
                pool.running,
                pool.waiting_inside,
                pool.waiting_in_picker,
                self.endpoints,
                pool.slots,
                servers,
                pool.sent,
            )
        )

    def record_latency(self, job: Job) -> None:
        """Record the latencies of an answer. Realtime answers are streamed; for others the first token comes
        with the last."""
        took_s, ran_s = job.finished_at - job.arrived_at, job.finished_at - job.started_at
        # Time per token, slowed down like the whole request.
        token_s = ran_s * TOKEN_S / job.work_s if job.tokens and job.work_s else 0.0
        ttft_s = took_s if job.is_batch else took_s - token_s * (job.tokens - 1)
        self._ttft.setdefault(job.is_batch, Histogram(TTFT_BOUNDS)).observe(ttft_s)
        if job.tokens > 1 and not job.is_batch:
            self._tpot.setdefault(job.is_batch, Histogram(TPOT_BOUNDS)).observe(token_s)

    async def flush_averages(self) -> None:
        """Renew the averages every `flush_s` until cancelled. They freeze while there are no endpoints."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        # A cold picker has no averages before its first renewal.
        if self._is_cold:
            due += self._config.flush_s
            await asyncio.sleep(self._config.flush_s)
        while True:
            self.flush_now()
            due += self._config.flush_s
            await asyncio.sleep(due - loop.time())

    def flush_now(self) -> None:
        self.refresh_metrics()
        view = self._get_visible_snapshot()
        self._is_cold = False
        self.flushed_at = time.monotonic()
        # The real picker skips the renewal without endpoints, so that old averages stay on the page.
        if view.endpoints > 0:
            self._averages = (
                view.running / view.endpoints,
                view.waiting / view.endpoints,
                self._compute_kv_share(view),
                pstdev(running for running, _ in view.servers),
            )

    def render_page(self) -> bytes:
        """Return the page as text, with the newest names of the series."""
        view = self._get_visible_snapshot()
        servers = self._server_snapshot or view
        config = self._config
        name = f'name="{config.pool}"'
        running, waiting, kv, deviation = self._averages
        gauges = [
            ("average_running_requests", "The average number of running requests", name, running),
            (
                "average_queue_size",
                "The average number of requests pending in the model servers",
                name,
                waiting,
            ),
            ("average_kv_cache_utilization", "The average kv cache utilization", name, kv),
            (
                "std_dev_running_requests",
                "The standard deviation of the number of running requests",
                name,
                deviation,
            ),
            (
                "ready_endpoints",
                "The number of ready endpoints",
                name,
                0 if self._is_cold else view.endpoints,
            ),
            # The picker counts requests from sending to answer, including those that wait in servers.
            ("request_running", "Number of running requests", 'model_name="m"', view.running + view.waiting),
        ]
        for number, (_, queue) in enumerate(servers.servers):
            endpoint = f'{name},model_server_endpoint="server-{number}"'
            gauges.append(("per_endpoint_queue_size", "Queue size of a model server", endpoint, queue))
        if config.flow_control:
            pool = f'inference_pool="{config.pool}"'
            effective = f'{pool},stage="effective"'
            saturation = self._compute_saturation(view if config.detector == "concurrency" else servers)
            gauges.append(
                ("flow_control_pool_saturation", "Saturation that gates dispatch", effective, saturation)
            )
            if config.detector == "utilization":  # the concurrency detector does not read them
                plugin = f'detector="{config.detector_name or "utilization-detector"}"'
                gauges.append(
                    ("flow_control_stale_endpoints", "Endpoints with missing or stale metrics", plugin, 0)
                )
            if self._has_had_requests:  # the real picker creates the series of a flow with its first request
                for priority, queued in zip(PRIORITIES, view.queued, strict=True):
                    flow = f'fairness_id="default",model_name="m",priority="{priority}",target_model_name="m"'
                    gauges.append(
                        ("flow_control_queue_size", "Requests held in the queue", f"{flow},{pool}", queued)
                    )
        if config.in_flight_load and self._has_had_requests:
            for priority, sent in zip(PRIORITIES, view.sent, strict=True):
                for number in range(view.endpoints):
                    flow = (
                        f'endpoint_name="server-{number}",fairness_id="default",namespace="default",'
                        f'priority="{priority}",producer_name="inflight-load-producer"'
                    )
                    share = take_share(sent, number, view.endpoints)
                    gauges.append(("inflight_requests", "In-flight requests per endpoint", flow, share))
        lines: list[str] = []
        described = ""
        for series, text, labels, value in sorted(gauges):
            if series != described:
                lines.append(f"# HELP llm_d_epp_{series} [ALPHA] {text}.\n# TYPE llm_d_epp_{series} gauge")
                described = series
            lines.append(f"llm_d_epp_{series}{{{labels}}} {value:.17g}")
        lines += ["# TYPE process_start_time_seconds gauge"]
        lines.append(f"process_start_time_seconds {self._started_at:.17g}")
        return ("\n".join(lines) + "\n").encode() + self._render_latencies()

    def _render_latencies(self) -> bytes:
        lines: list[str] = []
        for name, text, histograms, has_streaming_label in (
            ("request_ttft_seconds", "Time to first token in seconds", self._ttft, True),
            ("request_streaming_tpot_seconds", "Average time per output token in seconds", self._tpot, False),
        ):
            if histograms:
                lines += [f"# HELP llm_d_epp_{name} [ALPHA] {text}.", f"# TYPE llm_d_epp_{name} histogram"]
            for batch, histogram in sorted(histograms.items()):
                labels = f'fairness_id="default-flow",model_name="m",priority="{PRIORITIES[batch]}",'
                if has_streaming_label:
                    labels += f'streaming="{"false" if batch else "true"}",'
                lines += histogram.format_lines(f"llm_d_epp_{name}", f'{labels}target_model_name="m"')
        return "".join(f"{line}\n" for line in lines).encode()

    def _get_visible_snapshot(self) -> _Snapshot:
        """Return the newest state that is old enough to be shown."""
        visible_at = time.monotonic() - self._config.lag_s
        # Keeps the newest state that is old enough, which may be long ago.
        while len(self._history) > 1 and self._history[1].at <= visible_at:
            self._history.popleft()
        return self._history[0]

    def _compute_kv_share(self, view: _Snapshot) -> float:
        return min(1.0, self._config.kv_at_full * view.running / view.slots) if view.slots else 1.0

    def _compute_saturation(self, view: _Snapshot) -> float:
        if view.endpoints <= 0:
            return 1.0
        if self._config.detector == "concurrency":
            return (view.running + view.waiting) / self.declared if self.declared else 1.0
        return max(view.waiting / view.endpoints / WAITING_AT_FULL, self._compute_kv_share(view) / KV_AT_FULL)
