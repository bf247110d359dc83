"""Cases in which an alert fires, and cases in which none does. `test_alerts.py` runs them with promtool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dispatcher.features.merging.status import BatchingStatus, MergeTargetStatus
from dispatcher.features.models.status import ModelsStatus, ModelStatus
from dispatcher.features.sequences.status import SEQUENCE_COUNTS, SequencesStatus
from dispatcher.features.slices.status import SlicingStatus
from dispatcher.telemetry.status import (
    BudgetStatus,
    GateStatus,
    ImpactStatus,
    ProcessStatus,
    QueueStatus,
    SignalsStatus,
    Status,
    Terms,
)

MERGED = MergeTargetStatus(
    "/v1/embeddings", "bge-m3", "embeddings", "auto", size=16, gain=4.2, checked_calls=3, sentence="…"
)
IDLE = Status(
    process=ProcessStatus("1.0", "3.11", "qwen", "batch:{qwen}:requests", "me", observe=False, started_at=0.0),
    gate=GateStatus("idle", True, "…", 30, 0, 0, 30.0, None),
    budget=BudgetStatus(
        0.05, "saturation", 0.2, 0.0, 0.75, 24, 32.0, "picker", terms=[Terms("saturation", 0.2, 0.0, 0.75, 24, 32.0)]
    ),
    signals=SignalsStatus("epp", 0.3),
    queue=QueueStatus(pending=0, leased=0, delayed=0, dead=3, replica_count=2),
    impact=ImpactStatus(batch_share=0.0),
    features=(
        SequencesStatus(dict.fromkeys(SEQUENCE_COUNTS, 0)), ModelsStatus([ModelStatus("qwen", serving=2, waiting=0)]),
        SlicingStatus(started=0), BatchingStatus([MERGED]),
    ),
)  # fmt: skip
REPLICAS = ("a:8080", "b:8080")
MERGING_OFF = 'merge_off{model="bge-m3",path="/v1/embeddings"}'
SCRAPE_S = 30

Changes = Mapping[str, str | None]
"""Series as on the metrics page, without the pool → values in the notation of promtool; `None` if it is
absent."""
Fires = Mapping[str, str]
"""Alert → its labels other than namespace and pool, as comma-separated `name=value`."""


@dataclass(frozen=True)
class Case:
    name: str
    changes: Changes
    fires: Fires
    """Alerts that fire and notify."""
    at: str
    """Time at which the alerts fire. If `fires` is empty, no alert fires until then."""
    silent_at: str = ""
    """Time at which no alert fires yet."""
    replicas: tuple[str, ...] = REPLICAS
    """Replicas that have the changes."""
    only_changes: bool = False
    """Whether `changes` are the only series."""
    disappears: bool = False
    """Whether the series disappear after ten minutes."""
    interval_s: int = SCRAPE_S
    extra: Changes = field(default_factory=dict)
    """Series that belong to no replica, with all labels."""
    has_pool_labels: bool = True
    """Whether the alerts have the labels namespace and pool."""
    silenced: Fires = field(default_factory=dict)
    """Alerts that fire and are silenced, because they follow from those of `fires`."""

    def labels_of(self, alert: str) -> dict[str, str]:
        """Return the labels with which an alert of `fires` or `silenced` fires."""
        pool_labels = {"namespace": "batch", "pool": "qwen"} if self.has_pool_labels else {}
        extra_labels = {**self.fires, **self.silenced}[alert]
        return {
            "alertname": alert,
            **pool_labels,
            **dict(each.split("=") for each in extra_labels.split(",") if each),
        }


def gate_series(**shares: float) -> dict[str, str]:
    """Return the series of the gate by the share of time of each reason."""
    series = {
        f'gate_seconds_total{{reason="{name.replace("_", "-")}"}}': rising(share)
        for name, share in shares.items()
    }
    return {'gate_seconds_total{reason="idle"}': "0x4000", **series}


def series_until_fault(**gate_after: float) -> dict[str, str]:
    """Return the series of a pool that answers a request per second for 10 minutes, and none after that."""
    return {
        **WAITING_REQUESTS,
        **{
            name: values if "idle" in name else f"0x20 {values}"
            for name, values in gate_series(**gate_after).items()
        },
        DELIVERED: "0+30x20 600x4000",
        "deadline_slack_seconds": "900-30x4000",
    }


def rising(per_second: float, interval_s: int = SCRAPE_S) -> str:
    return f"0+{per_second * interval_s:g}x4000"


WAITING_REQUESTS = {"pending": "50x4000"}
DELIVERED = 'attempts_total{outcome="delivered",status="2xx"}'
REFUSED = 'attempts_total{outcome="overloaded",status="4xx"}'
FAILED = 'attempts_total{outcome="failed",status="5xx"}'
UNREACHABLE = 'attempts_total{outcome="unreachable",status="none"}'
DEAD_LETTERED = 'leases_ended_total{answer="done",completion="dead-letter"}'
CASES = [
    # No requests are sent.
    Case("no dispatcher was ever scraped", {}, {"BatchDispatcherDown": ""}, "6m", "4m", only_changes=True, has_pool_labels=False),
    Case(
        "the pool's dispatchers are gone", {}, {"BatchDispatcherDown": ""}, "18m", "12m", disappears=True,
    ),
    Case(
        "one pool's are gone, another's are not", {}, {"BatchDispatcherDown": ""}, "18m", "12m", disappears=True,
        extra={'batch_dispatcher_build_info{job="batch-dispatcher",instance="c",namespace="batch",pool="other"}': "1x4000"},
    ),
    Case(
        "all are gone, and are still scraped", {"up": "1x20 0x4000"}, {"BatchDispatcherDown": ""}, "18m", "12m", disappears=True,
        silenced={"BatchDispatcherReplicaDown": "job=batch-dispatcher"},
    ),
    Case(
        "the dispatcher never started", {}, {"BatchDispatcherDown": ""}, "6m", "4m", only_changes=True,
        extra={'up{job="batch-dispatcher",instance="a:8080"}': "0x4000"}, has_pool_labels=False,
        silenced={"BatchDispatcherReplicaDown": "job=batch-dispatcher"},
    ),
    Case(
        "the dispatcher never started in its namespace", {}, {"BatchDispatcherDown": ""}, "6m", "4m", only_changes=True,
        extra={'up{job="batch-dispatcher",instance="a:8080",namespace="batch"}': "0x4000"}, has_pool_labels=False,
        silenced={"BatchDispatcherReplicaDown": "job=batch-dispatcher,namespace=batch"},
    ),
    Case(
        "two replicas of another job's name do not answer", {}, {"BatchDispatcherReplicaDown": "job=b,pool=other"},
        "20m", "9m",
        extra={f'{name}{{job="b",instance="{n}"{labels}}}': values for n in "cd" for name, labels, values in
               (("up", "", "1x10 0x4000"), ("batch_dispatcher_build_info", ',pool="other"', "1x10 stale"),
                ("batch_dispatcher_build_info", ',pool="other",version="2"', "1x4000"))},
        has_pool_labels=False,
    ),
    Case("one replica is up", {"up": "0x4000"}, {"BatchDispatcherReplicaDown": "job=batch-dispatcher"}, "10m",
         replicas=REPLICAS[:1]),
    Case("the queue is away for one", {'reachable{part="queue"}': "0x4000"}, {"BatchDispatcherQueueUnreachable": ""},
         "7m", replicas=REPLICAS[:1]),
    Case("the queue is away for all, and leases run out meanwhile", {
        **series_until_fault(queue_unreachable=1), "pending": "50x20 stale", "delayed": "0x20 stale",
        "deadline_slack_seconds": "900-30x19 stale", 'reachable{part="queue"}': "1x20 0x4000",
        "leases_lost_total": "0x22 5x4000"}, {"BatchDispatcherQueueUnreachable": ""}, "20m", "11m",
        silenced={"BatchDispatcherLeasesLost": ""}),
    Case("a queue that flaps", {'reachable{part="queue"}': "1 0 " * 40}, {"BatchDispatcherQueueUnreachable": ""}, "7m"),
    Case("a failover", {'reachable{part="queue"}': "1x9 0 1x400"}, {}, "6m"),
    Case("the gateway is away", {'reachable{part="gateway"}': "1x20 0x4000"}, {"BatchDispatcherGatewayUnreachable": ""},
         "16m", "11m"),
    Case("the gateway is away, and work waits", {
        **series_until_fault(gateway_unreachable=1), 'reachable{part="gateway"}': "1x20 0x4000",
        UNREACHABLE: "0x20 0+3x4000", "expired_total": "0x40 0+2x4000"},
        {"BatchDispatcherGatewayUnreachable": ""}, "25m", "11m", silenced=dict.fromkeys(
            ("BatchDispatcherNothingSucceeds", "BatchDispatcherDeadlineNear", "BatchDispatcherDeadlinesMissed"), "")),
    Case("the gateway restarts", {'reachable{part="gateway"}': "1x20 0x2 1x400"}, {}, "14m"),
    Case("signals unreadable for one", {
        'polls_total{result="ok",source="epp"}': "0x4000", 'polls_total{result="unreadable",source="epp"}': rising(1),
        **gate_series(unreadable=1)}, {"BatchDispatcherSignalsUnreadable": ""}, "9m", "3m", replicas=REPLICAS[:1]),
    Case("readings are implausible", gate_series(implausible=1), {"BatchDispatcherSignalsUnreadable": ""}, "9m"),
    Case("signals that alternate between reasons", gate_series(unreadable=0.3, stale=0.3, idle=0.4),
         {"BatchDispatcherSignalsUnreadable": ""}, "9m"),
    Case("a fifth of the polls fail", {
        'polls_total{result="ok",source="epp"}': rising(0.8),
        'polls_total{result="unreadable",source="epp"}': rising(0.2)}, {}, "60m"),
    Case("no poll ends", {**gate_series(stale=1), "reading_age_seconds": "0+30x4000",
         'polls_total{result="ok",source="epp"}': "0x4000"}, {"BatchDispatcherSignalsUnreadable": ""}, "6m", "3m"),
    Case("signals are gone, and work waits", {
        **series_until_fault(unreadable=1), "reading_age_seconds": "0x20 0+30x4000", "expired_total": "0x40 0+2x4000",
        'polls_total{result="ok",source="epp"}': "0+30x20 600x4000",
        'polls_total{result="unreadable",source="epp"}': "0x20 0+30x4000",
        'reachable{part="signals"}': "1x20 0x4000"},
        {"BatchDispatcherSignalsUnreadable": ""}, "25m", "11m", silenced=dict.fromkeys(
            ("BatchDispatcherDeadlineNear", "BatchDispatcherDeadlinesMissed"), "")),
    Case("signals were never read, and work waits", {**WAITING_REQUESTS, **gate_series(starting=1),
        'polls_total{result="ok",source="epp"}': "0x4000", 'polls_total{result="unreadable",source="epp"}': rising(1)},
        {"BatchDispatcherSignalsUnreadable": ""}, "22m", silenced={"BatchDispatcherGateClosed": "reason=starting"}),
    Case("no endpoints, and work", {**WAITING_REQUESTS, **gate_series(no_endpoints=1)},
         {"BatchDispatcherGateClosed": "reason=no-endpoints"}, "22m", "14m"),
    Case("no endpoints, and deadlines pass", {**series_until_fault(no_endpoints=1), "expired_total": "0x40 0+2x4000"},
         {"BatchDispatcherGateClosed": "reason=no-endpoints"}, "32m", "11m", silenced=dict.fromkeys(
             ("BatchDispatcherDeadlineNear", "BatchDispatcherDeadlinesMissed"), "")),
    Case("no endpoints at night without work", gate_series(no_endpoints=1), {}, "120m"),
    Case("a queue that is unknown, still starting", {"pending": None, "delayed": None, **gate_series(starting=1)},
         {"BatchDispatcherGateClosed": "reason=starting"}, "22m", "14m"),
    Case("refused again and again", {**WAITING_REQUESTS, **gate_series(backpressure=0.8, open=0.2)},
         {"BatchDispatcherGateClosed": "reason=backpressure"}, "22m"),
    Case("refused at each opening", {**WAITING_REQUESTS, **gate_series(backpressure=0.8, open=0.2), REFUSED: rising(0.1), DELIVERED: rising(0.9)},
         {"BatchDispatcherRefusals": ""}, "22m", silenced={"BatchDispatcherGateClosed": "reason=backpressure"}),
    Case("refused now and then", {**WAITING_REQUESTS, **gate_series(backpressure=0.1, full=0.9), "running": "3x4000"}, {}, "60m"),
    Case("realtime uses the whole pool", {**WAITING_REQUESTS, **gate_series(no_room=1)}, {"BatchDispatcherStarved": "reason=no-room"}, "370m", "300m"),
    Case("a busy day without work", gate_series(no_room=1), {}, "420m"),
    Case("left paused", {**WAITING_REQUESTS, "paused": "1x4000", **gate_series(paused=1)}, {"BatchDispatcherPaused": ""}, "250m", "230m"),
    Case("paused without work", {"paused": "1x4000", **gate_series(paused=1)}, {}, "420m"),
    Case("only observed", {"observing": "1x4000", 'build_info{python="3.11",version="1.0"}': "1x4000"},
         {"BatchDispatcherObserving": ""}, "193h", "190h", interval_s=300, only_changes=True),
    Case("open, with work, and nothing is sent", {**WAITING_REQUESTS, **gate_series(open=1)}, {"BatchDispatcherNothingSucceeds": ""},
         "12m", "8m"),
    Case("every attempt is refused", {**series_until_fault(backpressure=0.9, open=0.1), REFUSED: "0x20 0+30x4000",
         "delayed": "0x20 100+30x4000", "deadline_slack_seconds": "20000-30x4000", "deadline_at_risk": "0x22 99x4000"},
         {"BatchDispatcherNothingSucceeds": ""}, "31m", silenced={
             "BatchDispatcherRefusals": "", "BatchDispatcherGateClosed": "reason=backpressure"}),
    Case("every attempt fails, and requests are dead-lettered", {**series_until_fault(open=1), FAILED: "0x20 0+30x4000",
         DEAD_LETTERED: "0x28 0+4x4000", "delayed": "0x20 100x4000", "expired_total": "0x40 0+2x4000"},
         {"BatchDispatcherNothingSucceeds": ""}, "22m", silenced=dict.fromkeys((
             "BatchDispatcherDeadRequests", "BatchDispatcherDeadlineNear", "BatchDispatcherDeadlinesMissed"), "")),
    Case("all that are left are delayed, and fail", {**series_until_fault(idle=1), "pending": "50x20 0x4000",
         "delayed": "3x4000", FAILED: "0x20 0+1x4000", "deadline_slack_seconds": None},
         {"BatchDispatcherNothingSucceeds": ""}, "22m", "18m"),
    Case("some attempts fail, and others succeed", {**WAITING_REQUESTS, **gate_series(open=1), FAILED: rising(1), DELIVERED: rising(0.1)}, {}, "60m"),
    Case("two requests fail until they are dead", {**gate_series(idle=1), "delayed": "0x10 2x8 0x4000", FAILED: "0x10 0+2x7 16x4000"},
         {}, "60m"),
    Case("a long request runs, others are refused, all in turn", {**WAITING_REQUESTS, **gate_series(full=1), "running": "1x4000",
         REFUSED: "0x18 2x4000", DELIVERED: "0x8 1x8 2x8 3x8 4x8 5x8 6x4000"}, {}, "28m"),
    Case("all that wait are in sequences that are held", {**WAITING_REQUESTS, **gate_series(idle=1), "sequences_held": "3x4000",
         "sequences_waiting": "50x4000"}, {"BatchDispatcherSequencesHeld": ""}, "62m", "58m"),
    Case("an observer does not send", {**WAITING_REQUESTS, **gate_series(open=1), "observing": "1x4000"}, {}, "60m"),
    # Deadlines are missed.
    Case("deadlines at risk", {"deadline_at_risk": "7x4000", DELIVERED: rising(1)},
         {"BatchDispatcherDeadlinesAtRisk": ""}, "13m", "9m"),
    Case("deadlines at risk, some missed, and more and more waits", {"deadline_at_risk": "7x4000", DELIVERED: rising(1),
         "expired_total": "0x40 0+1x4000", "pending": "0+10x4000", **gate_series(full=1), "running": "30x4000"},
         {"BatchDispatcherDeadlinesAtRisk": ""}, "80m", silenced=dict.fromkeys(
             ("BatchDispatcherDeadlinesMissed", "BatchDispatcherBacklogGrowing"), "")),
    Case("nothing is answered, with deadlines hours away", {**series_until_fault(no_room=1), "deadline_at_risk": "0x21 50x4000",
         "deadline_slack_seconds": "21600-30x4000"}, {}, "120m"),
    Case("none is at risk", {"deadline_at_risk": "0x4000"}, {}, "60m"),
    Case("a deadline is near, and nothing is sent", {**WAITING_REQUESTS, "deadline_slack_seconds": "600-30x4000",
         **gate_series(no_room=1)}, {"BatchDispatcherDeadlineNear": ""}, "14m", "6m"),
    Case("a deadline is near, and work is done", {**WAITING_REQUESTS, "deadline_slack_seconds": "100x4000", **gate_series(full=1),
         DELIVERED: rising(1), "running": "9x4000"}, {}, "60m"),
    Case("deadlines are missed", {"expired_total": "0x20 1+1x4000"}, {"BatchDispatcherDeadlinesMissed": ""}, "12m", "9m"),
    Case("missed before the first scrape", {"expired_total": "5x4000"}, {"BatchDispatcherDeadlinesMissed": ""}, "2m",
         replicas=REPLICAS[:1]),
    Case("missed long ago, and a Prometheus that is new", {"expired_total": "5x4000", "start": "-9000x4000"}, {}, "2m"),
    Case("requests are dead-lettered", {DEAD_LETTERED: "0x20 4x4000", "dead": "3x20 7x4000"},
         {"BatchDispatcherDeadRequests": ""}, "15m", "9m", replicas=REPLICAS[:1]),
    Case("dead requests of an earlier dispatcher", {"dead": "9000x4000"}, {}, "120m"),
    Case("dead requests of another dispatcher", {"dead": "3x20 5x4000"}, {"BatchDispatcherDeadRequests": ""}, "15m"),
    Case("dead requests that were requeued", {"dead": "9x20 0x4000"}, {}, "30m"),
    Case("the backlog grows", {"pending": "0+10x4000", **gate_series(full=1), "running": "30x4000",
         DELIVERED: rising(1)}, {"BatchDispatcherBacklogGrowing": ""}, "80m", "55m"),
    Case("one large batch", {"pending": "0x60 9000-20x400", **gate_series(full=1), "running": "30x4000",
         DELIVERED: rising(1)}, {}, "120m"),
    Case("a backlog that is only observed", {"pending": "0+10x4000", **gate_series(open=1), "observing": "1x4000"}, {}, "120m"),
    Case("sequences are held", {"sequences_held": "0x20 3x4000"}, {"BatchDispatcherSequencesHeld": ""}, "72m", "68m"),
    Case("held, and decided within the hour", {"sequences_held": "0x20 3x80 0x400"}, {}, "80m"),
    Case("requests wait for their model", {'model_waiting{model="qwen"}': "0x20 3x4000"},
         {"BatchDispatcherWaitingForModel": ""}, "27m", "23m"),
    Case("all that wait need a model", {**WAITING_REQUESTS, **gate_series(idle=1), 'model_waiting{model="qwen"}': "50x4000"},
         {"BatchDispatcherWaitingForModel": ""}, "60m", "13m"),
    Case("a rollout takes ten minutes", {'model_waiting{model="qwen"}': "0x20 3x20 0x400"}, {}, "40m"),
    # Requests are sent, and something is wrong.
    Case("refusals", {REFUSED: rising(0.1), DELIVERED: rising(0.9)}, {"BatchDispatcherRefusals": ""}, "12m", "3m"),
    Case("two refusals", {REFUSED: "0x20 2x4000"}, {}, "30m"),
    Case("over-full and open", {'f_sys{signal="saturation"}': "1.1x4000", **gate_series(full=1)},
         {"BatchDispatcherGateInert": ""}, "22m", "14m"),
    Case("over-full and closed", {'f_sys{signal="saturation"}': "1.1x4000", **gate_series(no_room=1)}, {}, "60m"),
    Case("full of our work, as it should be", {'f_sys{signal="saturation"}': "0.95x4000", "in_flight": "30x4000",
         **gate_series(full=1)}, {}, "60m"),
    Case("series that do not show our work", {'f_sys{signal="saturation"}': "0.1x4000", "in_flight": "30x4000",
         **gate_series(full=1)}, {"BatchDispatcherGateInert": ""}, "22m"),
    Case("leases are lost", {"leases_lost_total": "0x20 3x4000"}, {"BatchDispatcherLeasesLost": ""}, "12m", "9m"),
    Case("lost before the first scrape", {"leases_lost_total": "3x4000"}, {"BatchDispatcherLeasesLost": ""}, "2m"),
    Case("too little CPU", {"loop_lag_seconds": "0.5x4000"}, {"BatchDispatcherSlow": ""}, "6m", "4m"),
    Case("too little CPU, and leases run out", {"loop_lag_seconds": "9x4000", "leases_lost_total": "0x20 3x4000"},
         {"BatchDispatcherSlow": ""}, "12m", "4m", silenced={"BatchDispatcherLeasesLost": ""}),
    Case("late now and then", {"loop_lag_seconds": "0x9 0.9 0x9 0.9 0x9 0.9 0x400"}, {}, "20m"),
    Case("an internal error", {'events_total{event="internal-error"}': "0x20 1x4000"}, {"BatchDispatcherDefect": ""}, "15m", "9m"),
    Case("merged calls that are answered wrongly", {MERGING_OFF: "0x20 1x4000"}, {"BatchDispatcherMergingOff": ""}, "11m", "9m",
         replicas=REPLICAS[:1]),
    # The configuration is wrong.
    Case("a refused configuration", {"config_refused": "1x4000"}, {"BatchDispatcherConfigRefused": ""}, "6m", "4m"),
    Case("a failing watch", {"watch_failing": "1x4000"}, {"BatchDispatcherWatchFailing": ""}, "11m", "9m"),
    Case("capacities differ", {"per_endpoint": "32x4000", "picker_max_concurrency": "16x4000"},
         {"BatchDispatcherCapacityDiffers": ""}, "11m", "9m"),
    Case("capacities agree", {"per_endpoint": "16x4000", "picker_max_concurrency": "16x4000"}, {}, "60m"),
    Case("only the configured capacity is known", {"per_endpoint": "16x4000"}, {}, "60m"),
    # Nothing is wrong.
    Case("fresh, idle, healthy", {}, {}, "1m", "10m"),
    Case("a quiet night", {}, {}, "480m"),
    Case("a busy half hour", {"pending": "900-10x40 500+20x4000", "delayed": "2x4000", "running": "15x4000",
         "in_flight": "28x4000", 'f_sys{signal="saturation"}': "0.9x4000", DELIVERED: rising(2),
         REFUSED: "0x30 1x30 2x4000", FAILED: "0x20 1x4000", "deadline_at_risk": "0x4000",
         "deadline_slack_seconds": "9000-30x4000", **gate_series(full=0.7, saturated=0.1, no_room=0.15, backpressure=0.05)},
         {}, "30m"),
    Case("one replica is new", {"leases_lost_total": "0x4000"}, {}, "30m", replicas=REPLICAS[:1]),
]  # fmt: skip
