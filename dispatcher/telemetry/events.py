"""What happens, told once: every event by name, and the sinks that hear of it (the log, the event stream)."""

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
    """Every log event: its name, its level, what it means. The name is a promise to log searches."""

    # Adapters add theirs here, a line each: NAME = ("event-name", logging.LEVEL, "What it means")
    SIGNALS_SOURCE = ("signals-source", logging.INFO, "Another source tells how full the pool is")
    SIGNALS_IN_USE = ("signals-in-use", logging.INFO, "Other signals decide than before")
    SIGNALS_UNREADABLE = (
        "signals-unreadable",
        logging.WARNING,
        "A signal cannot be read: the gate closes, soon or at once",
    )
    SIGNALS_READABLE = ("signals-readable", logging.INFO, "The signals can be read again")
    CAPACITY_LEARNED = ("capacity-learned", logging.INFO, "The picker's pages show its maxConcurrency")
    CAPACITY_SEARCH = (
        "capacity-search",
        logging.INFO,
        "Nobody names the capacity: the dispatcher searches for it",
    )
    CAPACITY_DIFFERS = (
        "capacity-differs",
        logging.WARNING,
        "budget.per_endpoint is not what the picker counts with: one of the two is wrong",
    )
    KUBERNETES_ABSENT = ("kubernetes-absent", logging.INFO, "No cluster is known: nothing is watched")
    KUBERNETES_PROBLEM = ("kubernetes-problem", logging.WARNING, "The watch lacks something, and says what")
    KUBERNETES_THROTTLED = (
        "kubernetes-throttled",
        logging.INFO,
        "The API server asks to wait (429); what was seen counts meanwhile",
    )
    KUBERNETES_FINE = ("kubernetes-fine", logging.INFO, "The watch sees all that it needs again")

    DEAD_DROPPED = ("dead-dropped", logging.WARNING, "More dead than queue.dead_max: the oldest went")
    RESULT_LIST_AWAY = ("result-list-away", logging.WARNING, "Its Cluster node is away: results wait")
    WAKE_UPS_GONE = ("wake-ups-gone", logging.WARNING, "No subscription: new work is found by polling")
    WAKE_UPS_BACK = ("wake-ups-back", logging.INFO, "New work wakes the dispatcher again")

    STARTED = (
        "started",
        logging.INFO,
        "The dispatcher is up: version, pool, configuration, queue and what was found in it, gateway, owner",
    )
    DRAINING = ("draining", logging.INFO, "A signal asked to stop; nothing more is claimed")
    STOPPED = ("stopped", logging.INFO, "Everything held was handed in or given back")
    LEFT_BEHIND = ("left-behind", logging.ERROR, "Stopped with leases that the queue could not be told of")
    GATE = (
        "gate",
        logging.INFO,
        "The gate's reason changed: every term of the law, and the sentence that explains it",
    )
    HEALTH = ("health", logging.INFO, "The dispatcher works, is idle, or waits for a reason that is no fault")
    UNHEALTHY = (
        "unhealthy",
        logging.WARNING,
        "The dispatcher is degraded or failing, or cannot know: `cause`, `why`, and where to look first",
    )
    QUEUE_UNREACHABLE = ("queue-unreachable", logging.ERROR, "Redis cannot be reached; nothing new is sent")
    QUEUE_BACK = ("queue-back", logging.INFO, "Redis can be reached again")
    MODEL = (
        "model",
        logging.INFO,
        "A model that the settings name, or that requests wait for, is served, loaded, gone or not known",
    )
    VERSION = ("version", logging.INFO, "A version of a model is loaded, cold, open, draining, spare or gone")
    WARM_UP = ("warm-up", logging.INFO, "A version answered its recorded requests at an endpoint")
    WARM_UP_FAILED = (
        "warm-up-failed",
        logging.WARNING,
        "Some it answered with errors, or not in time: why, and whether it is used all the same",
    )
    LEASE_LOST = (
        "lease-lost",
        logging.WARNING,
        "A lease of ours ran out; its request was cut and is another's",
    )
    SLOW = ("slow", logging.WARNING, "The event loop cannot keep pace: too little CPU; with figures")
    TAKEN_BACK = (
        "taken-back",
        logging.WARNING,
        "Leases of dispatchers that are gone, silent or late were taken back: their requests run again",
    )
    BATCHING_OFF = (
        "batching-off",
        logging.ERROR,
        "Merged calls are not answered as single ones are: nothing of this model is merged any more",
    )
    BATCHING_LIMIT = (
        "batching-limit",
        logging.INFO,
        "The server refused a list for its length: what it is taken to take from now on",
    )
    SEQUENCES_HELD = (
        "sequences-held",
        logging.WARNING,
        "A request has failed, and its sequence waits for an operator: how many, the newest",
    )
    SEQUENCES_RELEASED = ("sequences-released", logging.INFO, "Operators let so many go on")
    SEQUENCES_ABORTED = (
        "sequences-aborted",
        logging.WARNING,
        "A request has failed, or an operator gave it up: the later ones end unsent; how many, the newest",
    )
    SEQUENCES_ENDED = (
        "sequences-ended",
        logging.INFO,
        "Ended without a last request: how many were idle, too old, cancelled",
    )
    SEQUENCES_GAPS = (
        "sequences-gaps",
        logging.WARNING,
        "Indexes that never came have been passed over: how many",
    )
    SURPRISE = (
        "surprise",
        logging.ERROR,
        "A defect of ours, caught: a request lost an attempt, or something is not shown",
    )
    TRACES_LOST = ("traces-lost", logging.WARNING, "Spans are lost on their way to tracing.endpoint: why")
    TRACES_FINE = ("traces-fine", logging.INFO, "Nothing was lost for a while; how many spans were")

    # Of each request, at debug only: see `detailed`.
    SENT = ("sent", logging.DEBUG, "A try begins")
    TRY = ("try", logging.DEBUG, "A try has ended: its outcome, its status, how long it took")
    ENDED = (
        "ended",
        logging.DEBUG,
        "A lease has ended: settled, released or buried, and what the queue said",
    )

    LIBRARY = ("library", logging.WARNING, "A library that we use complains: `logger` says which")
    RELOADED = ("config-reloaded", logging.INFO, "The changed configuration is in force: `changed` has what")
    RELOAD_REFUSED = ("config-refused", logging.ERROR, "The changed configuration is bad; the old one stays")

    def __init__(self, event: str, level: int, meaning: str) -> None:
        self.event = event
        self.level = level
        self.meaning = meaning


