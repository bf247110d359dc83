"""Progress display of a batch file: updated in place on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dispatcher.cli.terminal import complain, remark, warn
from dispatcher.core.printable import plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from dispatcher.client.files import FileProgress, FileStart

LINE_EVERY_S = 5.0
"""Time between two lines if the progress changes."""
STILL_EVERY_S = 60.0
"""Time between two lines if nothing changes."""
FAULTS_SHOWN = 20
"""Number of bad lines that are listed; the errors file has all of them."""


class FileScreen:
    """Display of one run of a batch file, as a context manager.

    `show_start` and `show_progress` are callbacks of `run_file`.
    """

    def __init__(self, name: str) -> None:
        self.start: FileStart | None = None
        self.last: FileProgress | None = None
        self.gate = ""
        """State of the gate of the dispatcher, with its reason. Empty if it is not known."""
        self._name = plain(name)
        self._stack = ExitStack()
        self._live: Live | None = None
        self._said_at = 0.0
        self._said = ("", "")

    def __enter__(self) -> FileScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begun(self, start: FileStart) -> None:
        """Print what the check of the input found, and start the display."""
        self.start = start
        for line in start.faulty[:FAULTS_SHOWN]:
            complain(f"{self._name}:{line.n}: {line.message}", fg=None)
        if (more := len(start.faulty) - FAULTS_SHOWN) > 0:
            complain(f"… and {more:,} more bad lines, which the errors file names", fg=None)
        if start.unknown:
            counted = [f"{field} ({lines:,})" for field, lines in start.unknown.items()]
            warn(
                f"{self._name}: fields that no line of a batch file has, and how many lines do: "
                f"{', '.join(counted)}. They are not sent."
            )
        if start.resumed and not start.finished:
            remark(f"{self._name}: goes on: {start.done:,} of {start.lines:,} were done")
        if not start.finished:
            remark(
                f"{self._name}: {start.lines:,} lines; in the queue line N has the id {start.name}-N, "
                f"and all have the label file={start.name}"
            )
        if not start.finished and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            # On standard error: standard output may be the output file. transient: nothing of it stays.
            self._live = Live(
                get_renderable=self._drawn, console=Console(stderr=True), refresh_per_second=4, transient=True
            )
            self._stack.enter_context(self._live)

    def show(self, progress: FileProgress) -> None:
        """Show the progress. Called about once per second."""
        self.last = progress
        if self._live is not None:  # it draws from `last_progress` by itself
            return
        from dispatcher.client.files import told

        what = told(progress)
        passed = time.monotonic() - self._said_at
        changed = (what, self._why) != self._said
        # Not in the first second: a small file is done before its first line.
        if passed >= (LINE_EVERY_S if changed else STILL_EVERY_S) and progress.seconds >= 1:
            self._said_at, self._said = time.monotonic(), (what, self._why)
            remark(f"{self._name}: {what}{self._why and f'; {self._why}'}")

    @property
    def _why(self) -> str:
        """Reason for the current speed: a problem of the queue, or else the state of the gate."""
        if self.last is not None and self.last.trouble:
            return f"the queue: {self.last.trouble}"
        return f"gate: {self.gate}" if self.gate else ""

    def _drawn(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        from dispatcher.client.files import facts_of

        progress = self.last
        if progress is None:
            return Text(f"{self._name}: begins")
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        share = 100 * progress.done // max(1, progress.lines)
        counts = f"{progress.done:,} of {progress.lines:,}  {share} %"
        bar.add_row(self._name, ProgressBar(total=max(1, progress.lines), completed=progress.done), counts)
        facts = Text(", ".join(facts_of(progress)), no_wrap=True, overflow="ellipsis")
        lines: list[RenderableType] = [bar, facts]
        if self._why:
            # `plain` and Text: the sentence may hold text of others, which must not be taken for markup.
            lines.append(Text(plain(self._why), style="dim", overflow="fold"))
        return Group(*lines)
