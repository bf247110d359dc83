"""Series of /metrics about models and their versions."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from dispatcher.features.models.status import ModelsStatus, ModelStatus, VersionStatus
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.series import PREFIX
from dispatcher.telemetry.status import MAX_TABLE_ROWS, Status


def read_values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return the values of the page by name and label values, without the label of the pool."""
    families = text_string_to_metric_families(metrics.render_page()[0].decode())
    return {
        (
            sample.name.removeprefix(PREFIX),
            *(v for k, v in sample.labels.items() if k != "pool"),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_served_versions_have_series_up_to_a_limit() -> None:
    served = VersionStatus("qwen-v2", serving=3, warm=1, share=0.25)
    not_served = VersionStatus("qwen-v1", serving=0, warm=0)
    unwarmed = [VersionStatus(f"b-{n:02}", serving=1) for n in range(MAX_TABLE_ROWS)]
    rows = [
        ModelStatus("qwen", serving=3, waiting=0, versions=[served, not_served]),
        ModelStatus("plain", serving=1, waiting=0),
        ModelStatus("b", serving=1, waiting=0, versions=unwarmed),
    ]
    metrics = Metrics("qwen")
    metrics.set_status_source(lambda: Status(features=[ModelsStatus(rows)]))
    page = read_values(metrics)
    assert page["model_version_endpoints", "qwen", "qwen-v2"] == 3
    assert page["model_version_warm_endpoints", "qwen", "qwen-v2"] == 1
    assert page["model_version_share", "qwen", "qwen-v2"] == 0.25
    assert ("model_version_share", "qwen", "qwen-v1") not in page, (
        "a version that is not served has no series"
    )
    assert ("model_version_warm_endpoints", "b", "b-00") not in page, "the version has no warm-up"
    assert len([name for name, *_ in page if name == "model_version_share"]) == MAX_TABLE_ROWS


def test_counters_are_read_from_the_status() -> None:
    metrics = Metrics("qwen")
    assert read_values(metrics)["model_requests_total", "waits"] == 0
    metrics.set_status_source(lambda: Status(features=[ModelsStatus(model_requests={"waits": 3})]))
    page = read_values(metrics)
    assert (page["model_requests_total", "waits"], page["model_requests_total", "served"]) == (3, 0)
