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

from dispatcher.queue.admin_contract import DeadRequest
from dispatcher.requests.request import parse_member
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.telemetry.events import Event, emit

SAMPLE_S = 1.0
MAX_SAMPLES = 900
"""Number of samples that are kept: a quarter of an hour."""
MAX_EVENTS = 200
MAX_EVENT_BYTES = 4096
"""Maximum size of an event's fields. Longer ones are cut."""
MAX_STREAMS = 32
MAX_FRAMES_BEHIND = 64
"""Number of frames, about half a minute, after which a reader that does not take them is dropped."""
MAX_DEAD_READ = 100
"""Number of dead requests that are read, the newest first. They are shown in groups by reason."""
MAX_DEAD_GROUPS = 10
RETRY_MS = 1000
MAX_NUMBER_DIGITS = 15
"""Maximum number of digits of a number in an id. A client may send a longer one."""

Json = Mapping[str, Any]

SAMPLE_COLUMNS = (
    "reason",
    "max_sys",
    "realtime",
    "waiting",
    "batch",
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


class EventStream:
    """Frames that have still to be sent to one reader."""

    def __init__(self) -> None:
        self.is_dropped = False
        """True if the reader was too slow, so that its frames were discarded."""
        self._frames: deque[bytes] = deque()
        self._frames_ready = asyncio.Event()
        self._is_ended = False

    def put_frames(self, *frames: bytes) -> None:
        if len(self._frames) + len(frames) > MAX_FRAMES_BEHIND:
            self.is_dropped = True
            self.end()
        if not self.is_dropped:
            self._frames.extend(frames)
            self._frames_ready.set()

    def end(self) -> None:
        """End the stream: no further frame is added."""
        self._is_ended = True
        if self.is_dropped:
            self._frames.clear()
        self._frames_ready.set()

    async def take_frames(self, within_s: float) -> bytes | None:
        """Return all frames that are due. Empty if none came within `within_s`, `None` if the stream has
        ended."""
        try:
            async with asyncio.timeout(within_s):
                await self._frames_ready.wait()
        except TimeoutError:
            return b""
        self._frames_ready.clear()
        if not self._frames and self._is_ended:
            return None
        frames = b"".join(self._frames)
        self._frames.clear()
        # Sets the event again, so that the next call returns `None` at once.
        if self._is_ended:
            self._frames_ready.set()
        return frames


class LiveFeed:
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
        dead: Callable[[int], Awaitable[Sequence[DeadRequest]]],
        clock: Callable[[], float],
    ) -> None:
        self._status = status
        self._settings = settings
        self._results = results
        self._dead = dead
        self._clock = clock
        self._process = f"{int(clock() * 1000):x}"
        self._last_number = 0
        self._samples: deque[tuple[int, Json]] = deque(maxlen=MAX_SAMPLES)
        self._events: deque[tuple[int, Json]] = deque(maxlen=MAX_EVENTS)
        self._streams: set[EventStream] = set()
        self._totals: Mapping[str, float] = {}
        self._sampled_at = clock()
        self._generation: object = None
        self._dead_summary: Json | None = None
        self._dead_count: object = 0
        """Number of dead requests when `_dead_summary` was read."""
        self._dead_changed = asyncio.Event()
        self._failing_parts: set[str] = set()

    # Input.

    def record_event(self, event: Event, fields: Mapping[str, Any]) -> None:
        """Keep an event and send it to all readers. Called for each event of the process."""
        if event.level < logging.INFO:
            return
        entry = {
            "at": round(self._clock(), 3),
            "event": event.event_name,
            "level": logging.getLevelName(event.level).lower(),
            "meaning": event.description,
            "fields": _encode_fields(fields),
        }
        self._events.append((self._next_number(), entry))
        self._send_frames(self._make_frame("event", entry, self._last_number))

    def record_sample(self) -> None:
        """Keep the current state as a sample, and send it to all readers."""
        status, at, totals = self._status(), self._clock(), dict(self._results())
        sample = {"at": round(at, 2), **extract_measures(status)}
        seconds = at - self._sampled_at
        if self._totals and seconds > 0:
            rates = {code: (total - self._totals.get(code, 0.0)) / seconds for code, total in totals.items()}
            sample["results"] = {code: _round_number(rate) for code, rate in rates.items() if rate > 0}
        self._totals, self._sampled_at = totals, at
        self._samples.append((self._next_number(), sample))
        before, self._generation = self._generation, status.get("config_generation")
        reloaded = before is not None and before != self._generation
        if not self._streams:
            return
        self._send_frames(
            self._make_frame("sample", {**sample, "totals": totals}, self._last_number),
            self._make_frame("status", status),
        )
        if reloaded:
            self._send_frames(self._make_frame("settings", self._settings()))
        self._check_dead_count(status)

    def _check_dead_count(self, status: Json) -> None:
        if status.get("dead") is not None and status["dead"] != self._dead_count:
            self._dead_changed.set()

    # Output.

    def subscribe(self, last_id: str = "") -> EventStream | None:
        """Return a new stream that starts with the complete state, or with the changes since `last_id`.
        `None` if there are too many."""
        if len(self._streams) >= MAX_STREAMS:
            return None
        stream, status = EventStream(), self._status()
        stream.put_frames(
            f"retry: {RETRY_MS}\n\n".encode(),
            self._make_frame("history", self._make_history(last_id), self._last_number),
            self._make_frame("status", status),
            self._make_frame("settings", self._settings()),
            self._make_frame("dead", self._dead_summary),
        )
        if self._generation is None:
            self._generation = status.get("config_generation")
        self._streams.add(stream)
        self._check_dead_count(status)
        return stream

    def unsubscribe(self, stream: EventStream) -> None:
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
            with self._log_errors("the live page's feed"):
                self.record_sample()
            # After a delay the missed samples are skipped instead of being taken in a burst.
            due_at = max(due_at + SAMPLE_S, loop.time())
            await asyncio.sleep(due_at - loop.time())

    async def _follow_dead(self) -> None:
        """Read the dead requests again when their number has changed and a reader is connected."""
        while True:
            await self._dead_changed.wait()
            self._dead_changed.clear()
            with self._log_errors("the dead for the live page"), suppress(QueueUnavailableError):
                # The count is taken before the list. A request that dies in between changes the next count,
                # so that the list is read again.
                count = self._status().get("dead")
                self._dead_summary = group_dead(await self._dead(MAX_DEAD_READ))
                self._dead_count = count
                self._send_frames(self._make_frame("dead", self._dead_summary))
            await asyncio.sleep(SAMPLE_S)  # also limits the rate; after a failure the next sample asks again

    @contextmanager
    def _log_errors(self, where: str) -> Iterator[None]:
        """Log an unexpected error once, and continue. A defect here must not stop the dispatcher."""
        try:
            yield
            self._failing_parts.discard(where)
        except Exception as error:
            if where not in self._failing_parts:
                self._failing_parts.add(where)
                emit(Event.INTERNAL_ERROR, where=where, error=repr(error))

    def _make_history(self, last_id: str) -> Json:
        """Return what came after an id, as columns. Everything if the id is not from this process."""
        process, _, number = last_id.partition("-")
        # The id comes from the client, so it may be anything. `int` of very many digits would raise.
        is_own_id = process == self._process and number.isdecimal() and len(number) <= MAX_NUMBER_DIGITS
        is_resumed = is_own_id and int(number) <= self._last_number
        after = int(number) if is_resumed else 0
        samples = [kept for at, kept in self._samples if at > after]
        codes = sorted({code for kept in samples for code in kept.get("results", ())})
        return {
            "complete": not is_resumed,
            "seconds": MAX_SAMPLES * SAMPLE_S,
            "samples": {name: [kept[name] for kept in samples] for name in ("at", *SAMPLE_COLUMNS)},
            "results": {code: [kept.get("results", {}).get(code, 0) for kept in samples] for code in codes},
            "totals": self._totals,
            "events": [told for at, told in self._events if at > after],
        }

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _make_frame(self, kind: str, data: Any, number: int | None = None) -> bytes:
        """Return one message of the event stream. JSON is one line, so it fits into one `data` field."""
        numbered = f"id: {self._process}-{number}\n" if number is not None else ""
        return f"event: {kind}\n{numbered}data: ".encode() + _encode_json(data) + b"\n\n"

    def _send_frames(self, *frames: bytes) -> None:
        for stream in self._streams:
            stream.put_frames(*frames)


