"""Export the history of a pool's load from Prometheus, for recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dispatcher.signals.prometheus.session import PrometheusAddress, QuerySession, connect_client

RUNNING_QUERIES = (
    "sum(vllm:num_requests_running)",
    "sum(sglang:num_running_reqs)",
    "sum(trtllm_num_requests_running)",
)
"""Queries for the number of running requests, one for each kind of model server."""
MIN_STEP_S = 15
MAX_POINTS = 10_000
"""Largest number of points per series. Prometheus rejects a query for more than 11,000."""
TIMEOUT_S = 60.0


def query_running(
    address: PrometheusAddress, queries: Sequence[str], end_at: float, last_s: float
) -> Sequence[Mapping[str, Any]]:
    """Return the series of the first query that has any, over the last `last_s` seconds before `end_at`.

    `end_at` is a Unix time. Raises QueryError.
    """
    session = QuerySession(address, TIMEOUT_S, result_type="matrix")
    try:
        client = connect_client(address, session)
        step_s = max(MIN_STEP_S, -(-int(last_s) // MAX_POINTS))
        begin = datetime.fromtimestamp(end_at - last_s, UTC)
        for query in queries:
            found: Sequence[Mapping[str, Any]] = client.custom_query_range(
                query,
                begin,
                datetime.fromtimestamp(end_at, UTC),
                str(step_s),
                params={"timeout": f"{TIMEOUT_S:g}", "partial_response": "false"},
            )
            if found:
                return found
        return ()
    finally:
        session.close()
