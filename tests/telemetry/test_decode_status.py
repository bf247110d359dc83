"""/status is decoded into the classes that it was made from, also if its dispatcher is of another version."""

from __future__ import annotations

import msgspec
import pytest

from dispatcher.features.merging.status import BatchingStatus, MergeTargetStatus
from dispatcher.features.models.status import LabelStatus, ModelsStatus, ModelStatus, VersionStatus
from dispatcher.limit.health import Health
from dispatcher.telemetry.status import (
    BudgetStatus,
    GateStatus,
    HealthStatus,
    ProcessStatus,
    QueueStatus,
    ReadingStatus,
    ReplicaStatus,
    SignalsStatus,
    Status,
    Terms,
    decode_status,
)

STATUS = Status(
    ProcessStatus("1", "3.11", "qwen", "batch:{qwen}:requests", "one", observe=True, started_at=7.5),
    GateStatus("full", True, "It is full.", 16, 16, 4, 0.5, "refused", problems=["a problem"]),
    BudgetStatus(0.05, "requests", max_sys=64.0, terms=[Terms("requests", 0.5, 0.1, 0.4, 2, 64.0)]),
    SignalsStatus(
        "epp", 0.3, readings=[ReadingStatus("requests", 0.3, 0.1, 0.5, 0.1, 64.0, "epp", {"q": 8.0})]
    ),
    queue=QueueStatus(pending=7, paused=True, replicas=[ReplicaStatus("one", 4, None)]),
    health=HealthStatus(Health.DEGRADED, "failures", "Some fail.", 3.0, "the log"),
    features=(
        BatchingStatus([MergeTargetStatus("/v1/embeddings", "m", size=16)], 1, {"answered": 2}),
        ModelsStatus(
            [
                ModelStatus(
                    "qwen",
                    serving=2,
                    labels={"stable": LabelStatus("3", "ann")},
                    versions=[VersionStatus("qwen-v3", "3", labels=["stable"])],
                )
            ]
        ),
    ),
)


def test_encoded_status_is_decoded_to_an_equal_one() -> None:
    text = msgspec.json.encode(STATUS.to_dict())
    status = decode_status(msgspec.json.decode(text))
    assert msgspec.json.encode(status.to_dict()) == text
    assert (status.process, status.signals, status.queue) == (STATUS.process, STATUS.signals, STATUS.queue)
    assert status.get_section(ModelsStatus).models[0].labels == {"stable": LabelStatus("3", "ann")}


def test_missing_and_unknown_fields_are_ignored() -> None:
    status = decode_status({"limit": 5, "a field of tomorrow": [1]})
    assert status == Status(gate=GateStatus(limit=5))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", "many"),
        ("health", "a health of tomorrow"),
        ("impact_scope", "a scope of tomorrow"),
        ("replicas", [{"owner": 7}]),
        ("models", "all"),
        ("sequences", {"active": None}),
    ],
)
def test_field_that_cannot_be_read_has_its_default_and_spoils_no_other(field: str, value: object) -> None:
    assert decode_status({field: value, "in_flight": 3}) == Status(gate=GateStatus(in_flight=3))


def test_section_of_a_feature_that_the_dispatcher_lacks_has_defaults() -> None:
    status = decode_status({"limit": 5, "batching_waiting": 2})
    assert status.features == (BatchingStatus(batching_waiting=2),)
    assert status.get_section(ModelsStatus) == ModelsStatus()


def test_unknown_field_inside_an_entry_is_ignored() -> None:
    replica = {"owner": "one", "leases": 4, "zone": "a"}
    assert decode_status({"replicas": [replica]}).queue.replicas == [ReplicaStatus("one", 4)]
