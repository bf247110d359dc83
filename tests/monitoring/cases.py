"""Worlds in which an alert fires, and worlds in which none does: `test_alerts.py` gives these to promtool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dispatcher.telemetry.status import (
    BatchingStatus,
    BudgetStatus,
    GateStatus,
    ImpactStatus,
    ModelsStatus,
    ProcessStatus,
    QueueStatus,
    SequencesStatus,
    SignalsStatus,
    Status,
    Terms,
)

MERGED = {
    "path": "/v1/embeddings", "model": "bge-m3", "shape": "embeddings", "mode": "auto", "size": 16, "server_max_items": None,
    "gain": 4.2, "checked_calls": 3, "off_reason": None, "sentence": "…",
}  # fmt: skip
IDLE = Status(
    process=ProcessStatus("1.0", "3.11", "qwen", "batch:{qwen}:requests", "me", observe=False, started_at=0.0),
    gate=GateStatus("idle", True, "…", 30, 0, 0, 30.0, None),
    budget=BudgetStatus(
        0.05, "saturation", 0.2, 0.0, 0.75, 24, 32.0, "picker", terms=[Terms("saturation", 0.2, 0.0, 0.75, 24, 32.0)]
    ),
    signals=SignalsStatus("epp", 0.3),
    queue=QueueStatus(pending=0, leased=0, delayed=0, dead=3, replica_count=2),
    impact=ImpactStatus(batch_share=0.0),
    batching=BatchingStatus([MERGED]),
    sequences=SequencesStatus(dict.fromkeys(("active", "parked", "held", "aborted", "waiting"), 0)),
    models=ModelsStatus([{"name": "qwen", "serving": 2, "waiting": 0}]),
)  # fmt: skip
REPLICAS = ("a:8080", "b:8080")
OFF = 'merge_off{model="bge-m3",path="/v1/embeddings"}'
SCRAPE_S = 30

Changes = Mapping[str, str | None]
"""Series as the page writes it, without the pool → values in promtool's notation; None: it is not there."""
Fires = Mapping[str, str]
"""Alert → its labels beside namespace and pool, as `name=value` with commas in between."""


@dataclass(frozen=True)
class Case:
    about: str
    changes: Changes
    fires: Fires
    """Alerts that fire and notify."""
    at: str
    """Time at which they fire. With `fires` empty, none fires until then."""
    not_at: str = ""
    """When nothing fires yet."""
    only: tuple[str, ...] = REPLICAS
    """The replicas that it is different for."""
    bare: bool = False
    """Nothing is there but `changes`."""
    vanish: bool = False
    """They are there for ten minutes."""
    every_s: int = SCRAPE_S
    extra: Changes = field(default_factory=dict)
    """Series that are no replica's: written out, labels and all."""
    pooled: bool = True
    """The alerts name namespace and pool."""
    silenced: Fires = field(default_factory=dict)
    """Alerts that fire as well and notify nobody, because they follow from those of `fires`."""

    def labels_of(self, alert: str) -> dict[str, str]:
        """Return the labels with which an alert of `fires` or `silenced` fires."""
        where = {"namespace": "batch", "pool": "qwen"} if self.pooled else {}
        more = {**self.fires, **self.silenced}[alert]
        return {"alertname": alert, **where, **dict(each.split("=") for each in more.split(",") if each)}


def gate(**shares: float) -> dict[str, str]:
    """The gate's reasons by their share of the time."""
    told = {
        f'gate_seconds_total{{reason="{name.replace("_", "-")}"}}': rising(share)
        for name, share in shares.items()
    }
    return {'gate_seconds_total{reason="idle"}': "0x4000", **told}


def until_fault(**gate_after: float) -> dict[str, str]:
    """Return the series of a pool that answers a request per second for 10 minutes, and none after that."""
    return {
        **WORK,
        **{
            name: values if "idle" in name else f"0x20 {values}"
            for name, values in gate(**gate_after).items()
        },
        DELIVERED: "0+30x20 600x4000",
        "deadline_slack_seconds": "900-30x4000",
    }


def rising(a_second: float, every_s: int = SCRAPE_S) -> str:
    return f"0+{a_second * every_s:g}x4000"