def extract_measures(status: Json) -> dict[str, Any]:
    """Return the numbers of a sample from /status. `None` for numbers that are not known."""
    max_sys, reserve = _parse_number(status.get("max_sys")), _parse_number(status.get("reserve"))
    sample: dict[str, Any] = dict.fromkeys(SAMPLE_COLUMNS)
    sample |= {
        name: _round_number(value)
        for name in ("limit", "configured_max_sys", "pending", "delayed", "dead", "at_risk")
        if (value := _parse_number(status.get(name))) is not None
    }
    sample["reason"] = status.get("reason")
    # Without counts of the queue, the requests in flight of other replicas are not known.
    counted = _parse_number(status.get("leased")) is not None
    sample["max_sys"], sample["batch"] = (
        _round_number(max_sys),
        _round_number(_parse_number(status.get("in_flight")) if counted else None),
    )
    sample["realtime"], sample["waiting"] = (
        _round_number(_parse_number(status.get(name))) for name in ("realtime", "realtime_waiting")
    )
    sample["reserve"] = None if max_sys is None or reserve is None else _round_number(reserve * max_sys)
    return sample


def _parse_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _round_number(value: float | None) -> float | int | None:
    """Return the number with at most two decimals, and as an integer if it is whole, to save characters."""
    if value is None:
        return None
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


