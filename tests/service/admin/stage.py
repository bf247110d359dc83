"""An admin port without a dispatcher, whose status is set by the test."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dispatcher.limit.health import Causes
from dispatcher.limit.limiter import NO_ROOM_BY_REALTIME
from dispatcher.queue.admin_contract import DeadRequest
from dispatcher.requests.request import encode_member
from dispatcher.service.admin import AdminLimits, AdminServer, AdminViews
from dispatcher.service.admin.stream import LiveFeed
from dispatcher.settings.effective import settings_as_json
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.telemetry.events import Event

NOW = 1_900_000_000.0
SIZE = 48.0


def make_explanation(reason: str, in_flight: int, limit: int, f_sys: float, f_epp: float) -> str:
    """Return an explanation as limit/allowance.py writes it."""
    d = 1 - (f_sys + f_epp + 0.05)
    terms = (
        f" (saturation: pool {f_sys:.0%} full, queue {f_epp:.0%}, reserve 5% leave D = {d:.3f} of {SIZE:g} "
        f"requests, headroom {max(0, math.floor(SIZE * d))})."
    )
    match reason:
        case "open":
            return f"{in_flight} in flight under a limit {limit}: sending {limit - in_flight} more{terms}"
        case "full":
            return f"{in_flight} in flight fill the limit {limit}: each completion is replaced{terms}"
        case "no-room":
            return f"Nothing is sent: no-room, {NO_ROOM_BY_REALTIME}{terms}"
        case "stale":
            return "Nothing is sent: stale, the newest sample is 14 s old, and signals.max_age_s is 10 s."
        case "backpressure":
            return f"Nothing is sent: backpressure, the gateway refused a request 2 s ago{terms}"
        case _:
            return f"Nothing is sent: {reason}."


class StaticStatus:
    """A status that is given as its JSON object."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def to_dict(self) -> dict[str, Any]:
        return dict(self._document)


def make_health(document: Mapping[str, Any], *, closed: bool) -> dict[str, Any]:
    """Return the health of a dispatcher without a fault."""
    waits = f"{document['pending']:,} requests wait and {document['delayed']} wait for a retry"
    return {
        "health": "waiting" if closed else "working",
        "health_cause": "room" if closed else "none",
        "health_sentence": f"Realtime requests take everything but the reserve, {waits}."
        if closed
        else f"{document['in_flight']} requests are in flight, {waits}.",
        "health_since_s": 75.0,
        "health_hint": Causes.ROOM.hint if closed else "",
        "done_in_s": round(document["pending"] / 4.4, 1),
    }


FAILING: dict[str, Any] = {
    "health": "failing",
    "health_cause": "failures",
    "health_sentence": "Every attempt fails. Of the last 20 attempts 20 failed: 500 (20); 893 requests wait.",
    "health_since_s": 95.0,
    "health_hint": Causes.FAILURES.hint,
    "done_in_s": None,
}


def status(reason: str = "open", **more: Any) -> dict[str, Any]:
    """Return a /status like that of a dispatcher."""
    closed = reason not in ("open", "full", "idle", "saturated")
    document: dict[str, Any] = {
        "version": "0.9.0",
        "pool": "qwen",
        "queue": "batch:{qwen}:requests",
        "owner": "dispatcher-0-4fe1",
        "observe": False,
        "reason": reason,
        "open": not closed,
        "limit": 0 if closed else 21,
        "in_flight": 14,
        "running": 14,
        "signal": "saturation",
        "f_sys": 0.66,
        "f_epp": 0.0,
        "reserve": 0.05,
        "budget": 0.29,
        "headroom": 13,
        "max_sys": SIZE,
        "max_sys_source": "picker",
        "configured_max_sys": SIZE,
        "reading_age_s": 0.4,
        "source": "epp",
        "watch_problems": [],
        "pending": 1284,
        "leased": 14,
        "delayed": 3,
        "dead": 2,
        "paused": False,
        "queue_problem": None,
        "config_generation": 1,
        "config_problem": None,
        "loop_lag_s": 0.002,
    } | more
    document = make_health(document, closed=closed) | document
    if document["max_sys"] and math.isfinite(document["max_sys"]):
        runs, waits = document["f_sys"] * document["max_sys"], document["f_epp"] * document["max_sys"]
        beside = max(0.0, runs + waits - document["in_flight"])
        document = {
            "realtime": max(0.0, runs - document["in_flight"]),
            "realtime_waiting": min(waits, beside),
        } | document
    if "explanation" in more:
        return document
    terms: dict[str, Any] = {name: document[name] for name in ("in_flight", "limit", "f_sys", "f_epp")}
    return {"explanation": make_explanation(reason, **terms)} | document


