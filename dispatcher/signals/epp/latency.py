"""Read the latencies of requests: names and labels of the series, and the Prometheus query for them.

New endpoint pickers show both histograms with the priority of the requests, and whether they were streamed.
For a request that was not streamed they take its whole duration as the time to the first token, so such
requests are left out. Older pickers show the histograms only if the latency predictor is on, and by model
only. Model servers (vLLM) know neither the pool nor priorities. Through Prometheus, the series count that the
scrape configuration labels with the name of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dispatcher.limit.realtime_impact import WINDOW_S, Buckets, ReplicaHistograms, Scope
from dispatcher.signals.exposition import OptionalSeries, Sample

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
"""Names of the histograms, in each tuple the newest first."""
NAMES = frozenset(f"{name}_bucket" for name in (*TTFT, *TPOT))
"""Names of all latency series that a picker's page may have."""
MAX_SERIES = 20_000
"""Largest number of series that are read from a page (tenants × priorities × buckets). More would cost too
much CPU time."""
SERIES = OptionalSeries(NAMES, MAX_SERIES, "series of requests' latencies")
ROW_LABEL = "dispatcher_latency"
"""Label that describes a row of `build_latency_query`: kind, scope and name of the histogram."""
OWN_QUERIES = ("ttft", "tpot")


def build_histograms(
    samples: Iterable[Sample], replica: str, *, has_objective: bool, problem: str = ""
) -> ReplicaHistograms:
    """Return the histograms of one page.

    `has_objective` is true if batch requests have an objective, whose priority is negative. `problem` says
    why the samples are incomplete.
    """
    if problem:
        return ReplicaHistograms(replica, why_not=problem, is_flawed=True)
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name.removesuffix("_bucket"), []).append(sample)
    chosen = [next((name for name in names if name in by_name), "") for names in (TTFT, TPOT)]
    if not any(chosen):
        return ReplicaHistograms(replica, why_not=f"the endpoint picker shows no {TTFT[0]}")
    # One series without a priority may include batch requests, and so may the sum.
    realtime = has_objective and all(
        sample.labels.get("priority") for name in chosen if name for sample in by_name[name]
    )
    ttft, tpot = (_sum_buckets(by_name[name], realtime) if name else None for name in chosen)
    of: Scope = "realtime" if realtime else "all"
    return ReplicaHistograms(replica, ttft, tpot, of, next(filter(None, chosen)))


def _sum_buckets(samples: Sequence[Sample], is_realtime_only: bool) -> Buckets:
    """Return the sum of all histograms of one name."""
    streams = any(sample.labels.get("streaming") for sample in samples)
    buckets = {math.inf: 0.0}
    for sample in samples:
        labels = sample.labels
        if (is_realtime_only and labels["priority"].startswith("-")) or (
            streams and labels.get("streaming") != "true"
        ):
            continue
        bound = _parse_bound(labels)
        buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return buckets


def _parse_bound(labels: Mapping[str, str]) -> float:
    """Return the upper bound of a bucket. NaN if it is no number, so that the whole histogram is rejected."""
    try:
        return float(labels.get("le", "").replace("_", "?"))
    except ValueError:
        return math.nan


def build_latency_query(
    pool: str, namespace: str, own_queries: Mapping[str, str], *, has_objective: bool
) -> str:
    """Return one PromQL query for the increase of all histograms in the window, by bucket.

    `pool` and `namespace` are escaped for a regular expression in double quotes. `own_queries` are the
    operator's queries.
    """
    here = f'namespace=~"{namespace}|"'
    ready = " or ".join(
        f'{name}{{name=~"{pool}|",{here}}}'
        for name in ("llm_d_epp_ready_endpoints", "inference_pool_ready_pods")
    )
    # The histograms have no pool label. The join keeps those of targets that show the pool's endpoints.
    target = f" and on (job, instance) ({ready})"
    parts: list[str] = []
    for kind, picker, servers in (("ttft", TTFT, SERVERS_TTFT), ("tpot", TPOT, SERVERS_TPOT)):
        if query := own_queries.get(kind):
            parts.append(_format_row(query, kind, "all", "own query"))
            continue
        for name in picker:
            series = f'{name}_bucket{{{here},streaming=~"true|"'
            if has_objective:
                parts.append(
                    _format_row(
                        _format_increase(f'{series},priority=~"[0-9]+"}}', target), kind, "realtime", name
                    )
                )
            # With an objective, a series without a priority includes all requests. Without an objective,
            # every series does.
            rest = ',priority=""}' if has_objective else "}"
            parts.append(_format_row(_format_increase(series + rest, target), kind, "all", name))
        for name in servers:
            series = f'{name}_bucket{{{here},inference_pool="{pool}"}}'
            parts.append(_format_row(_format_increase(series, ""), kind, "all", name))
    return " or ".join(parts)


def _format_increase(series: str, target: str) -> str:
    return f"sum by (le) (increase({series}[{WINDOW_S:.0f}s]){target})"


def _format_row(query: str, kind: str, scope: str, name: str) -> str:
    return f'label_replace((\n{query}\n), "{ROW_LABEL}", "{kind}/{scope}/{name}", "", "")'


def parse_latency_rows(rows: Sequence[Sample]) -> ReplicaHistograms:
    """Return the histograms in the answer to `build_latency_query`.

    For each kind, the first row that has requests counts, or else the first row.
    """
    found: dict[str, dict[str, dict[float, float]]] = {kind: {} for kind in OWN_QUERIES}
    for row in rows:
        kind, _, whose = row.labels.get(ROW_LABEL, "").partition("/")
        if kind in found:
            buckets = found[kind].setdefault(whose, {})
            bound = _parse_bound(row.labels)
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
        return ReplicaHistograms("", why_not=why)
    return ReplicaHistograms(
        "",
        found["ttft"].get(chosen["ttft"]),
        found["tpot"].get(chosen["tpot"]),
        scope="realtime" if all(whose.startswith("realtime/") for whose in names) else "all",
        series_name=names[0].partition("/")[2],
    )