def group_dead(newest: Sequence[DeadRequest]) -> Json:
    """Return the newest dead requests by reason, the most frequent reason first.

    Each group has the number of its requests and the newest of them.
    """
    groups: dict[str, list[DeadRequest]] = {}
    for dead in newest:
        groups.setdefault(dead.reason, []).append(dead)
    frequent = sorted(groups.values(), key=len, reverse=True)
    shown = [
        {"count": len(group), "newest": _describe_dead(group[0])} for group in frequent[:MAX_DEAD_GROUPS]
    ]
    return {"read_count": len(newest), "reasons": len(groups), "groups": shown}


def _describe_dead(dead: DeadRequest) -> Json:
    """Return a dead request without its payload, with the commands that apply to it."""
    id_ = parse_member(dead.member).id
    return {
        "entry": dead.entry_id,
        "id": id_,
        "reason": dead.reason,
        "died_at": dead.died_at,
        "attempts": dead.failed_attempts,
        "refusals": dead.refusals,
        "deliveries": dead.deliveries,
        "commands": ["show", "requeue", "purge"] if id_ is not None else ["show", "purge"],
    }


def _encode_fields(fields: Mapping[str, Any]) -> Any:
    """Return the fields of an event as valid JSON of limited size, regardless of their values."""
    try:
        encoded = _encode_json(fields)
    except (TypeError, ValueError, RecursionError):
        # Fields of an event may be of any type and even refer to themselves.
        encoded = b""
    if not encoded or len(encoded) > MAX_EVENT_BYTES:
        encoded = _encode_json(
            {str(name): _truncate_value(value) for name, value in islice(fields.items(), 20)}
        )
    return msgspec.Raw(encoded)


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = MAX_EVENT_BYTES // 40


def _truncate_value(value: object) -> str:
    text = value if isinstance(value, str) else _brief.repr(value)
    return text[: MAX_EVENT_BYTES // 40].encode("ascii", "backslashreplace").decode()


def _encode_json(data: Any) -> bytes:
    return msgspec.json.encode(data, enc_hook=str)
