"""A burst of equal warnings is counted; nothing that differs is held back."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from structlog import DropEvent

from dispatcher.telemetry import logs
from dispatcher.telemetry.events import Event, add_sink, emit
from dispatcher.telemetry.logs import MAX_LINE_KINDS, NEVER_SUPPRESSED, REPEAT_WINDOW_S, RepeatFilter


def line(event: str = "lease-lost", **fields: Any) -> dict[str, Any]:
    return {"event": event, "level": "warning", **fields}


def test_the_first_is_told_the_rest_counted_and_told_once() -> None:
    repeats = RepeatFilter(30.0)
    assert repeats.should_log(line(entry=1), 0.0)
    assert not any(repeats.should_log(line(entry=n), n / 100) for n in range(2, 100))
    assert repeats.pop_due_lines(29.9) == []
    assert repeats.pop_due_lines(30.0) == [line(entry=99, repeated=98)]
    assert repeats.pop_due_lines(60.0) == [], "nothing came since"
    assert repeats.should_log(line(entry=100), 61.0), "a new burst begins with a line of its own"


def test_a_burst_that_goes_on_is_told_again_each_time() -> None:
    repeats = RepeatFilter(30.0)
    told = [repeats.should_log(line(entry=n), n / 10) or repeats.pop_due_lines(n / 10) for n in range(901)]
    first, *again = [found for found in told if found]
    assert first is True
    assert [found is True or found[0]["repeated"] for found in again] == [300, 300, 300]


def test_errors_that_differ_are_all_told() -> None:
    repeats = RepeatFilter()
    assert all(
        repeats.should_log(line("internal-error", where=where, error="KeyError('a')"), 0.0) for where in "abc"
    )
    assert repeats.should_log(line("internal-error", where="a", error="KeyError('b')"), 0.0)
    assert repeats.should_log(line("dead-dropped", where="a"), 0.0)


def test_the_same_of_another_request_is_the_same() -> None:
    repeats = RepeatFilter()
    assert repeats.should_log(line(request="r-1", trace="aa", attempt=1, why="x"), 0.0)
    assert not repeats.should_log(line(request="r-2", trace="bb", attempt=2, why="x"), 0.0)


def test_what_is_remembered_is_bounded_and_beyond_it_all_is_told() -> None:
    repeats = RepeatFilter()
    assert all(repeats.should_log(line(why=f"{n}"), 0.0) for n in range(2 * MAX_LINE_KINDS))
    assert len(repeats._bursts) == MAX_LINE_KINDS
    assert repeats.should_log(line(why=f"{2 * MAX_LINE_KINDS - 1}"), 0.0)


def test_what_says_that_something_changed_is_never_held_back() -> None:
    assert {
        "gate",
        "started",
        "draining",
        "stopped",
        "leases-left-behind",
        "config-refused",
        "queue-reachable",
    } <= NEVER_SUPPRESSED
    assert {
        "queue-unreachable",
        "signals-unreadable",
        "wake-ups-unavailable",
        "traces-lost",
    } <= NEVER_SUPPRESSED
    assert (
        not {"lease-lost", "internal-error", "dead-dropped", "leases-reclaimed", "result-list-unreachable"}
        & NEVER_SUPPRESSED
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 20)), max_size=200))
def test_every_line_is_told_or_counted(steps: list[tuple[str, int, float]]) -> None:
    repeats, now = RepeatFilter(), 0.0
    told = counted = 0
    for why, number, pause_s in steps:
        now += pause_s
        counted += sum(due["repeated"] for due in repeats.pop_due_lines(now))
        told += repeats.should_log(line(why=why, n=number), now)
    counted += sum(due["repeated"] for due in repeats.pop_due_lines(float("inf")))
    assert told + counted == len(steps)
    at = repeats.next_at
    assert at is None or at > now + REPEAT_WINDOW_S or at == float("inf")


def test_libraries_may_log_from_any_thread() -> None:
    counting, errors = logs._RepeatProcessor(), []

    def many(name: int) -> None:
        try:
            for number in range(20_000):
                with suppress(DropEvent):
                    counting(None, "", {"event": f"{name} {number % 700}", "level": "warning"})
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=many, args=(name,)) for name in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors


LOG = """
import asyncio, sys
from dispatcher.telemetry import logs
from dispatcher.telemetry.events import Event, emit, is_debug_enabled

