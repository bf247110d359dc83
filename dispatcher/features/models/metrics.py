"""Series of /metrics about models and their versions."""

from __future__ import annotations

from dispatcher.features.models.status import ModelsStatus
from dispatcher.telemetry.series import SeriesList

PLACE = 4
SERIES = SeriesList()

SERIES.add_table_gauge(
    "model_endpoints",
    lambda s: s.get_section(ModelsStatus).get_by_model("serving"),
    "Endpoints of the pool that serve the model; absent if models are not watched",
    "model",
)
SERIES.add_table_gauge(
    "model_waiting",
    lambda s: s.get_section(ModelsStatus).get_by_model("waiting"),
    "Requests that wait because their model is not served",
    "model",
)
SERIES.add_counter(
    "model_requests",
    "Decisions about claimed requests that name a model; `denied`: the model server rejected the model",
    lambda s: s.get_section(ModelsStatus).model_requests,
    decision=("served", "waits", "unknown", "denied"),
)
SERIES.add_table_gauge(
    "model_version_endpoints",
    lambda s: s.get_section(ModelsStatus).get_by_version("serving"),
    "Endpoints of the pool that serve the version; absent if none does",
    "model",
    "version",
)
SERIES.add_table_gauge(
    "model_version_warm_endpoints",
    lambda s: s.get_section(ModelsStatus).get_by_version("warm"),
    "Endpoints on which the version is warm; absent if it has no warm-up",
    "model",
    "version",
)
SERIES.add_table_gauge(
    "model_version_share",
    lambda s: s.get_section(ModelsStatus).get_by_version("share"),
    "Share of the requests for the model that are sent to the version; 0 if it gets no new ones",
    "model",
    "version",
)
SERIES.add_counter(
    "warm_ups",
    "Warm-ups of a version on an endpoint, by result; `retry`: the warm-up will be repeated",
    lambda s: s.get_section(ModelsStatus).warm_ups,
    result=("warm", "errors", "retry"),
)