WORK = {"pending": "50x4000"}
DELIVERED = 'attempts_total{outcome="delivered",status="2xx"}'
REFUSED = 'attempts_total{outcome="overloaded",status="4xx"}'
FAILED = 'attempts_total{outcome="failed",status="5xx"}'
UNREACHABLE = 'attempts_total{outcome="unreachable",status="none"}'
BURIED = 'leases_ended_total{answer="done",completion="dead-letter"}'
CASES = [
    # Nothing is sent.
    Case("nothing of ours was ever seen", {}, {"BatchDispatcherDown": ""}, "6m", "4m", bare=True, pooled=False),
    Case(
        "the pool's dispatchers are gone", {}, {"BatchDispatcherDown": ""}, "18m", "12m", vanish=True,
    ),
    Case(
        "one pool's are gone, another's are not", {}, {"BatchDispatcherDown": ""}, "18m", "12m", vanish=True,
        extra={'batch_dispatcher_build_info{job="batch-dispatcher",instance="c",namespace="batch",pool="other"}': "1x4000"},
    ),
    Case(
        "all are gone, and are scraped on", {"up": "1x20 0x4000"}, {"BatchDispatcherDown": ""}, "18m", "12m", vanish=True,
        silenced={"BatchDispatcherReplicaDown": "job=batch-dispatcher"},
    ),
    Case(
        "it never came up", {}, {"BatchDispatcherDown": ""}, "6m", "4m", bare=True,
        extra={'up{job="batch-dispatcher",instance="a:8080"}': "0x4000"}, pooled=False,
        silenced={"BatchDispatcherReplicaDown": "job=batch-dispatcher"},
    ),
    Case(
        "it never came up in its namespace", {}, {"BatchDispatcherDown": ""}, "6m", "4m", bare=True,
        extra={'up{job="batch-dispatcher",instance="a:8080",namespace="batch"}': "0x4000"}, pooled=False,
        silenced={"BatchDispatcherReplicaDown": "job=batch-dispatcher,namespace=batch"},
    ),
    Case(
        "two replicas of another job's name do not answer", {}, {"BatchDispatcherReplicaDown": "job=b,pool=other"},
        "20m", "9m",
        extra={f'{name}{{job="b",instance="{n}"{labels}}}': values for n in "cd" for name, labels, values in
               (("up", "", "1x10 0x4000"), ("batch_dispatcher_build_info", ',pool="other"', "1x10 stale"),
                ("batch_dispatcher_build_info", ',pool="other",version="2"', "1x4000"))},
        pooled=False,
    ),
    Case("one replica is up", {"up": "0x4000"}, {"BatchDispatcherReplicaDown": "job=batch-dispatcher"}, "10m",
         only=REPLICAS[:1]),
    Case("the queue is away for one", {'reachable{part="queue"}': "0x4000"}, {"BatchDispatcherQueueUnreachable": ""},
         "7m", only=REPLICAS[:1]),
    Case("the queue is away for all, and leases run out meanwhile", {
        **until_fault(queue_unreachable=1), "pending": "50x20 stale", "delayed": "0x20 stale",
        "deadline_slack_seconds": "900-30x19 stale", 'reachable{part="queue"}': "1x20 0x4000",
        "leases_lost_total": "0x22 5x4000"}, {"BatchDispatcherQueueUnreachable": ""}, "20m", "11m",
        silenced={"BatchDispatcherLeasesLost": ""}),
    Case("a queue that flaps", {'reachable{part="queue"}': "1 0 " * 40}, {"BatchDispatcherQueueUnreachable": ""}, "7m"),
    Case("a failover", {'reachable{part="queue"}': "1x9 0 1x400"}, {}, "6m"),
    Case("the gateway is away", {'reachable{part="gateway"}': "1x20 0x4000"}, {"BatchDispatcherGatewayUnreachable": ""},
         "16m", "11m"),
    Case("the gateway is away, and work waits", {
        **until_fault(gateway_unreachable=1), 'reachable{part="gateway"}': "1x20 0x4000",
        UNREACHABLE: "0x20 0+3x4000", "expired_total": "0x40 0+2x4000"},
        {"BatchDispatcherGatewayUnreachable": ""}, "25m", "11m", silenced=dict.fromkeys(
            ("BatchDispatcherNothingSucceeds", "BatchDispatcherDeadlineNear", "BatchDispatcherDeadlinesMissed"), "")),
    Case("the gateway restarts", {'reachable{part="gateway"}': "1x20 0x2 1x400"}, {}, "14m"),
    Case("signals unreadable for one", {
        'polls_total{result="ok",source="epp"}': "0x4000", 'polls_total{result="unreadable",source="epp"}': rising(1),
        **gate(unreadable=1)}, {"BatchDispatcherSignalsUnreadable": ""}, "9m", "3m", only=REPLICAS[:1]),
    Case("readings are implausible", gate(implausible=1), {"BatchDispatcherSignalsUnreadable": ""}, "9m"),
    Case("they flap between reasons", gate(unreadable=0.3, stale=0.3, idle=0.4),
         {"BatchDispatcherSignalsUnreadable": ""}, "9m"),
    Case("a fifth of the polls fail", {
        'polls_total{result="ok",source="epp"}': rising(0.8),
        'polls_total{result="unreadable",source="epp"}': rising(0.2)}, {}, "60m"),
    Case("no poll ends", {**gate(stale=1), "reading_age_seconds": "0+30x4000",
         'polls_total{result="ok",source="epp"}': "0x4000"}, {"BatchDispatcherSignalsUnreadable": ""}, "6m", "3m"),
    Case("signals are gone, and work waits", {
        **until_fault(unreadable=1), "reading_age_seconds": "0x20 0+30x4000", "expired_total": "0x40 0+2x4000",
        'polls_total{result="ok",source="epp"}': "0+30x20 600x4000",
        'polls_total{result="unreadable",source="epp"}': "0x20 0+30x4000",
        'reachable{part="signals"}': "1x20 0x4000"},
        {"BatchDispatcherSignalsUnreadable": ""}, "25m", "11m", silenced=dict.fromkeys(
            ("BatchDispatcherDeadlineNear", "BatchDispatcherDeadlinesMissed"), "")),
    Case("signals were never read, and work waits", {**WORK, **gate(starting=1),
        'polls_total{result="ok",source="epp"}': "0x4000", 'polls_total{result="unreadable",source="epp"}': rising(1)},
        {"BatchDispatcherSignalsUnreadable": ""}, "22m", silenced={"BatchDispatcherGateClosed": "reason=starting"}),
    Case("no endpoints, and work", {**WORK, **gate(no_endpoints=1)},
         {"BatchDispatcherGateClosed": "reason=no-endpoints"}, "22m", "14m"),
    Case("no endpoints, and deadlines pass", {**until_fault(no_endpoints=1), "expired_total": "0x40 0+2x4000"},
         {"BatchDispatcherGateClosed": "reason=no-endpoints"}, "32m", "11m", silenced=dict.fromkeys(
             ("BatchDispatcherDeadlineNear", "BatchDispatcherDeadlinesMissed"), "")),
    Case("no endpoints at night without work", gate(no_endpoints=1), {}, "120m"),
    Case("a queue that nobody knows, still starting", {"pending": None, "delayed": None, **gate(starting=1)},
         {"BatchDispatcherGateClosed": "reason=starting"}, "22m", "14m"),
    Case("refused again and again", {**WORK, **gate(backpressure=0.8, open=0.2)},
         {"BatchDispatcherGateClosed": "reason=backpressure"}, "22m"),
    Case("refused at each opening", {**WORK, **gate(backpressure=0.8, open=0.2), REFUSED: rising(0.1), DELIVERED: rising(0.9)},
         {"BatchDispatcherRefusals": ""}, "22m", silenced={"BatchDispatcherGateClosed": "reason=backpressure"}),
    Case("refused now and then", {**WORK, **gate(backpressure=0.1, full=0.9), "running": "3x4000"}, {}, "60m"),
    Case("realtime has it all", {**WORK, **gate(no_room=1)}, {"BatchDispatcherStarved": "reason=no-room"}, "370m", "300m"),
    Case("a busy day without work", gate(no_room=1), {}, "420m"),
    Case("left paused", {**WORK, "paused": "1x4000", **gate(paused=1)}, {"BatchDispatcherPaused": ""}, "250m", "230m"),
    Case("paused without work", {"paused": "1x4000", **gate(paused=1)}, {}, "420m"),
    Case("only observed", {"observing": "1x4000", 'build_info{python="3.11",version="1.0"}': "1x4000"},
         {"BatchDispatcherObserving": ""}, "193h", "190h", every_s=300, bare=True),
    Case("open, with work, and nothing is sent", {**WORK, **gate(open=1)}, {"BatchDispatcherNothingSucceeds": ""},
         "12m", "8m"),
    Case("every try is refused", {**until_fault(backpressure=0.9, open=0.1), REFUSED: "0x20 0+30x4000",
         "delayed": "0x20 100+30x4000", "deadline_slack_seconds": "20000-30x4000", "deadline_at_risk": "0x22 99x4000"},
         {"BatchDispatcherNothingSucceeds": ""}, "31m", silenced={
             "BatchDispatcherRefusals": "", "BatchDispatcherGateClosed": "reason=backpressure"}),
    Case("every try fails, and requests die", {**until_fault(open=1), FAILED: "0x20 0+30x4000",
         BURIED: "0x28 0+4x4000", "delayed": "0x20 100x4000", "expired_total": "0x40 0+2x4000"},
         {"BatchDispatcherNothingSucceeds": ""}, "22m", silenced=dict.fromkeys((
             "BatchDispatcherDeadRequests", "BatchDispatcherDeadlineNear", "BatchDispatcherDeadlinesMissed"), "")),
    Case("all that are left are delayed, and fail", {**until_fault(idle=1), "pending": "50x20 0x4000",
         "delayed": "3x4000", FAILED: "0x20 0+1x4000", "deadline_slack_seconds": None},
         {"BatchDispatcherNothingSucceeds": ""}, "22m", "18m"),
    Case("some tries fail, and others succeed", {**WORK, **gate(open=1), FAILED: rising(1), DELIVERED: rising(0.1)}, {}, "60m"),
    Case("two requests fail until they are dead", {**gate(idle=1), "delayed": "0x10 2x8 0x4000", FAILED: "0x10 0+2x7 16x4000"},
         {}, "60m"),
    Case("a long request runs, others are refused, all in turn", {**WORK, **gate(full=1), "running": "1x4000",
         REFUSED: "0x18 2x4000", DELIVERED: "0x8 1x8 2x8 3x8 4x8 5x8 6x4000"}, {}, "28m"),
    Case("all that wait are in sequences that are held", {**WORK, **gate(idle=1), "sequences_held": "3x4000",
         "sequences_waiting": "50x4000"}, {"BatchDispatcherSequencesHeld": ""}, "62m", "58m"),
    Case("an observer does not send", {**WORK, **gate(open=1), "observing": "1x4000"}, {}, "60m"),
    # What was promised is missed.
    Case("deadlines at risk", {"deadline_at_risk": "7x4000", DELIVERED: rising(1)},
         {"BatchDispatcherDeadlinesAtRisk": ""}, "13m", "9m"),
    Case("deadlines at risk, some missed, and more and more waits", {"deadline_at_risk": "7x4000", DELIVERED: rising(1),
         "expired_total": "0x40 0+1x4000", "pending": "0+10x4000", **gate(full=1), "running": "30x4000"},
         {"BatchDispatcherDeadlinesAtRisk": ""}, "80m", silenced=dict.fromkeys(
             ("BatchDispatcherDeadlinesMissed", "BatchDispatcherBacklogGrowing"), "")),
    Case("nothing is answered, with deadlines hours away", {**until_fault(no_room=1), "deadline_at_risk": "0x21 50x4000",
         "deadline_slack_seconds": "21600-30x4000"}, {}, "120m"),
    Case("none is at risk", {"deadline_at_risk": "0x4000"}, {}, "60m"),
    Case("a deadline is near, and nothing is sent", {**WORK, "deadline_slack_seconds": "600-30x4000",
         **gate(no_room=1)}, {"BatchDispatcherDeadlineNear": ""}, "14m", "6m"),
    Case("a deadline is near, and work is done", {**WORK, "deadline_slack_seconds": "100x4000", **gate(full=1),
         DELIVERED: rising(1), "running": "9x4000"}, {}, "60m"),
    Case("deadlines are missed", {"expired_total": "0x20 1+1x4000"}, {"BatchDispatcherDeadlinesMissed": ""}, "12m", "9m"),
    Case("missed before the first scrape", {"expired_total": "5x4000"}, {"BatchDispatcherDeadlinesMissed": ""}, "2m",
         only=REPLICAS[:1]),
    Case("missed long ago, and a Prometheus that is new", {"expired_total": "5x4000", "start": "-9000x4000"}, {}, "2m"),
    Case("requests are put aside", {BURIED: "0x20 4x4000", "dead": "3x20 7x4000"},
         {"BatchDispatcherDeadRequests": ""}, "15m", "9m", only=REPLICAS[:1]),
    Case("dead that an old dispatcher left", {"dead": "9000x4000"}, {}, "120m"),
    Case("dead that somebody else put aside", {"dead": "3x20 5x4000"}, {"BatchDispatcherDeadRequests": ""}, "15m"),
    Case("dead that were requeued", {"dead": "9x20 0x4000"}, {}, "30m"),
    Case("the backlog grows", {"pending": "0+10x4000", **gate(full=1), "running": "30x4000",
         DELIVERED: rising(1)}, {"BatchDispatcherBacklogGrowing": ""}, "80m", "55m"),
    Case("one large batch", {"pending": "0x60 9000-20x400", **gate(full=1), "running": "30x4000",
         DELIVERED: rising(1)}, {}, "120m"),
    Case("a backlog that is only observed", {"pending": "0+10x4000", **gate(open=1), "observing": "1x4000"}, {}, "120m"),
    Case("sequences are held", {"sequences_held": "0x20 3x4000"}, {"BatchDispatcherSequencesHeld": ""}, "72m", "68m"),
    Case("held, and decided within the hour", {"sequences_held": "0x20 3x80 0x400"}, {}, "80m"),
    Case("requests wait for their model", {'model_waiting{model="qwen"}': "0x20 3x4000"},
         {"BatchDispatcherModelAwaited": ""}, "27m", "23m"),
    Case("all that wait need a model", {**WORK, **gate(idle=1), 'model_waiting{model="qwen"}': "50x4000"},
         {"BatchDispatcherModelAwaited": ""}, "60m", "13m"),
    Case("a rollout takes ten minutes", {'model_waiting{model="qwen"}': "0x20 3x20 0x400"}, {}, "40m"),
    # It is sent, and it goes wrong.
    Case("refusals", {REFUSED: rising(0.1), DELIVERED: rising(0.9)}, {"BatchDispatcherRefusals": ""}, "12m", "3m"),
    Case("two refusals", {REFUSED: "0x20 2x4000"}, {}, "30m"),
    Case("over-full and open", {'f_sys{signal="saturation"}': "1.1x4000", **gate(full=1)},
         {"BatchDispatcherGateInert": ""}, "22m", "14m"),
    Case("over-full and closed", {'f_sys{signal="saturation"}': "1.1x4000", **gate(no_room=1)}, {}, "60m"),
    Case("full of our work, as it should be", {'f_sys{signal="saturation"}': "0.95x4000", "in_flight": "30x4000",
         **gate(full=1)}, {}, "60m"),
    Case("series that do not show our work", {'f_sys{signal="saturation"}': "0.1x4000", "in_flight": "30x4000",
         **gate(full=1)}, {"BatchDispatcherGateInert": ""}, "22m"),
    Case("leases are lost", {"leases_lost_total": "0x20 3x4000"}, {"BatchDispatcherLeasesLost": ""}, "12m", "9m"),
    Case("lost before the first scrape", {"leases_lost_total": "3x4000"}, {"BatchDispatcherLeasesLost": ""}, "2m"),
    Case("too little CPU", {"loop_lag_seconds": "0.5x4000"}, {"BatchDispatcherSlow": ""}, "6m", "4m"),
    Case("too little CPU, and leases run out", {"loop_lag_seconds": "9x4000", "leases_lost_total": "0x20 3x4000"},
         {"BatchDispatcherSlow": ""}, "12m", "4m", silenced={"BatchDispatcherLeasesLost": ""}),
    Case("late now and then", {"loop_lag_seconds": "0x9 0.9 0x9 0.9 0x9 0.9 0x400"}, {}, "20m"),
    Case("a defect", {'events_total{event="internal-error"}': "0x20 1x4000"}, {"BatchDispatcherDefect": ""}, "15m", "9m"),
    Case("merged calls that are answered wrongly", {OFF: "0x20 1x4000"}, {"BatchDispatcherMergingOff": ""}, "11m", "9m",
         only=REPLICAS[:1]),
    # It is set up wrong.
    Case("a refused configuration", {"config_refused": "1x4000"}, {"BatchDispatcherConfigRefused": ""}, "6m", "4m"),
    Case("a blind watch", {"watch_failing": "1x4000"}, {"BatchDispatcherWatchFailing": ""}, "11m", "9m"),
    Case("capacities differ", {"per_endpoint": "32x4000", "picker_max_concurrency": "16x4000"},
         {"BatchDispatcherCapacityDiffers": ""}, "11m", "9m"),
    Case("capacities agree", {"per_endpoint": "16x4000", "picker_max_concurrency": "16x4000"}, {}, "60m"),
    Case("only ours is known", {"per_endpoint": "16x4000"}, {}, "60m"),
    # Nothing is wrong.
    Case("fresh, idle, healthy", {}, {}, "1m", "10m"),
    Case("a quiet night", {}, {}, "480m"),
    Case("a busy half hour", {"pending": "900-10x40 500+20x4000", "delayed": "2x4000", "running": "15x4000",
         "in_flight": "28x4000", 'f_sys{signal="saturation"}': "0.9x4000", DELIVERED: rising(2),
         REFUSED: "0x30 1x30 2x4000", FAILED: "0x20 1x4000", "deadline_at_risk": "0x4000",
         "deadline_slack_seconds": "9000-30x4000", **gate(full=0.7, saturated=0.1, no_room=0.15, backpressure=0.05)},
         {}, "30m"),
    Case("one replica is new", {"leases_lost_total": "0x4000"}, {}, "30m", only=REPLICAS[:1]),
]  # fmt: skip
