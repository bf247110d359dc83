"""Repeated log lines are counted in a burst, and different lines are all logged."""

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


def create_line(event: str = "lease-lost", **fields: Any) -> dict[str, Any]:
    return {"event": event, "level": "warning", **fields}


def test_first_line_is_logged_and_its_repeats_are_counted() -> None:
    repeats = RepeatFilter(30.0)
    assert repeats.should_log(create_line(entry=1), 0.0)
    assert not any(repeats.should_log(create_line(entry=n), n / 100) for n in range(2, 100))
    assert repeats.pop_due_lines(29.9) == []
    assert repeats.pop_due_lines(30.0) == [create_line(entry=99, repeated=98)]
    assert repeats.pop_due_lines(60.0) == [], "there was no repeat since"
    assert repeats.should_log(create_line(entry=100), 61.0), "a new burst begins with a logged line"


def test_continuing_burst_is_logged_once_per_window() -> None:
    repeats = RepeatFilter(30.0)
    logged = [
        repeats.should_log(create_line(entry=n), n / 10) or repeats.pop_due_lines(n / 10) for n in range(901)
    ]
    first, *later = [found for found in logged if found]
    assert first is True
    assert [found is True or found[0]["repeated"] for found in later] == [300, 300, 300]


def test_different_errors_are_all_logged() -> None:
    repeats = RepeatFilter()
    assert all(
        repeats.should_log(create_line("internal-error", where=where, error="KeyError('a')"), 0.0)
        for where in "abc"
    )
    assert repeats.should_log(create_line("internal-error", where="a", error="KeyError('b')"), 0.0)
    assert repeats.should_log(create_line("dead-dropped", where="a"), 0.0)


def test_line_of_another_request_is_a_repeat() -> None:
    repeats = RepeatFilter()
    assert repeats.should_log(create_line(request="r-1", trace="aa", attempt=1, why="x"), 0.0)
    assert not repeats.should_log(create_line(request="r-2", trace="bb", attempt=2, why="x"), 0.0)


def test_number_of_remembered_lines_is_limited_and_further_lines_are_logged() -> None:
    repeats = RepeatFilter()
    assert all(repeats.should_log(create_line(why=f"{n}"), 0.0) for n in range(2 * MAX_LINE_KINDS))
    assert len(repeats._bursts) == MAX_LINE_KINDS
    assert repeats.should_log(create_line(why=f"{2 * MAX_LINE_KINDS - 1}"), 0.0)


def test_state_changes_are_never_suppressed() -> None:
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
        "cancel-markers-unreadable",
        "signals-unreadable",
        "wake-ups-unavailable",
        "traces-lost",
    } <= NEVER_SUPPRESSED
    assert (
        not {"lease-lost", "internal-error", "dead-dropped", "leases-reclaimed", "result-list-unreachable"}
        & NEVER_SUPPRESSED
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 20)), max_size=200))
def test_every_line_is_logged_or_counted(steps: list[tuple[str, int, float]]) -> None:
    repeats, now = RepeatFilter(), 0.0
    logged = counted = 0
    for why, number, pause_s in steps:
        now += pause_s
        counted += sum(due["repeated"] for due in repeats.pop_due_lines(now))
        logged += repeats.should_log(create_line(why=why, n=number), now)
    counted += sum(due["repeated"] for due in repeats.pop_due_lines(float("inf")))
    assert logged + counted == len(steps)
    next_at = repeats.next_at
    assert next_at is None or next_at > now + REPEAT_WINDOW_S or next_at == float("inf")


def test_lines_can_be_logged_from_any_thread() -> None:
    processor, errors = logs._RepeatProcessor(), []

    def log_many(name: int) -> None:
        try:
            for number in range(20_000):
                with suppress(DropEvent):
                    processor(None, "", {"event": f"{name} {number % 700}", "level": "warning"})
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=log_many, args=(name,)) for name in range(3)]
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


LOGGING_PROGRAM = """
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


def test_log_of_a_process_follows_level_changes_and_ends_with_all_counts() -> None:
    """The level may change at any time, and counted repeats are logged at the end."""
    done = subprocess.run(
        [sys.executable, "-c", LOGGING_PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
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


PROGRAM_WITH_FULL_LOG = """
from dispatcher.telemetry import logs
from dispatcher.telemetry.events import Event, add_sink, emit

logs.configure_logging("info", "json")
heard = []
with add_sink(lambda event, _: heard.append(event)):
    emit(Event.STARTED)
print(heard)
"""


def test_log_that_cannot_be_written_does_not_end_the_program() -> None:
    with Path("/dev/full").open("w") as full_device:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM_WITH_FULL_LOG],
            stdout=subprocess.PIPE,
            stderr=full_device,
            timeout=60,
        )
    assert b"Event.STARTED" in done.stdout


def test_sink_that_raises_does_not_affect_other_sinks() -> None:
    received: list[Event] = []

    def broken(event: Event, _: Mapping[str, Any]) -> None:
        raise RuntimeError(event.event_name)

    with add_sink(broken), add_sink(lambda event, _: received.append(event)):
        emit(Event.STARTED)
    assert received == [Event.STARTED]


CONSOLE_PROGRAM = r"""
from dispatcher.telemetry import logs
from dispatcher.telemetry.events import Event, emit

logs.configure_logging("info", "console")
emit(Event.SIGNALS_UNREADABLE, why="it says \x1b]0;pwned\x07\nforged", hint="\x9b31m")
try:
    raise ValueError("\x1b]0;pwned\x07")
except ValueError as error:
    emit(Event.INTERNAL_ERROR, where="here", error=repr(error))
"""


def test_console_log_escapes_control_characters() -> None:
    done = subprocess.run([sys.executable, "-c", CONSOLE_PROGRAM], capture_output=True, text=True, timeout=60)
    output = re.sub(r"\x1b\[[0-9]*m", "", done.stderr)  # without the colours of the log itself
    assert r"\x1b]0;pwned" in output
    assert all(create_line.isprintable() for create_line in output.split("\n"))
    assert "Traceback" in output
