"""Log output: one line per event, as text on a terminal and as JSON otherwise.

A warning or an error that repeats within REPEAT_WINDOW_S is counted instead of written again.
"""

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

from dispatcher.common.printable import escape_unprintable
from dispatcher.telemetry import events
from dispatcher.telemetry.events import Event

REPEAT_WINDOW_S = 30.0
"""Time for which equal lines are counted before one line with their number is written."""
MAX_LINE_KINDS = 1000
"""Maximum number of different lines that are tracked. Lines beyond it are always written."""
_MAX_MESSAGE_CHARS = 500
CONTEXT_FIELDS = frozenset(("request", "attempt", "trace", "exc_info"))
"""Fields that name the request or the origin of an error. Lines that differ only in these fields are
equal."""
NEVER_SUPPRESSED = frozenset(
    event.event_name
    for event in Event
    if event.level < logging.WARNING
    or event
    in (
        Event.SIGNALS_UNREADABLE,
        Event.KUBERNETES_PROBLEM,
        Event.WAKE_UPS_UNAVAILABLE,
        Event.QUEUE_UNREACHABLE,
        Event.CANCEL_MARKERS_UNREADABLE,
        Event.TRACES_LOST,
        Event.EVENT_LOOP_SLOW,
        Event.CAPACITY_DIFFERS,
        Event.LEASES_LEFT_BEHIND,
        Event.CONFIG_REFUSED,
    )
)
"""Names of events that are never counted instead of written. Each of them reports a change of state and does
not come in bursts. If one of a pair of such events were suppressed, the log would end with the wrong
state."""


@dataclass(slots=True)
class _Burst:
    line: Mapping[str, Any]
    ends_at: float
    repeat_count: int = 0


class RepeatFilter:
    """Filter that decides which lines are written and counts the others. The caller passes the time."""

    def __init__(self, window_s: float = REPEAT_WINDOW_S) -> None:
        self._window_s = window_s
        self._bursts: dict[Hashable, _Burst] = {}

    def should_log(self, line: Mapping[str, Any], now: float) -> bool:
        """Return whether the line is written now, which is true for the first of its kind. Two lines are of
        the same kind if they differ only in numbers or in CONTEXT_FIELDS."""
        key = _make_line_key(line)
        burst = self._bursts.get(key)
        if burst is None:
            if len(self._bursts) < MAX_LINE_KINDS:
                self._bursts[key] = _Burst(line, now + self._window_s)
            return True
        burst.line = line
        burst.repeat_count += 1
        return False

    def pop_due_lines(self, now: float) -> list[dict[str, Any]]:
        """Return the newest line of each burst that is over, with the number of suppressed lines. A burst
        without suppressed lines is forgotten; the others start a new window."""
        lines = []
        for key, burst in [*self._bursts.items()]:
            if burst.ends_at > now:
                continue
            del self._bursts[key]
            if burst.repeat_count:
                lines.append({**burst.line, "repeated": burst.repeat_count})
                self._bursts[key] = _Burst(burst.line, now + self._window_s)
        return lines

    @property
    def next_at(self) -> float | None:
        """Time at which the next burst is over, or `None` if there is no burst."""
        return min((burst.ends_at for burst in self._bursts.values()), default=None)


def _make_line_key(line: Mapping[str, Any]) -> Hashable:
    return tuple(
        (name, str(value))
        for name, value in line.items()
        # Durations and counts differ in lines that say the same.
        if name not in CONTEXT_FIELDS and not isinstance(value, int | float)
    )


class _RepeatProcessor:
    """Processor for structlog that drops suppressed lines and later logs their number."""

    def __init__(self) -> None:
        self._filter = RepeatFilter()
        self._lock = threading.RLock()
        """Lock that is reentrant because libraries log from their own threads, and because a garbage
        collection inside the locked block can log too."""
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, logger: Any, method: str, line: structlog.typing.EventDict) -> Mapping[str, Any]:
        # A line with `repeated` is the result of the counting, and must not be counted itself.
        if (
            line.get("event") in NEVER_SUPPRESSED
            or line.get("level") not in ("warning", "error")
            or "repeated" in line
        ):
            return line
        now = time.monotonic()
        with self._lock:
            is_first = self._filter.should_log({**line}, now)
            self._set_timer()
        if not is_first:
            raise structlog.DropEvent
        return line

    def _set_timer(self) -> None:
        if self._timer is None and (at := self._filter.next_at) is not None:
            with suppress(RuntimeError):  # no event loop: the process is a short command, and nothing repeats
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max(0.0, at - time.monotonic()), self.log_due_lines)

    def log_due_lines(self, *, is_final: bool = False) -> None:
        """Log the numbers of suppressed lines that are due, or all of them if the process is about to end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            due = self._filter.pop_due_lines(float("inf") if is_final else time.monotonic())
            if is_final:
                self._filter = RepeatFilter()
        for line in due:
            # These lines pass through the processors again, which add level and time.
            level = logging.getLevelNamesMapping()[line.pop("level").upper()]
            structlog.get_logger("dispatcher").log(level, line.pop("event"), **line)
        if not is_final:
            with self._lock:
                self._set_timer()


_repeat_processor = _RepeatProcessor()


class _LibraryLogHandler(logging.Handler):
    """Handler that writes records of libraries to the log of the dispatcher instead of plain text to
    stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = " ".join(record.getMessage().split())[:_MAX_MESSAGE_CHARS]
            fields: dict[str, Any] = {"logger": record.name, "message": message}
            if record.exc_info:
                fields |= {
                    "error": repr(record.exc_info[1])[:_MAX_MESSAGE_CHARS],
                    "exc_info": record.exc_info,
                }
            level = logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING
            structlog.get_logger("dispatcher").log(level, Event.LIBRARY_WARNING.event_name, **fields)
        except Exception:  # a failure to log must not fail the request
            self.handleError(record)


_library_handler = _LibraryLogHandler(logging.WARNING)


def _escape_values(_: Any, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters, so that text of clients and servers cannot control the terminal. JSON needs
    no such step because its encoder escapes them."""
    return {
        name: escape_unprintable(value, keep="\n" if name == "exception" else "")
        if isinstance(value, str)
        else value
        for name, value in line.items()
    }


def configure_logging(level: str, style: Literal["auto", "console", "json"]) -> None:
    """Configure logging for the process: text on a terminal, otherwise one JSON object per line."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    rendering: tuple[structlog.typing.Processor, ...] = (structlog.processors.JSONRenderer(),)
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    if console:  # for people: local time, and no padded columns
        colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        rendering = (
            _escape_values,
            structlog.dev.ConsoleRenderer(0, colors=colours, pad_level=False),
        )
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    events.enable_debug_events(level == "debug")
    # A reload of the settings calls this function again.
    if _library_handler not in logging.getLogger().handlers:
        logging.getLogger().addHandler(_library_handler)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            # Counted before time and traceback are added, which make every line different.
            _repeat_processor,
            stamp,
            structlog.processors.format_exc_info,
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,  # else a reload of the settings could not change the level
    )


def log_remaining_repeats() -> None:
    """Log the numbers of suppressed lines that were not logged yet. Called when the process ends."""
    _repeat_processor.log_due_lines(is_final=True)
