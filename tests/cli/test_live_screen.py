"""The live views: rows that fit whatever the terminal is, and a terminal that is left as it was found."""

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
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.cli import demo_run
from dispatcher.cli.admin_client import StatusProblemKind
from dispatcher.cli.live_screen import fit_page
from dispatcher.cli.terminal import wrap_lines
from dispatcher.cli.top import format_page
from dispatcher.core.limit.budget import Reason
from tests.support import free_port
from tests.warm import warm_run


@given(st.lists(st.text(max_size=300), max_size=12), st.integers(20, 200), st.integers(2, 40))
def test_a_page_fits_any_terminal_and_nothing_steers_it(told: list[str], width: int, height: int) -> None:
    shown = fit_page(told, width, height)
    assert len(shown) <= height
    assert all(len(row) <= width and row.isprintable() for row in shown)


def test_rows_break_between_words_and_what_does_not_fit_is_told() -> None:
    assert wrap_lines(["one two three"], 9) == ["one two", "  three"]
    assert wrap_lines(["a  b r-0123456789 c"], 9) == ["a  b r-01", "  2345678", "  9 c"]
    assert wrap_lines(["a  b r-0123456789 c"], 9, break_words=False) == ["a  b", "  r-0123456789", "  c"]
    assert wrap_lines(["  name  one two three"], 18) == ["  name  one two", "        three"]
    assert fit_page(["a", "b", "c"], 20, 2) == ["a", "… 2 more lines"]


def shown(**gate: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "pool": "qwen",
        "queue": "q",
        "reason": "full",
        "explanation": "It is full.",
        "owner": "one",
    }
    told |= {"max_sys": 64.0, "reserve": 0.125, "in_flight": 16, "limit": 16, "pending": 120}
    told |= {"realtime": 24.0, "realtime_waiting": 0.0}
    told |= {"service_rate": 2.0, "max_sys_source": None, "earliest_deadline_s": None}
    counts = {"pending": 120, "leased": 16, "delayed": 0, "dead": 0}
    asked = {"queue": "q", **counts, "paused": None, "queue_problem": None}
    answered = {"dispatcher_problem": None, "dispatcher_problem_kind": None}
    return {**asked, "dispatcher": told | gate, **answered}


def test_top_shows_who_has_the_pool_how_fast_it_goes_and_when_it_is_done() -> None:
    seen = format_page(shown(), 65, "12:00:00")
    assert seen[0].startswith("pool qwen  12:00:00 ")
    assert seen[0].endswith(" q ends")
    assert "full: It is full." in seen
    drawn = next(row for row in seen if row.startswith("█"))
    assert (len(drawn), drawn.count("█"), drawn.count("▒")) == (65, 24, 17)
    assert "█ realtime 24  ▓ waiting 0  ▒ batch 16  · free 16  ░ reserve 8" in seen
    assert "capacity 64; batch limit 16" in seen
    assert "q: pending 120  leased 16  delayed 0  dead 0" in seen
    assert "Rate: 2 requests per second; what waits takes 60 s at that." in seen


def test_top_shows_what_is_known_where_something_does_not_answer() -> None:
    for missing in ("max_sys", "realtime"):
        unread = format_page(shown(**{missing: None}), 65, "12:00:00")
        assert "The pool's capacity is not known." in unread
    alone = {**shown(), "dispatcher": None, "dispatcher_problem": "the reason"}
    for kind in StatusProblemKind:
        page = format_page(alone | {"dispatcher_problem_kind": kind}, 65, "x")
        hint = ": start one with `batch-dispatcher run`" if kind is StatusProblemKind.NOT_LISTENING else ""
        assert f"No dispatcher answers (the reason){hint}." in page
    away = {**shown(), "queue_problem": "Redis cannot be reached: h: refused", "pending": None}
    assert "Redis cannot be reached: h: refused" in format_page(away, 65, "12:00:00")


@pytest.mark.parametrize("reason", [str(reason) for reason in Reason])
def test_the_demos_frames_fit_80_columns(reason: str) -> None:
    seen = {"pool": {"realtime": {"now": 29}, "batch": {"now": 31}}}
    for label in ("alone", "1234 served"):
        drawn = demo_run.format_line(label, seen, {"limit": 60, "reason": reason}, 79)
        assert len(drawn) <= 79
        assert "realtime 29  batch 31  limit 60" in drawn
        assert set("█▒") <= set(drawn)


class Terminal:
    """A verb in a terminal of its own."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid = pid
        self._end = end
        self.told = ""

    def until(self, mark: str) -> None:
        end = time.monotonic() + 60
        while mark not in self.told:
            assert time.monotonic() < end, self.told
            if select.select([self._end], [], [], 0.2)[0]:
                self.told += os.read(self._end, 65536).decode(errors="replace")

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def echoes(self) -> bool:
        modes: list[Any] = termios.tcgetattr(self._end)
        return bool(modes[3] & termios.ECHO)

    def wait_for_exit(self) -> int:
        while select.select([self._end], [], [], 30)[0]:
            try:
                if not (read := os.read(self._end, 65536)):
                    break
            except OSError:  # nobody has it open any more
                break
            self.told += read.decode(errors="replace")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def in_terminal(*arguments: str | Path) -> Iterator[Terminal]:
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
def test_a_live_view_follows_the_terminals_size_and_leaves_it_as_it_was(
    verb: list[str], ending: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    queue, admin = free_port(), free_port()
    config.write_text(
        f"gateway: {{url: http://gw}}\nqueue: {{url: 'redis://127.0.0.1:{queue}'}}\n"
        f"admin: {{port: {admin}}}\n"
    )
    with in_terminal(*verb, "--config", config) as terminal:
        terminal.resize(80, 24)
        terminal.until("No dispatcher answers")
        terminal.until("connection refused")
        assert not terminal.echoes()
        terminal.told = ""
        terminal.resize(44, 10)
        # Narrower than the row: it is broken between words.
        terminal.until("\x1b[H")
        terminal.until("`batch-dispatcher run`")
        rows_of = [re.sub(r"\x1b\[\??\w+", "", row) for row in terminal.told.split("\r\n")]
        assert any(row.startswith("  ") for row in rows_of)
        if ending == "SIGTERM":
            os.kill(terminal.pid, signal.SIGTERM)
        else:
            terminal.type(ending)
        assert terminal.wait_for_exit() == 0
    assert terminal.told.endswith("\x1b[?25h\x1b[?1049l"), "the screen of before, with its cursor"


def test_in_a_pipe_it_is_a_line_a_second(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"gateway: {{url: http://gw}}\nadmin: {{port: {free_port()}}}\n")
    told = warm_run("status", "--config", config)
    assert told.returncode == 1
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
