"""Live views fit the terminal and restore it when they end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.cli import demo_run
from dispatcher.cli.admin_client import StatusProblem, StatusProblemKind
from dispatcher.cli.live_screen import fit_page
from dispatcher.cli.overview import Overview
from dispatcher.cli.render import format_page
from dispatcher.cli.terminal import wrap_lines
from dispatcher.limit.budget import Reason
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.telemetry.status import (
    BudgetStatus,
    GateStatus,
    ProcessStatus,
    QueueStatus,
    SignalsStatus,
    Status,
)
from tests.fork_server import run_cli
from tests.support import free_port


@given(st.lists(st.text(max_size=300), max_size=12), st.integers(20, 200), st.integers(2, 40))
def test_page_fits_any_terminal_and_contains_no_control_characters(
    rows: list[str], width: int, height: int
) -> None:
    shown = fit_page(rows, width, height)
    assert len(shown) <= height
    assert all(len(row) <= width and row.isprintable() for row in shown)


def test_rows_break_between_words_and_omitted_rows_are_counted() -> None:
    assert wrap_lines(["one two three"], 9) == ["one two", "  three"]
    assert wrap_lines(["a  b r-0123456789 c"], 9) == ["a  b r-01", "  2345678", "  9 c"]
    assert wrap_lines(["a  b r-0123456789 c"], 9, break_words=False) == ["a  b", "  r-0123456789", "  c"]
    assert wrap_lines(["  name  one two three"], 18) == ["  name  one two", "        three"]
    assert fit_page(["a", "b", "c"], 20, 2) == ["a", "… 2 more lines"]


def overview_of(*, max_sys: float | None = 64.0, realtime: float | None = 24.0) -> Overview:
    status = Status(
        ProcessStatus(pool="qwen", queue="q", owner="one"),
        GateStatus("full", open=True, explanation="It is full.", limit=16, in_flight=16),
        BudgetStatus(reserve=0.125, max_sys=max_sys),
        SignalsStatus(realtime=realtime, realtime_waiting=0.0),
        queue=QueueStatus(pending=120, service_rate=2.0),
    )
    return Overview("q", QueueCounts(pending=120, leased=16, delayed=0, dead=0), dispatcher=status)


def test_top_shows_usage_of_the_pool_rate_and_remaining_time() -> None:
    page = format_page(overview_of(), 65, "12:00:00")
    assert page[0].startswith("pool qwen  12:00:00 ")
    assert page[0].endswith(" q ends")
    assert "full: It is full." in page
    drawn = next(row for row in page if row.startswith("█"))
    assert (len(drawn), drawn.count("█"), drawn.count("▒")) == (65, 24, 17)
    assert "█ realtime 24  ▓ waiting 0  ▒ batch 16  · free 16  ░ reserve 8" in page
    assert "capacity 64; batch limit 16" in page
    assert "q: pending 120  leased 16  delayed 0  dead 0" in page
    assert "Rate: 2 requests per second; what waits takes 60 s at that." in page


def test_top_shows_known_facts_if_a_part_does_not_answer() -> None:
    for unknown in (overview_of(max_sys=None), overview_of(realtime=None)):
        assert "The pool's capacity is not known." in format_page(unknown, 65, "12:00:00")
    for kind in StatusProblemKind:
        alone = replace(overview_of(), dispatcher=None, dispatcher_problem=StatusProblem(kind, "the reason"))
        hint = "; start one with `batch-dispatcher run`" if kind is StatusProblemKind.NOT_LISTENING else ""
        assert f"No dispatcher answers: the reason{hint}." in format_page(alone, 65, "x")
    away = replace(overview_of(), queue_problem="Redis cannot be reached: h: refused", counts=None)
    assert "Redis cannot be reached: h: refused" in format_page(away, 65, "12:00:00")


@pytest.mark.parametrize("reason", [str(reason) for reason in Reason])
def test_lines_of_the_demo_fit_80_columns(reason: str) -> None:
    page = {"pool": {"realtime": {"now": 29}, "batch": {"now": 31}}}
    for label in ("alone", "1234 served"):
        drawn = demo_run.format_line(label, page, Status(gate=GateStatus(reason, limit=60)), 79)
        assert len(drawn) <= 79
        assert "realtime 29  batch 31  limit 60" in drawn
        assert set("█▒") <= set(drawn)


class Terminal:
    """A verb that runs in a terminal of its own."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid = pid
        self._end = end
        self.text = ""

    def wait_for(self, mark: str) -> None:
        end = time.monotonic() + 60
        while mark not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self._end], [], [], 0.2)[0]:
                self.text += os.read(self._end, 65536).decode(errors="replace")

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def send_keys(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def is_echo_on(self) -> bool:
        modes: list[Any] = termios.tcgetattr(self._end)
        return bool(modes[3] & termios.ECHO)

    def wait_for_exit(self) -> int:
        while select.select([self._end], [], [], 30)[0]:
            try:
                if not (read := os.read(self._end, 65536)):
                    break
            except OSError:  # no process has the terminal open any more
                break
            self.text += read.decode(errors="replace")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def run_in_terminal(*arguments: str | Path) -> Iterator[Terminal]:
    pid, end = pty.fork()
    if pid == 0:
        environ = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
        for name in ("COLUMNS", "LINES"):
            environ.pop(name, None)
        command = [sys.executable, "-m", "dispatcher", *map(str, arguments)]
        os.execve(sys.executable, command, environ)
    terminal = Terminal(pid, end)
    try:
        yield terminal
    finally:
        os.close(end)


@pytest.mark.parametrize(
    ("verb", "ending"), [(["top"], "q"), (["top"], "\x03"), (["status", "--watch"], "SIGTERM")]
)
def test_live_view_follows_the_terminal_size_and_restores_the_terminal(
    verb: list[str], ending: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    queue, admin = free_port(), free_port()
    config.write_text(
        f"gateway: {{url: http://gw}}\nqueue: {{url: 'redis://127.0.0.1:{queue}'}}\n"
        f"admin: {{port: {admin}}}\n"
    )
    with run_in_terminal(*verb, "--config", config) as terminal:
        terminal.resize(80, 24)
        terminal.wait_for("No dispatcher answers")
        terminal.wait_for("connection refused")
        assert not terminal.is_echo_on()
        terminal.text = ""
        terminal.resize(44, 10)
        # The terminal is narrower than the row, which is broken between words.
        terminal.wait_for("\x1b[H")
        terminal.wait_for("`batch-dispatcher run`")
        rows_of = [re.sub(r"\x1b\[\??\w+", "", row) for row in terminal.text.split("\r\n")]
        assert any(row.startswith("  ") for row in rows_of)
        if ending == "SIGTERM":
            os.kill(terminal.pid, signal.SIGTERM)
        else:
            terminal.send_keys(ending)
        assert terminal.wait_for_exit() == 0
    assert terminal.text.endswith("\x1b[?25h\x1b[?1049l"), "the previous screen and the cursor are restored"


def test_live_view_in_a_pipe_prints_one_line_per_second(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"gateway: {{url: http://gw}}\nadmin: {{port: {free_port()}}}\n")
    rows = run_cli("status", "--config", config)
    assert rows.returncode == 1
    for arguments in (("status", "--watch"), ("top",), ("top", "--json")):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(writing, 1)
            os.execv(sys.executable, [sys.executable, "-m", "dispatcher", *arguments, "-c", str(config)])
        os.close(writing)
        with os.fdopen(reading) as lines:
            first = [lines.readline(), lines.readline()]
            os.kill(pid, signal.SIGINT)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        if "--json" in arguments:
            assert [json.loads(line)["pending"] for line in first] == [None, None]
        else:
            assert all(re.match(r"\d\d:\d\d:\d\d  no dispatcher is running on", line) for line in first), (
                first
            )
