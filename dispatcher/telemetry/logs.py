"""The log: one line an event, for people on a terminal, as JSON otherwise. Equal warnings in a burst are
counted instead of repeated."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from dispatcher.core.printable import plain
from dispatcher.telemetry import events
from dispatcher.telemetry.events import Event

REPEATS_S = 30.0
"""Lines that are equal to one before are counted for so long, and then told in one."""
MOST_KINDS = 1000
"""So many are remembered; lines of others are all told."""
_SAID_CHARS = 500
ABOUT = frozenset(("request", "attempt", "trace", "exc_info"))
"""What a line may be about, and where an error came from: two lines that differ in nothing else are equal."""
STATES = frozenset(
    event.event
    for event in Event
    if event.level < logging.WARNING
    or event
    in (
        Event.SIGNALS_UNREADABLE,
        Event.KUBERNETES_PROBLEM,
        Event.WAKE_UPS_GONE,
        Event.QUEUE_UNREACHABLE,
        Event.TRACES_LOST,
        Event.SLOW,
        Event.CAPACITY_DIFFERS,
        Event.LEFT_BEHIND,
        Event.RELOAD_REFUSED,
    )
)
"""Told each time: each says that something has changed, most have a counterpart, and none comes in bursts.
One of two held back, and the log would end with the wrong one."""


@dataclass(slots=True)
class _Burst:
    line: Mapping[str, Any]
    ends_at: float
    repeated: int = 0


class Repeats:
    """Which lines are told, and how often those that were not have come. Time is the caller's."""

    def __init__(self, for_s: float = REPEATS_S) -> None:
        self._for_s = for_s
        self._bursts: dict[Hashable, _Burst] = {}

    def come(self, line: Mapping[str, Any], now: float) -> bool:
        """Whether a line is to be told now: the first of its kind is. Lines are of one kind when they differ
        in numbers alone, or in the request that they are about."""
        key = _kind(line)
        burst = self._bursts.get(key)
        if burst is None:
            if len(self._bursts) < MOST_KINDS:
                self._bursts[key] = _Burst(line, now + self._for_s)
            return True
        burst.line = line
        burst.repeated += 1
        return False

    def due(self, now: float) -> list[dict[str, Any]]:
        """The newest line of each burst that is over, with how many were not told. One that nothing was
        counted in is forgotten, the others go on."""
        told = []
        for key, burst in [*self._bursts.items()]:
            if burst.ends_at > now:
                continue
            del self._bursts[key]
            if burst.repeated:
                told.append({**burst.line, "repeated": burst.repeated})
                self._bursts[key] = _Burst(burst.line, now + self._for_s)
        return told

    @property
    def next_at(self) -> float | None:
        """When something will be due."""
        return min((burst.ends_at for burst in self._bursts.values()), default=None)


def _kind(line: Mapping[str, Any]) -> Hashable:
    return tuple(
        (name, str(value))
        for name, value in line.items()
        if name not in ABOUT and not isinstance(value, int | float)
    )


class _Counting:
    """A processor that drops what `Repeats` holds back, and sees to it that the counts are told."""

    def __init__(self) -> None:
        self._repeats = Repeats()
        self._lock = threading.RLock()
        """Libraries log from threads of their own, and from within a collection of garbage."""
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, logger: Any, method: str, line: structlog.typing.EventDict) -> Mapping[str, Any]:
        if line.get("event") in STATES or line.get("level") not in ("warning", "error") or "repeated" in line:
            return line
        now = time.monotonic()
        with self._lock:
            told = self._repeats.come({**line}, now)
            self._set_timer()
        if not told:
            raise structlog.DropEvent
        return line

    def _set_timer(self) -> None:
        if self._timer is None and (at := self._repeats.next_at) is not None:
            with suppress(RuntimeError):  # no loop runs: nothing lives long enough to repeat itself
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max(0.0, at - time.monotonic()), self.tell)

    def tell(self, *, all_of_it: bool = False) -> None:
        """Say what is due, or, at the end, all that was counted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            due = self._repeats.due(float("inf") if all_of_it else time.monotonic())
            if all_of_it:
                self._repeats = Repeats()
        for line in due:
            level = logging.getLevelNamesMapping()[line.pop("level").upper()]
            structlog.get_logger("dispatcher").log(level, line.pop("event"), **line)
        if not all_of_it:
            with self._lock:
                self._set_timer()


_counting = _Counting()


class _Libraries(logging.Handler):
    """What libraries log goes into our log, as a line like any other, and not beside it to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            said = " ".join(record.getMessage().split())[:_SAID_CHARS]
            told: dict[str, Any] = {"logger": record.name, "said": said}
            if record.exc_info:
                told |= {"error": repr(record.exc_info[1])[:_SAID_CHARS], "exc_info": record.exc_info}
            level = logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING
            structlog.get_logger("dispatcher").log(level, Event.LIBRARY.event, **told)
        except Exception:  # no log is worth a request
            self.handleError(record)


_libraries = _Libraries(logging.WARNING)


def _printable(_: Any, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Nothing that others have named steers the terminal; JSON escapes it by itself."""
    return {
        name: plain(value, keep="\n" if name == "exception" else "") if isinstance(value, str) else value
        for name, value in line.items()
    }


def configure(level: str, style: Literal["auto", "console", "json"]) -> None:
    """Set up logging for the process: console on a terminal, one JSON object a line otherwise."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    rendering: tuple[structlog.typing.Processor, ...] = (structlog.processors.JSONRenderer(),)
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    if console:  # for a person: the clock on the wall, and no columns
        colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        rendering = (
            _printable,
            structlog.dev.ConsoleRenderer(0, colors=colours, pad_level=False),
        )
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    events.detail(level == "debug")
    if _libraries not in logging.getLogger().handlers:
        logging.getLogger().addHandler(_libraries)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _counting,
            stamp,
            structlog.processors.format_exc_info,
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,  # or a reload would change nothing
    )


def finish() -> None:
    """Say what was counted and not told yet: the process ends."""
    _counting.tell(all_of_it=True)