@dataclass
class Stage:
    """State that the port shows; a test may change it. `now`: clock of the feed, which stands still."""

    status_document: dict[str, Any] = field(default_factory=status)
    results: dict[str, float] = field(default_factory=lambda: {"2xx": 0.0, "4xx": 0.0})
    dead: list[DeadRequest] = field(default_factory=list)
    settings: Settings = field(default_factory=lambda: load_settings())
    token_file: str = ""
    limits: AdminLimits = field(default_factory=AdminLimits)
    port: int = 0
    now: float = NOW
    asked_for_dead: int = 0

    def __post_init__(self) -> None:
        self.views = AdminViews(
            lambda: None,
            lambda: None,
            lambda: StaticStatus(self.status_document),  # type: ignore[arg-type, return-value]
            lambda *_: (b"# EOF\n", "text/plain"),
            settings=lambda: settings_as_json(self.settings),
            results=lambda: self.results,
            dead=self._newest,
        )
        self.feed: LiveFeed = self.views.make_feed(lambda: self.now)

    async def _newest(self, most: int) -> Sequence[DeadRequest]:
        self.asked_for_dead += 1
        return self.dead[-most:][::-1]

    def advance_second(self, reason: str | None = None, **more: Any) -> None:
        """Advance the clock by a second, with this state."""
        self.now += 1
        self.status_document |= more if reason is None else status(reason, **more)
        self.feed.record_sample()

    @asynccontextmanager
    async def open(self, *, ticking: bool = False) -> AsyncIterator[str]:
        """Yield the URL of the admin port. `ticking`: the feed takes its own samples."""
        server = AdminServer(
            self.views,
            self.feed,
            host="127.0.0.1",
            port=self.port,
            token_file=self.token_file,
            limits=self.limits,
        )
        async with server, asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.feed.run()) if ticking else None
            self.port = server.port
            yield f"http://127.0.0.1:{server.port}"
            if task is not None:
                task.cancel()


CONFIG = """
pool: {name: qwen}
gateway: {url: "http://user:hunter2@gateway:8000", objective: batch}
queue: {url: "redis://:hunter2@redis:6379"}
budget: {reserve: 0.05}
"""


def load_settings(text: str = CONFIG) -> Settings:
    found = parse_settings(text, {})
    assert isinstance(found, Settings), found
    return found


def make_merge_target(model: str = "bge-m3", **more: Any) -> dict[str, Any]:
    """Return the merging of one model as in /status."""
    return {
        "path": "/v1/embeddings",
        "model": model,
        "shape": "embeddings",
        "mode": "auto",
        "size": 32,
        "server_max_items": None,
        "gain": 6.18,
        "checked_calls": 3,
        "off_reason": None,
        "sentence": "up to 32 items a call, 6.18 times the items of single calls for the same units",
    } | more


def make_sliced_model(model: str = "qwen", **more: Any) -> dict[str, Any]:
    """Return what is known of slices of one model as in /status."""
    return {
        "path": "/v1/chat/completions",
        "model": model,
        "has_template_options": False,
        "verdict": "equal",
        "continued_by": "text",
        "whole_reason": "",
        "why": "",
        "whole_text": "",
        "sliced_text": "",
        "remedy": "",
    } | more


UNEQUAL = {
    "verdict": "unequal",
    "continued_by": "",
    "whole_reason": "unequal",
    "why": "the same generation in slices had another text",
    "whole_text": "one, two, three",
    "sliced_text": "one, two, <b>four</b>",
    "remedy": "use another server",
}
DIFFERS = "the answer to a merged call differs from the answers to single calls: item 0: cosine 0.4210"
ENDED = {"size": 1, "gain": None, "off_reason": DIFFERS, "sentence": f"each request is sent alone: {DIFFERS}"}


def dead_request(
    entry: int, reason: str, *, readable: bool = True, died_at: float = NOW - 100
) -> DeadRequest:
    member = encode_member(f"job-{entry}", b'{"prompt":"secret"}', int(NOW)) if readable else b"\xffrubbish"
    return DeadRequest(
        entry, member, NOW, reason, died_at, deliveries=3, failed_attempts=2, refusals=1, deaths_as_suspect=0
    )


