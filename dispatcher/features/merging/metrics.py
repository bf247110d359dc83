"""Series of /metrics about merged calls."""

from __future__ import annotations

from dispatcher.features.merging.status import BatchingStatus
from dispatcher.telemetry.series import SeriesList

PLACE = 1
SERIES = SeriesList()

SERIES.add_counter(
    "merged_calls",
    "Merged calls, by result",
    lambda s: s.get_section(BatchingStatus).batching_calls,
    result=("split", "halved", "unsplittable", "failed"),
)
SERIES.add_counter(
    "merged_requests",
    "Requests that were answered by merged calls",
    lambda s: s.get_section(BatchingStatus).batching_requests,
)
SERIES.add_counter(
    "merge_checks",
    "Single calls that checked answers of merged calls, by result",
    lambda s: s.get_section(BatchingStatus).batching_checks,
    result=("same", "differs", "inconclusive"),
)
SERIES.add_gauge(
    "merge_waiting",
    lambda s: s.get_section(BatchingStatus).batching_waiting,
    "Requests of this process that wait for others to share a call",
)
SERIES.add_table_gauge(
    "merge_size",
    lambda s: s.get_section(BatchingStatus).get_by_path_and_model(lambda each: float(each.size)),
    "Maximum number of items per call in use; 1 if nothing is merged",
    "path",
    "model",
)
SERIES.add_table_gauge(
    "merge_gain",
    lambda s: s.get_section(BatchingStatus).get_by_path_and_model(lambda each: each.gain),
    "Items per unit-second at that size, relative to single calls; absent if not measured",
    "path",
    "model",
)
SERIES.add_table_gauge(
    "merge_off",
    lambda s: s.get_section(BatchingStatus).get_by_path_and_model(
        lambda each: float(each.off_reason is not None)
    ),
    "1 if merging was turned off because answers differed from those of single calls",
    "path",
    "model",
)
SERIES.add_counter(
    "rule_timeouts",
    "Requests that were claimed after the default timeout of their rule, by what happened to them",
    lambda s: s.get_section(BatchingStatus).batching_timeouts,
    action=("reject", "delay"),
)
