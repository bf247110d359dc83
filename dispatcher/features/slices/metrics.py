"""Series of /metrics about slices."""

from __future__ import annotations

from dispatcher.features.slices.eligibility import WholeReason
from dispatcher.features.slices.status import SlicingStatus
from dispatcher.telemetry.series import SeriesList

PLACE = 3
SERIES = SeriesList()

SERIES.add_gauge(
    "started",
    lambda s: s.get_section(SlicingStatus).started,
    "Pending requests with a part of the answer from earlier slices",
    follows="delayed",
)
SERIES.add_counter(
    "slices",
    "Answers to slices of long generations, by what followed; `restarted`: the request is sent again, whole",
    lambda s: s.get_section(SlicingStatus).slices,
    result=("continued", "finished", "restarted"),
)
SERIES.add_counter(
    "revoked_slices",
    "Slices that were ended early, because realtime requests waited",
    lambda s: s.get_section(SlicingStatus).revoked_slices,
)
SERIES.add_counter(
    "slice_tokens",
    "Tokens that slices have generated",
    lambda s: s.get_section(SlicingStatus).slice_tokens,
)
SERIES.add_counter(
    "whole_requests",
    "Requests that were sent whole while slicing is on, by the reason (docs/how-to/slices.md)",
    lambda s: s.get_section(SlicingStatus).whole_requests,
    reason=tuple(WholeReason),
)