logs.configure_logging("warning", "json")
emit(Event.STARTED, version="hidden at this level")
for entry in range(50):
    emit(Event.LEASE_LOST, entry=entry)
    emit(Event.QUEUE_UNREACHABLE, why="gone")
logs.configure_logging("debug", "json")
emit(Event.STARTED, version="shown")
assert is_debug_enabled()
logs.configure_logging("info", "json")
assert not is_debug_enabled()
import logging, threading
for _ in range(3):
    logging.getLogger("asyncio").error("Task %r was never\\nretrieved", 7, exc_info=KeyError("x"))
thread = threading.Thread(target=lambda: logging.getLogger("urllib3").warning("from a thread"))
thread.start()
thread.join()
logging.getLogger("urllib3").info("not worth a line")
try:
    {}["key"]
except KeyError as error:
    emit(Event.INTERNAL_ERROR, where="here", error=repr(error))
logs.log_remaining_repeats()
logs.log_remaining_repeats()
"""


def test_log_of_a_process() -> None:
    """Its level may change at any time, and nothing that was counted is lost at its end."""
    done = subprocess.run([sys.executable, "-c", LOG], capture_output=True, text=True, check=True, timeout=60)
    lines = [json.loads(each) for each in io.StringIO(done.stderr)]
    events = [each["event"] for each in lines]
    assert events.count("queue-unreachable") == 50
    assert [each["version"] for each in lines if each["event"] == "started"] == ["shown"]
    lost = [each for each in lines if each["event"] == "lease-lost"]
    assert [each.get("repeated") for each in lost] == [None, 49]
    assert [each["entry"] for each in lost] == [0, 49]
    assert all(each["level"] == "warning" and each["timestamp"] for each in lost)
    warnings = [each for each in lines if each["event"] == "library-warning"]
    assert [(each["logger"], each["level"], each["message"]) for each in warnings] == [
        ("asyncio", "error", "Task 7 was never retrieved"),
        ("urllib3", "warning", "from a thread"),
        ("asyncio", "error", "Task 7 was never retrieved"),
    ]
    assert warnings[2]["repeated"] == 2
    assert "KeyError: 'x'" in warnings[0]["exception"]
    (internal_error,) = (each for each in lines if each["event"] == "internal-error")
    assert internal_error["exception"].startswith("Traceback")


FULL = """
from dispatcher.telemetry import logs
from dispatcher.telemetry.events import Event, add_sink, emit

logs.configure_logging("info", "json")
heard = []
with add_sink(lambda event, _: heard.append(event)):
    emit(Event.STARTED)
print(heard)
"""


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", FULL], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert b"Event.STARTED" in done.stdout


def test_a_sink_that_raises_ends_nothing_and_the_others_hear() -> None:
    heard: list[Event] = []

    def broken(event: Event, _: Mapping[str, Any]) -> None:
        raise RuntimeError(event.event_name)

    with add_sink(broken), add_sink(lambda event, _: heard.append(event)):
        emit(Event.STARTED)
    assert heard == [Event.STARTED]


CONSOLE = r"""
from dispatcher.telemetry import logs
from dispatcher.telemetry.events import Event, emit

logs.configure_logging("info", "console")
emit(Event.SIGNALS_UNREADABLE, why="it says \x1b]0;pwned\x07\nforged", hint="\x9b31m")
try:
    raise ValueError("\x1b]0;pwned\x07")
except ValueError as error:
    emit(Event.INTERNAL_ERROR, where="here", error=repr(error))
"""


def test_log_on_a_console_shows_controls_as_escapes() -> None:
    done = subprocess.run([sys.executable, "-c", CONSOLE], capture_output=True, text=True, timeout=60)
    told = re.sub(r"\x1b\[[0-9]*m", "", done.stderr)  # our own colours
    assert r"\x1b]0;pwned" in told
    assert all(line.isprintable() for line in told.split("\n"))
    assert "Traceback" in told
