"""The live feed behind the page: what happened lately, and what happens now.

One number counts everything that is kept, samples and events together; `<process>-<number>` is the id a
reader resumes with. A reader that comes back gets what it missed; one from before a restart gets all.

    on connect     history, status, settings, dead
    each second    sample, status
    as it happens  event; settings after a reload; dead when their number changes

Nobody is waited for: what a reader has not taken is kept for it up to a bound, then the reader is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import reprlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import msgspec

from dispatcher.core.requests.request import parse
from dispatcher.ports import Dead, QueueUnavailableError
from dispatcher.telemetry.events import Event, emit

SAMPLE_S = 1.0
SAMPLES_KEPT = 900
"""A quarter of an hour."""
EVENTS_KEPT = 200
EVENT_BYTES = 4096
"""Of an event's fields; longer ones are cut."""
STREAMS_MOST = 32
FRAMES_BEHIND = 64
"""A reader that has so much to take is too slow: about half a minute."""
DEAD_READ = 100
"""Number of dead requests that are read, the newest. They are shown in groups by their reason."""
DEAD_GROUPS = 10
RETRY_MS = 1000
NUMBER_DIGITS = 15
"""No number has more; what a reader sends may."""

Json = Mapping[str, Any]

COLUMNS = (
    "reason",
    "max_sys",
    "realtime",
    "waiting",
    "ours",
    "reserve",
    "limit",
    "configured_max_sys",
    "pending",
    "delayed",
    "dead",
    "at_risk",
)
"""Of a sample, beside its time and the results per second by code. All but the reason are requests."""


class Stream:
    """One reader: what it has still to be sent."""

    def __init__(self) -> None:
        self.dropped = False
        """It was too slow: what it was to be sent is gone."""
        self._frames: deque[bytes] = deque()
        self._came = asyncio.Event()
        self._over = False

    def put(self, *frames: bytes) -> None:
        if len(self._frames) + len(frames) > FRAMES_BEHIND:
            self.dropped = True
            self.end()
        if not self.dropped:
            self._frames.extend(frames)
            self._came.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._over = True
        if self.dropped:
            self._frames.clear()
        self._came.set()

    async def take(self, within_s: float) -> bytes | None:
        """All that is there to be sent; empty: nothing came in that time; None: it is over."""
        try:
            async with asyncio.timeout(within_s):
                await self._came.wait()
        except TimeoutError:
            return b""
        self._came.clear()
        if not self._frames and self._over:
            return None
        frames = b"".join(self._frames)
        self._frames.clear()
        if self._over:
            self._came.set()
        return frames