def record_quarter_of_an_hour(stage: Stage, last: str) -> None:
    """Record 900 samples: a refusal, a peak of realtime requests, a stale scrape, and finally `last`."""
    stage.now = math.floor(stage.now) - 900
    before = ""
    for second in range(900):
        wave = 15 + 9 * math.sin(second / 130) + 2.5 * math.sin(second / 11) + 1.2 * math.sin(second / 3.1)
        rush = 26 * math.exp(-(((second - 560) / 55) ** 2))
        realtime = min(46.0, max(2.0, wave + rush))
        waits = max(0.0, wave + rush - 44)
        reason, fits = "full", float(SIZE)
        batch = max(0.0, SIZE * 0.95 - realtime - waits)
        if second < 40:
            reason, batch = "open", batch * second / 40
        if rush > 14:
            reason, batch = "no-room", max(0.0, 14 - (second - 512) / 3) if second < 555 else 0.0
        if 300 <= second < 312:
            reason, batch = "backpressure", batch * 0.6
        if 312 <= second < 400:
            fits = SIZE * (0.6 + (second - 312) / 220)
            batch = min(batch, max(0.0, fits * 0.95 - realtime - waits))
        if 700 <= second < 745:
            reason, batch = "stale", max(0.0, batch - (second - 700))
        if 640 <= second < 655 or 745 <= second < 760:
            reason, batch = (
                "open",
                batch * (second % 100 - 38) / 16 if second < 700 else batch * (second - 744) / 16,
            )
        if second > 885:
            if last == "no-room":
                reason, batch = "no-room", max(4.0, batch - 2 * (second - 885))
                realtime = min(44.0, SIZE - batch)
                waits = (second - 885) / 4
            elif last == "open":
                reason, batch = "open", max(0.0, batch - 6)
        closed = reason in ("no-room", "backpressure", "stale")
        limit = 0 if closed else max(0, math.floor(fits * 0.95 - realtime - waits))
        pending = 1284 + round(220 * math.cos(second / 210)) - second // 3 + (80 if closed else 0)
        done = 0.0 if closed else batch / 4.2
        stage.results["2xx"] = stage.results.get("2xx", 0.0) + done
        stage.results["4xx"] = stage.results.get("4xx", 0.0) + (
            0.4 if second % 190 < 12 and not closed else 0
        )
        stage.results["RETRIES_EXHAUSTED"] = stage.results.get("RETRIES_EXHAUSTED", 0.0) + (
            0.8 if 300 <= second < 309 else 0
        )
        stage.advance_second(
            reason,
            in_flight=round(batch),
            running=round(batch),
            f_sys=(realtime + round(batch)) / fits,
            f_epp=waits / fits,
            limit=limit,
            max_sys=fits,
            max_sys_source="learned" if fits < SIZE else "picker",
            reading_age_s=0.02,
            pending=pending,
            delayed=3 + (5 if 300 < second < 420 else 0),
            dead=2,
            at_risk=max(0, round(90 * math.exp(-(((second - 600) / 70) ** 2)))),
            oldest_pending_age_s=412.0,
            earliest_deadline_s=1325.0,
            service_rate=4.4,
            started_at=NOW - 86_000,
            ttft_p50_s=0.182,
            ttft_p95_s=0.61,
            tpot_p50_s=0.0213,
            tpot_p95_s=0.0344,
            impact_scope="realtime",
            impact_requests=2140,
            impact_source="epp",
            impact_problem=None,
            replica_count=2,
            batch_share=0.37,
            replicas=[
                {"owner": "dispatcher-0-4fe1", "leases": round(batch / 2), "silent_s": 0.2},
                {"owner": "dispatcher-1-90ac", "leases": round(batch) - round(batch / 2), "silent_s": 0.7},
            ],
        )
        happened = {
            0: (Event.STARTED, {"version": "0.9.0", "pool": "qwen"}),
            700: (Event.SIGNALS_UNREADABLE, {"why": "timed out after 0.9 s", "source": "epp"}),
            745: (Event.SIGNALS_READABLE, {"source": "epp"}),
        }.get(second)
        if happened is not None:
            stage.feed.record_event(*happened)
        if reason != before:
            explanation = stage.status_document["explanation"]
            stage.feed.record_event(
                Event.GATE, {"reason": reason, "limit": limit, "explanation": explanation}
            )
            before = reason


def write_token(folder: Path, token: str) -> str:
    path = folder / "token"
    path.write_text(token)
    return str(path)
