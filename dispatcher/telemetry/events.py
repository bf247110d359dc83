"""Events of the dispatcher, and the sinks that receive them: the log, the event stream and the metrics."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from typing import Any

import structlog


class Event(Enum):
    """Every event with its name, its log level and its description. Log searches depend on the names."""

    # One entry per event: NAME = ("event-name", logging.LEVEL, "Description")
    SIGNALS_SOURCE = ("signals-source", logging.INFO, "The load of the pool is now read from another source")
    SIGNALS_IN_USE = ("signals-in-use", logging.INFO, "The limit now follows other signals")
    SIGNALS_UNREADABLE = (
        "signals-unreadable",
        logging.WARNING,
        "A signal cannot be read; the gate closes at once or soon",
    )
    SIGNALS_READABLE = ("signals-readable", logging.INFO, "The signals can be read again")
    CAPACITY_LEARNED = (
        "capacity-learned",
        logging.INFO,
        "The metrics of the endpoint picker show its maxConcurrency",
    )
    CAPACITY_SEARCH = (
        "capacity-search",
        logging.INFO,
        "The capacity is neither configured nor shown; the dispatcher searches for it",
    )
    CAPACITY_DIFFERS = (
        "capacity-differs",
        logging.WARNING,
        "budget.per_endpoint differs from the maxConcurrency of the picker; one of them is wrong",
    )
    KUBERNETES_ABSENT = (
        "kubernetes-absent",
        logging.INFO,
        "There is no Kubernetes cluster; nothing is watched",
    )
    KUBERNETES_PROBLEM = (
        "kubernetes-problem",
        logging.WARNING,
        "A part of the Kubernetes watch fails: `problem` says which",
    )
    KUBERNETES_THROTTLED = (
        "kubernetes-throttled",
        logging.INFO,
        "The API server asks to wait (429); the last known state is used meanwhile",
    )
    KUBERNETES_RECOVERED = ("kubernetes-recovered", logging.INFO, "The Kubernetes watch is complete again")

    DEAD_DROPPED = (
        "dead-dropped",
        logging.WARNING,
        "The dead-letter set exceeded queue.dead_max; its oldest requests were dropped",
    )
    RESULT_LIST_UNREACHABLE = (
        "result-list-unreachable",
        logging.WARNING,
        "The Redis Cluster node of a result list is unreachable; its results wait",
    )
    WAKE_UPS_UNAVAILABLE = (
        "wake-ups-unavailable",
        logging.WARNING,
        "The wake-up subscription is lost; new requests are found by polling",
    )
    WAKE_UPS_AVAILABLE = ("wake-ups-available", logging.INFO, "The wake-up subscription works again")

    STARTED = (
        "started",
        logging.INFO,
        "The dispatcher has started: version, pool, configuration, queue and its counts, gateway, owner",
    )
    DRAINING = ("draining", logging.INFO, "The process was asked to stop; it claims nothing more")
    STOPPED = ("stopped", logging.INFO, "The process has stopped; all leases were completed or released")
    LEASES_LEFT_BEHIND = (
        "leases-left-behind",
        logging.ERROR,
        "The process has stopped with leases that it could neither complete nor release",
    )
    GATE = (
        "gate",
        logging.INFO,
        "The reason of the gate changed: all terms of the limit, and an explanation",
    )
    HEALTH = (
        "health",
        logging.INFO,
        "The dispatcher works, is idle, or waits for a reason that is not a fault",
    )
    UNHEALTHY = (
        "unhealthy",
        logging.WARNING,
        "The dispatcher is degraded, failing or unknown: `cause`, `why`, and where to look first",
    )
    QUEUE_UNREACHABLE = ("queue-unreachable", logging.ERROR, "Redis cannot be reached; nothing new is sent")
    QUEUE_REACHABLE = ("queue-reachable", logging.INFO, "Redis can be reached again")
    CANCEL_MARKERS_UNREADABLE = (
        "cancel-markers-unreadable",
        logging.WARNING,
        "Cancel markers of some requests cannot be read, so these requests wait: `why`",
    )
    CANCEL_MARKERS_READABLE = (
        "cancel-markers-readable",
        logging.INFO,
        "The cancel markers of these requests can be read again",
    )
    MODEL = (
        "model",
        logging.INFO,
        "A model that is configured or waited for is now served, loading, gone or unknown",
    )
    VERSION = (
        "version",
        logging.INFO,
        "A version of a model is now loading, cold, open, draining, retiring or gone",
    )
    SLICING = (
        "slicing",
        logging.INFO,
        "Requests to the model are sent in slices from now on, or whole, with the reason",
    )
    WARM_UP = ("warm-up", logging.INFO, "A version answered all its warm-up requests on an endpoint")
    WARM_UP_FAILED = (
        "warm-up-failed",
        logging.WARNING,
        "Warm-up requests failed or timed out: why, and whether the version is used anyway",
    )
    LEASE_LOST = (
        "lease-lost",
        logging.WARNING,
        "A lease of this process expired; its request was aborted here and runs elsewhere",
    )
    EVENT_LOOP_SLOW = (
        "event-loop-slow",
        logging.WARNING,
        "The event loop is late because the process gets too little CPU: how late, and the CPU limit",
    )
    LEASES_RECLAIMED = (
        "leases-reclaimed",
        logging.WARNING,
        "Leases of dispatchers that ended, were silent or late were reclaimed; their requests run again",
    )
    BATCHING_OFF = (
        "batching-off",
        logging.ERROR,
        "Answers to merged calls differ from those to single calls; merging is off for this model",
    )
    BATCHING_LIMIT = (
        "batching-limit",
        logging.INFO,
        "The model server rejected a list as too long: the new maximum length",
    )
    SEQUENCES_HELD = (
        "sequences-held",
        logging.WARNING,
        "Sequences wait for an operator because a request failed: how many, and the newest one",
    )
    SEQUENCES_RELEASED = ("sequences-released", logging.INFO, "Operators resumed sequences: how many")
    SEQUENCES_ABORTED = (
        "sequences-aborted",
        logging.WARNING,
        "Sequences were aborted by a failed request or an operator: how many, and the newest one",
    )
    SEQUENCES_ENDED = (
        "sequences-ended",
        logging.INFO,
        "Sequences ended without their last request: how many were idle, too old or cancelled",
    )
    SEQUENCES_GAPS = (
        "sequences-gaps",
        logging.WARNING,
        "Sequences continued without requests that never came: how many were skipped",
    )
    INTERNAL_ERROR = (
        "internal-error",
        logging.ERROR,
        "A defect of the dispatcher was caught; an attempt failed or a value is not shown",
    )
    TRACES_LOST = (
        "traces-lost",
        logging.WARNING,
        "Spans cannot be sent to tracing.endpoint and are lost: why",
    )
    TRACES_RECOVERED = ("traces-recovered", logging.INFO, "Spans are sent again: how many were lost")

    # Events of single requests, at level debug only.
    ATTEMPT_STARTED = ("attempt-started", logging.DEBUG, "An attempt has started")
    ATTEMPT = ("attempt", logging.DEBUG, "An attempt has ended: outcome, status, duration")
    LEASE_ENDED = (
        "lease-ended",
        logging.DEBUG,
        "A lease was settled, released or dead-lettered, with the answer of the queue",
    )

    LIBRARY_WARNING = (
        "library-warning",
        logging.WARNING,
        "A library logged a warning or an error: `logger` names it",
    )
    CONFIG_RELOADED = (
        "config-reloaded",
        logging.INFO,
        "The changed configuration is in use: `changed` lists the keys",
    )
    CONFIG_REFUSED = (
        "config-refused",
        logging.ERROR,
        "The changed configuration is invalid; the old one stays in use",
    )

    def __init__(self, event_name: str, level: int, description: str) -> None:
        self.event_name = event_name
        self.level = level
        self.description = description


EventSink = Callable[[Event, Mapping[str, Any]], None]
"""Function that receives an event and its fields. It runs inside `emit` and must return quickly."""

_logger = structlog.get_logger("dispatcher")


def log_event(event: Event, fields: Mapping[str, Any]) -> None:
    """Write the event to the log. This sink is always active, except inside `divert_events`."""
    if event is Event.INTERNAL_ERROR:
        # The event is emitted inside an except block: the traceback is that of its exception.
        fields = {**fields, "exc_info": sys.exception()}
    _logger.log(event.level, event.event_name, **fields)


_is_debug_enabled = False


def enable_debug_events(is_enabled: bool) -> None:
    """Enable or disable events of level debug in the whole process, as the log level is per process."""
    global _is_debug_enabled
    _is_debug_enabled = is_enabled


def is_debug_enabled() -> bool:
    """Return whether events of level debug are enabled. Ask this before building the fields of such an
    event."""
    return _is_debug_enabled


# A context variable, so that a simulation diverts only the events of its own tasks.
_sinks: ContextVar[tuple[EventSink, ...]] = ContextVar("sinks", default=(log_event,))
_bound_fields: ContextVar[Mapping[str, Any]] = ContextVar("about", default={})  # noqa: B039 -- replaced, never changed


def emit(event: Event, **fields: Any) -> None:
    """Send an event to every sink.

    An event of level debug goes only to the first sink, which is the log. Fields must not contain secrets or
    payloads. Exceptions of sinks are logged and not raised, so that a broken sink cannot stop the caller.
    """
    bound_fields = _bound_fields.get()
    if bound_fields:
        fields = {**bound_fields, **fields}
    sinks = _sinks.get()
    # Debug events come several times per request. Only the log, which is the first sink, gets them.
    for sink in sinks if event.level > logging.DEBUG else sinks[:1]:
        try:
            sink(event, fields)
        except Exception as error:
            with suppress(Exception):  # the broken sink may be the log itself
                log_event(
                    Event.INTERNAL_ERROR, {"where": f"a sink, of {event.event_name}", "error": repr(error)}
                )


@contextmanager
def add_sink(sink: EventSink) -> Iterator[None]:
    """Add `sink` to the sinks inside the block and in tasks started there."""
    token = _sinks.set((*_sinks.get(), sink))
    try:
        yield
    finally:
        _sinks.reset(token)


@contextmanager
def divert_events(sink: EventSink) -> Iterator[None]:
    """Send events only to `sink` inside the block and in tasks started there. A simulation uses this to keep
    its events out of the log and of the metrics."""
    token = _sinks.set((sink,))
    try:
        yield
    finally:
        _sinks.reset(token)


def bind_event_fields(**fields: Any) -> None:
    """Add these fields to every later event of the current task."""
    _bound_fields.set({**_bound_fields.get(), **fields})