Sink = Callable[[Event, Mapping[str, Any]], None]
"""Hears of an event with its fields. Called where the event happens: it must be quick."""

_logger = structlog.get_logger("dispatcher")


def log(event: Event, fields: Mapping[str, Any]) -> None:
    """The sink that is always there, unless events are diverted."""
    if event is Event.SURPRISE:
        fields = {**fields, "exc_info": sys.exception()}
    _logger.log(event.level, event.event, **fields)


_detailed = False


def detail(wanted: bool) -> None:
    """Whether anybody wants events at debug. One for the process, as the log's level is."""
    global _detailed
    _detailed = wanted


def detailed() -> bool:
    """To be asked before anything is built for an event at debug."""
    return _detailed


_sinks: ContextVar[tuple[Sink, ...]] = ContextVar("sinks", default=(log,))
_about: ContextVar[Mapping[str, Any]] = ContextVar("about", default={})  # noqa: B039 -- replaced, never changed


def emit(event: Event, **fields: Any) -> None:
    """Tell every sink of an event; the first alone, which is the log, of one at debug. Never a secret or a
    payload among the fields. A sink that raises ends nothing, for what is told is only told."""
    about = _about.get()
    if about:
        fields = {**about, **fields}
    sinks = _sinks.get()
    for sink in sinks if event.level > logging.DEBUG else sinks[:1]:
        try:
            sink(event, fields)
        except Exception as error:
            with suppress(Exception):  # it is the log that cannot be written: nobody is left to be told
                log(Event.SURPRISE, {"where": f"a sink, of {event.event}", "error": repr(error)})


@contextmanager
def heard_by(sink: Sink) -> Iterator[None]:
    """Within the block, and in tasks started there, `sink` hears of events too."""
    token = _sinks.set((*_sinks.get(), sink))
    try:
        yield
    finally:
        _sinks.reset(token)


@contextmanager
def diverted(to: Sink) -> Iterator[None]:
    """Within the block, and in tasks started there, events go to `to` alone: what happens in a simulation has
    not happened."""
    token = _sinks.set((to,))
    try:
        yield
    finally:
        _sinks.reset(token)


def speaking_of(**fields: Any) -> None:
    """From here on, in this task alone, every event has these fields too: which request it is about."""
    _about.set({**_about.get(), **fields})
