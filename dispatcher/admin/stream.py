"""The live feed of the page: recent history when a page opens, and updates while it is open.

Samples and events are numbered together; `<process>-<number>` is the id with which a reader resumes. A reader
that reconnects gets what it missed; one from before a restart gets everything.

    on connect     history, status, settings, dead
    each second    sample, status
    at once        event; settings after a reload; dead when their number changes

The feed never waits for a reader. Frames that a reader has not taken are kept up to a limit, and then the
reader is dropped.
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
"""Number of samples that are kept: a quarter of an hour."""
EVENTS_KEPT = 200
EVENT_BYTES = 4096
"""Maximum size of an event's fields. Longer ones are cut."""
STREAMS_MOST = 32
FRAMES_BEHIND = 64
"""Number of frames, about half a minute, after which a reader that does not take them is dropped."""
DEAD_READ = 100
"""Number of dead requests that are read, the newest first. They are shown in groups by reason."""
DEAD_GROUPS = 10
RETRY_MS = 1000
NUMBER_DIGITS = 15
"""Maximum number of digits of a number in an id. A client may send a longer one."""

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
"""Columns of a sample, in addition to its time and the results per second by code. All except the reason are
requests."""


class Stream:
    """Frames that have still to be sent to one reader."""

    def __init__(self) -> None:
        self.dropped = False
        """True if the reader was too slow, so that its frames were discarded."""
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
        """End the stream: no further frame is added."""
        self._over = True
        if self.dropped:
            self._frames.clear()
        self._came.set()

    async def take(self, within_s: float) -> bytes | None:
        """Return all frames that are due. Empty if none came within `within_s`, `None` if the stream has
        ended."""
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
        # Sets the event again, so that the next call returns `None` at once.
        if self._over:
            self._came.set()
        return frames


class Feed:
    """Keeps the history that the page shows when it opens, and sends updates to every reader.

    `clock` is Unix time. `results` returns the number of results by code since the process began. `dead`
    returns the newest dead requests, newest first. Without readers the feed costs one sample per second.
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
        """Number of dead requests when `_dead_summary` was read."""
        self._dead_wanted = asyncio.Event()
        self._failing: set[str] = set()

    # Input.

    def heard(self, event: Event, fields: Mapping[str, Any]) -> None:
        """Keep an event and send it to all readers. Called for each event of the process."""
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
        """Keep the current state as a sample, and send it to all readers."""
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

    # Output.

    def subscribe(self, last_id: str = "") -> Stream | None:
        """Return a new stream that starts with the complete state, or with what came since `last_id`. `None`
        if there are too many."""
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
        """Take a sample each second until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sample_each_second(), name="samples")
            tasks.create_task(self._follow_dead(), name="dead")

    async def _sample_each_second(self) -> None:
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            with self._guarded("the live page's feed"):
                self.sample()
            # After a delay the missed samples are skipped instead of being taken in a burst.
            due_at = max(due_at + SAMPLE_S, loop.time())
            await asyncio.sleep(due_at - loop.time())

    async def _follow_dead(self) -> None:
        """Read the dead requests again when their number has changed and a reader is connected."""
        while True:
            await self._dead_wanted.wait()
            self._dead_wanted.clear()
            with self._guarded("the dead for the live page"), suppress(QueueUnavailableError):
                # The count is taken before the list. A request that dies in between changes the next count,
                # so that the list is read again.
                count = self._status().get("dead")
                self._dead_told = group_dead(await self._dead(DEAD_READ))
                self._dead_count = count
                self._tell(self._frame("dead", self._dead_told))
            await asyncio.sleep(SAMPLE_S)  # also limits the rate; after a failure the next sample asks again

    @contextmanager
    def _guarded(self, where: str) -> Iterator[None]:
        """Log an unexpected error once, and continue. A defect here must not stop the dispatcher."""
        try:
            yield
            self._failing.discard(where)
        except Exception as error:
            if where not in self._failing:
                self._failing.add(where)
                emit(Event.SURPRISE, where=where, error=repr(error))

    def _since(self, last_id: str) -> Json:
        """Return what came after an id, as columns. Everything if the id is not from this process."""
        process, _, number = last_id.partition("-")
        # The id comes from the client, so it may be anything. `int` of very many digits would raise.
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
        """Return one message of the event stream. JSON is one line, so it fits into one `data` field."""
        numbered = f"id: {self._process}-{number}\n" if number is not None else ""
        return f"event: {kind}\n{numbered}data: ".encode() + _encode(data) + b"\n\n"

    def _tell(self, *frames: bytes) -> None:
        for stream in self._streams:
            stream.put(*frames)


def measures(status: Json) -> dict[str, Any]:
    """Return the numbers of a sample from /status. `None` for numbers that are not known."""
    max_sys, reserve = _number(status.get("max_sys")), _number(status.get("reserve"))
    told: dict[str, Any] = dict.fromkeys(COLUMNS)
    told |= {
        name: _short(value)
        for name in ("limit", "configured_max_sys", "pending", "delayed", "dead", "at_risk")
        if (value := _number(status.get(name))) is not None
    }
    told["reason"] = status.get("reason")
    # Without counts of the queue, the requests in flight of other replicas are not known.
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
    """Return the number with at most two decimals, and as an integer if it is whole, to save characters."""
    if value is None:
        return None
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


def group_dead(newest: Sequence[Dead]) -> Json:
    """Return the newest dead requests by reason, the most frequent reason first.

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
    """Return the fields of an event as valid JSON of limited size, regardless of their values."""
    try:
        encoded = _encode(fields)
    except (TypeError, ValueError, RecursionError):
        # Fields of an event may be of any type and even refer to themselves.
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
