"""Where the latencies of requests are shown: series, labels, and the query for them.

The picker's newest pages have both histograms with each request's priority and whether it was streamed; what
was not streamed has its whole duration for a time to the first token, and is left out. Older pickers show
them where the latency predictor is on, by model alone. Model servers (vLLM) know neither pool nor priority:
through Prometheus those count that the scrape labels with our pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dispatcher.core.limit.realtime_impact import WINDOW_S, Buckets, Histograms, Of
from dispatcher.signals.exposition import Sample

TTFT = ("llm_d_epp_request_ttft_seconds", "inference_objective_request_ttft_seconds")
TPOT = (
    "llm_d_epp_request_streaming_tpot_seconds",
    "llm_d_epp_request_tpot_seconds",
    "inference_objective_request_tpot_seconds",
)
SERVERS_TTFT = ("vllm:time_to_first_token_seconds",)
SERVERS_TPOT = (
    "vllm:request_time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
)
"""Of each the newest first."""
NAMES = frozenset(f"{name}_bucket" for name in (*TTFT, *TPOT))
"""The series of a page."""
SERIES_MOST = 20_000
"""Tenants × priorities × buckets: more are not worth their price."""
ROW = "dispatcher_latency"
"""The label that says what a row of `latency_query` is of: kind, whose, and name."""
OWN_QUERIES = ("ttft", "tpot")


def histograms(samples: Iterable[Sample], replica: str, *, marked: bool, spoiled: str = "") -> Histograms:
    """What one page shows. `marked`: our requests carry an objective, which is to say a negative priority.

    `spoiled`: why the samples are not all that the page has.
    """
    if spoiled:
        return Histograms(replica, why_not=spoiled, flawed=True)
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name.removesuffix("_bucket"), []).append(sample)
    chosen = [next((name for name in names if name in by_name), "") for names in (TTFT, TPOT)]
    if not any(chosen):
        return Histograms(replica, why_not=f"the endpoint picker shows no {TTFT[0]}")
    realtime = marked and all(
        sample.labels.get("priority") for name in chosen if name for sample in by_name[name]
    )
    ttft, tpot = (_sum(by_name[name], realtime) if name else None for name in chosen)
    of: Of = "realtime" if realtime else "all"
    return Histograms(replica, ttft, tpot, of, next(filter(None, chosen)))


def _sum(samples: Sequence[Sample], realtime: bool) -> Buckets:
    """A family's histograms, added up."""
    streams = any(sample.labels.get("streaming") for sample in samples)
    buckets = {math.inf: 0.0}
    for sample in samples:
        labels = sample.labels
        if (realtime and labels["priority"].startswith("-")) or (
            streams and labels.get("streaming") != "true"
        ):
            continue
        bound = _bound(labels)
        buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return buckets


def _bound(labels: Mapping[str, str]) -> float:
    """NaN where it is no bound; that is refused with its histogram."""
    try:
        return float(labels.get("le", "").replace("_", "?"))
    except ValueError:
        return math.nan


def latency_query(pool: str, namespace: str, own: Mapping[str, str], *, marked: bool) -> str:
    """One PromQL query for what all histograms grew by in the window, by bucket.

    `pool`, `namespace`: as they stand in a regular expression within quotes. `own`: the operator's queries.
    """
    here = f'namespace=~"{namespace}|"'
    ready = " or ".join(
        f'{name}{{name=~"{pool}|",{here}}}'
        for name in ("llm_d_epp_ready_endpoints", "inference_pool_ready_pods")
    )
    target = f" and on (job, instance) ({ready})"
    parts: list[str] = []
    for kind, picker, servers in (("ttft", TTFT, SERVERS_TTFT), ("tpot", TPOT, SERVERS_TPOT)):
        if query := own.get(kind):
            parts.append(_row(query, kind, "all", "own query"))
            continue
        for name in picker:
            series = f'{name}_bucket{{{here},streaming=~"true|"'
            if marked:
                parts.append(_row(_grown(f'{series},priority=~"[0-9]+"}}', target), kind, "realtime", name))
            # With an objective what tells no priority is everybody's; without one everything is.
            rest = ',priority=""}' if marked else "}"
            parts.append(_row(_grown(series + rest, target), kind, "all", name))
        for name in servers:
            series = f'{name}_bucket{{{here},inference_pool="{pool}"}}'
            parts.append(_row(_grown(series, ""), kind, "all", name))
    return " or ".join(parts)


def _grown(series: str, target: str) -> str:
    return f"sum by (le) (increase({series}[{WINDOW_S:.0f}s]){target})"


def _row(query: str, kind: str, of: str, name: str) -> str:
    return f'label_replace((\n{query}\n), "{ROW}", "{kind}/{of}/{name}", "", "")'


def grown(rows: Sequence[Sample]) -> Histograms:
    """What the answer to `latency_query` says: of each kind the first that has requests, or else series."""
    found: dict[str, dict[str, dict[float, float]]] = {kind: {} for kind in OWN_QUERIES}
    for row in rows:
        kind, _, whose = row.labels.get(ROW, "").partition("/")
        if kind in found:
            buckets = found[kind].setdefault(whose, {})
            bound = _bound(row.labels)
            buckets[bound] = buckets.get(bound, 0.0) + row.value
    chosen = {
        kind: next(
            (whose for whose, buckets in sides.items() if buckets.get(math.inf, 0.0) > 0),
            next(iter(sides), ""),
        )
        for kind, sides in found.items()
    }
    names = [whose for whose in chosen.values() if whose]
    if not names:
        why = (
            f"Prometheus has no {TTFT[0]} of the pool, and no {SERVERS_TTFT[0]} with its label inference_pool"
        )
        return Histograms("", why_not=why)
    return Histograms(
        "",
        found["ttft"].get(chosen["ttft"]),
        found["tpot"].get(chosen["tpot"]),
        of="realtime" if all(whose.startswith("realtime/") for whose in names) else "all",
        name=names[0].partition("/")[2],
    )