class Feed:
    """Keeps what the page shows when it opens, and tells every reader what is new.

    `clock`: Unix time. `results`: how many results there were, by code, since the process began. `dead`: the
    newest dead, the newest first. When nobody reads it costs a sample each second and nothing else.
    """

    def __init__(
        self,
        status: Callable[[], Json],
        *,
        settings: Callable[[], Json],
        results: Callable[[], Mapping[str, float]],
        dead: Callable[[int], Awaitable[Sequence[Dead]]],
        clock: Callable[[], float],
    ) -> None:
        self._status = status
        self._settings = settings
        self._results = results
        self._dead = dead
        self._clock = clock
        self._process = f"{int(clock() * 1000):x}"
        self._number = 0
        self._samples: deque[tuple[int, Json]] = deque(maxlen=SAMPLES_KEPT)
        self._events: deque[tuple[int, Json]] = deque(maxlen=EVENTS_KEPT)
        self._streams: set[Stream] = set()
        self._totals: Mapping[str, float] = {}
        self._sampled_at = clock()
        self._generation: object = None
        self._dead_told: Json | None = None
        self._dead_count: object = 0
        """How many there were when `_dead_told` was read."""
        self._dead_wanted = asyncio.Event()
        self._failing: set[str] = set()

    # What comes in.

    def heard(self, event: Event, fields: Mapping[str, Any]) -> None:
        """A sink of events."""
        if event.level < logging.INFO:
            return
        told = {
            "at": round(self._clock(), 3),
            "event": event.event,
            "level": logging.getLevelName(event.level).lower(),
            "meaning": event.meaning,
            "fields": _fields(fields),
        }
        self._events.append((self._next(), told))
        self._tell(self._frame("event", told, self._number))

    def sample(self) -> None:
        """Keep how things stand now, and tell it."""
        status, at, totals = self._status(), self._clock(), dict(self._results())
        kept = {"at": round(at, 2), **measures(status)}
        seconds = at - self._sampled_at
        if self._totals and seconds > 0:
            rates = {code: (total - self._totals.get(code, 0.0)) / seconds for code, total in totals.items()}
            kept["results"] = {code: _short(rate) for code, rate in rates.items() if rate > 0}
        self._totals, self._sampled_at = totals, at
        self._samples.append((self._next(), kept))
        before, self._generation = self._generation, status.get("config_generation")
        reloaded = before is not None and before != self._generation
        if not self._streams:
            return
        self._tell(
            self._frame("sample", {**kept, "totals": totals}, self._number),
            self._frame("status", status),
        )
        if reloaded:
            self._tell(self._frame("settings", self._settings()))
        self._look_at_dead(status)

    def _look_at_dead(self, status: Json) -> None:
        if status.get("dead") is not None and status["dead"] != self._dead_count:
            self._dead_wanted.set()

    # What goes out.

    def subscribe(self, last_id: str = "") -> Stream | None:
        """A new reader with everything it needs to begin, or with what came since `last_id`; None: there are
        too many."""
        if len(self._streams) >= STREAMS_MOST:
            return None
        stream, status = Stream(), self._status()
        stream.put(
            f"retry: {RETRY_MS}\n\n".encode(),
            self._frame("history", self._since(last_id), self._number),
            self._frame("status", status),
            self._frame("settings", self._settings()),
            self._frame("dead", self._dead_told),
        )
        if self._generation is None:
            self._generation = status.get("config_generation")
        self._streams.add(stream)
        self._look_at_dead(status)
        return stream

    def unsubscribe(self, stream: Stream) -> None:
        self._streams.discard(stream)

    def close(self) -> None:
        """End every stream."""
        for stream in self._streams:
            stream.end()

    async def run(self) -> None:
        """Sample each second, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sample_each_second(), name="samples")
            tasks.create_task(self._follow_dead(), name="dead")

    async def _sample_each_second(self) -> None:
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            with self._guarded("the live page's feed"):
                self.sample()
            due_at = max(due_at + SAMPLE_S, loop.time())
            await asyncio.sleep(due_at - loop.time())

    async def _follow_dead(self) -> None:
        """Read the dead again when their number has changed and somebody looks."""
        while True:
            await self._dead_wanted.wait()
            self._dead_wanted.clear()
            with self._guarded("the dead for the live page"), suppress(QueueUnavailableError):
                count = self._status().get("dead")
                self._dead_told = group_dead(await self._dead(DEAD_READ))
                self._dead_count = count
                self._tell(self._frame("dead", self._dead_told))
            await asyncio.sleep(SAMPLE_S)  # where it could not be read the next sample asks again

    @contextmanager
    def _guarded(self, where: str) -> Iterator[None]:
        """A defect in here costs the page something, and the dispatcher nothing. It is said once."""
        try:
            yield
            self._failing.discard(where)
        except Exception as error:
            if where not in self._failing:
                self._failing.add(where)
                emit(Event.SURPRISE, where=where, error=repr(error))

    def _since(self, last_id: str) -> Json:
        """What came after this id, as columns; everything where the id is not of this process."""
        process, _, number = last_id.partition("-")
        ours = process == self._process and number.isdecimal() and len(number) <= NUMBER_DIGITS
        resumed = ours and int(number) <= self._number
        after = int(number) if resumed else 0
        samples = [kept for at, kept in self._samples if at > after]
        codes = sorted({code for kept in samples for code in kept.get("results", ())})
        return {
            "whole": not resumed,
            "seconds": SAMPLES_KEPT * SAMPLE_S,
            "samples": {name: [kept[name] for kept in samples] for name in ("at", *COLUMNS)},
            "results": {code: [kept.get("results", {}).get(code, 0) for kept in samples] for code in codes},
            "totals": self._totals,
            "events": [told for at, told in self._events if at > after],
        }

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _frame(self, kind: str, data: Any, number: int | None = None) -> bytes:
        """One message of the event stream. JSON of one line, so `data` is one, too."""
        numbered = f"id: {self._process}-{number}\n" if number is not None else ""
        return f"event: {kind}\n{numbered}data: ".encode() + _encode(data) + b"\n\n"

    def _tell(self, *frames: bytes) -> None:
        for stream in self._streams:
            stream.put(*frames)


def measures(status: Json) -> dict[str, Any]:
    """The numbers of a sample, from /status; None for what is not known."""
    max_sys, reserve = _number(status.get("max_sys")), _number(status.get("reserve"))
    told: dict[str, Any] = dict.fromkeys(COLUMNS)
    told |= {
        name: _short(value)
        for name in ("limit", "configured_max_sys", "pending", "delayed", "dead", "at_risk")
        if (value := _number(status.get(name))) is not None
    }
    told["reason"] = status.get("reason")
    # Without counts of the queue, what other replicas have in flight is not known.
    counted = _number(status.get("leased")) is not None
    told["max_sys"], told["ours"] = (
        _short(max_sys),
        _short(_number(status.get("in_flight")) if counted else None),
    )
    told["realtime"], told["waiting"] = (
        _short(_number(status.get(name))) for name in ("realtime", "realtime_waiting")
    )
    told["reserve"] = None if max_sys is None or reserve is None else _short(reserve * max_sys)
    return told


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _short(value: float | None) -> float | int | None:
    """With two decimals at most, and as few characters as it takes."""
    if value is None:
        return None
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


def group_dead(newest: Sequence[Dead]) -> Json:
    """Return the newest dead requests by their reason, the most frequent reason first.

    Each group has the number of its requests and the newest of them.
    """
    groups: dict[str, list[Dead]] = {}
    for dead in newest:
        groups.setdefault(dead.reason, []).append(dead)
    frequent = sorted(groups.values(), key=len, reverse=True)
    shown = [{"count": len(group), "newest": _shown(group[0])} for group in frequent[:DEAD_GROUPS]]
    return {"read": len(newest), "reasons": len(groups), "groups": shown}


def _shown(dead: Dead) -> Json:
    """Return a dead request without its payload, with the commands that apply to it."""
    id_ = parse(dead.member).id
    return {
        "entry": dead.entry,
        "id": id_,
        "reason": dead.reason,
        "died_at": dead.died_at,
        "attempts": dead.attempts,
        "refusals": dead.refusals,
        "deliveries": dead.deliveries,
        "todo": ["show", "requeue", "purge"] if id_ is not None else ["show", "purge"],
    }


def _fields(fields: Mapping[str, Any]) -> Any:
    """An event's fields as JSON that stands, whatever they hold and however long they are."""
    try:
        encoded = _encode(fields)
    except (TypeError, ValueError, RecursionError):
        encoded = b""
    if not encoded or len(encoded) > EVENT_BYTES:
        encoded = _encode({str(name): _cut(value) for name, value in islice(fields.items(), 20)})
    return msgspec.Raw(encoded)


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = EVENT_BYTES // 40


def _cut(value: object) -> str:
    told = value if isinstance(value, str) else _brief.repr(value)
    return told[: EVENT_BYTES // 40].encode("ascii", "backslashreplace").decode()


def _encode(data: Any) -> bytes:
    return msgspec.json.encode(data, enc_hook=str)
