"""How a pool's load was over hours, from Prometheus: what an operator would export by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dispatcher.signals.prometheus.session import PrometheusAddress, QuerySession, connected

RUNNING = (
    "sum(vllm:num_requests_running)",
    "sum(sglang:num_running_reqs)",
    "sum(trtllm_num_requests_running)",
)
"""Running requests, by model server."""
STEP_LEAST_S = 15
POINTS_MOST = 10_000
"""Prometheus refuses more than 11,000 points of a series at once."""
TIMEOUT_S = 60.0


def running(
    address: PrometheusAddress, queries: Sequence[str], end: float, last_s: float
) -> Sequence[Mapping[str, Any]]:
    """The series of the first query that has any, over so many seconds until `end` (Unix time). Raises
    QueryError."""
    session = QuerySession(address, TIMEOUT_S, result="matrix")
    try:
        client = connected(address, session)
        step_s = max(STEP_LEAST_S, -(-int(last_s) // POINTS_MOST))
        begin = datetime.fromtimestamp(end - last_s, UTC)
        for query in queries:
            found: Sequence[Mapping[str, Any]] = client.custom_query_range(
                query,
                begin,
                datetime.fromtimestamp(end, UTC),
                str(step_s),
                params={"timeout": f"{TIMEOUT_S:g}", "partial_response": "false"},
            )
            if found:
                return found
        return ()
    finally:
        session.close()
