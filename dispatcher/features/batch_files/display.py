"""Progress display of a batch file: updated in place on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dispatcher.cli.terminal import print_error, print_note, print_warning
from dispatcher.common.printable import escape_unprintable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from dispatcher.features.batch_files.progress import FileProgress
    from dispatcher.features.batch_files.run_options import FileStart

LINE_INTERVAL_S = 5.0
"""Time between two lines if the progress changes."""
UNCHANGED_LINE_INTERVAL_S = 60.0
"""Time between two lines if nothing changes."""
MAX_FAULTS_SHOWN = 20
"""Number of bad lines that are listed; the errors file has all of them."""


class FileProgressDisplay:
    """Display of one run of a batch file, as a context manager.

    `show_start` and `show_progress` are callbacks of `run_file`.
    """

    def __init__(self, name: str) -> None:
        self.start: FileStart | None = None
        self.last_progress: FileProgress | None = None
        self.gate = ""
        """State of the gate of the dispatcher, with its reason. Empty if it is not known."""
        self._name = escape_unprintable(name)
        self._stack = ExitStack()
        self._live: Live | None = None
        self._printed_at = 0.0
        self._printed = ("", "")

    def __enter__(self) -> FileProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show_start(self, start: FileStart) -> None:
        """Print what the check of the input found, and start the display."""
        self.start = start
        for line in start.faulty[:MAX_FAULTS_SHOWN]:
            print_error(f"{self._name}:{line.line_number}: {line.message}", fg=None)
        if (more := len(start.faulty) - MAX_FAULTS_SHOWN) > 0:
            print_error(f"… and {more:,} more bad lines, which the errors file names", fg=None)
        if start.unknown_fields:
            counted = [f"{field} ({lines:,})" for field, lines in start.unknown_fields.items()]
            print_warning(
                f"{self._name}: fields that no line of a batch file has, and how many lines do: "
                f"{', '.join(counted)}. They are not sent."
            )
        if start.is_resumed and not start.is_finished:
            print_note(f"{self._name}: goes on: {start.done:,} of {start.lines:,} were done")
        if not start.is_finished:
            print_note(
                f"{self._name}: {start.lines:,} lines; in the queue line N has the id {start.name}-N, "
                f"and all have the label file={start.name}"
            )
        if not start.is_finished and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            # On standard error: standard output may be the output file. transient: nothing of it stays.
            self._live = Live(
                get_renderable=self._render_progress,
                console=Console(stderr=True),
                refresh_per_second=4,
                transient=True,
            )
            self._stack.enter_context(self._live)

    def show_progress(self, progress: FileProgress) -> None:
        """Show the progress. Called about once per second."""
        self.last_progress = progress
        if self._live is not None:  # it draws from `last_progress` by itself
            return
        from dispatcher.features.batch_files.progress import progress_line

        summary = progress_line(progress)
        elapsed_s = time.monotonic() - self._printed_at
        has_changed = (summary, self._reason) != self._printed
        # Not in the first second: a small file is done before its first line.
        if (
            elapsed_s >= (LINE_INTERVAL_S if has_changed else UNCHANGED_LINE_INTERVAL_S)
            and progress.seconds >= 1
        ):
            self._printed_at, self._printed = time.monotonic(), (summary, self._reason)
            print_note(f"{self._name}: {summary}{self._reason and f'; {self._reason}'}")

    @property
    def _reason(self) -> str:
        """Reason for the current speed: a problem of the queue, or else the state of the gate."""
        if self.last_progress is not None and self.last_progress.connection_error:
            return f"the queue: {self.last_progress.connection_error}"
        return f"gate: {self.gate}" if self.gate else ""

    def _render_progress(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        from dispatcher.features.batch_files.progress import progress_facts

        progress = self.last_progress
        if progress is None:
            return Text(f"{self._name}: begins")
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        percent = 100 * progress.done // max(1, progress.lines)
        counts = f"{progress.done:,} of {progress.lines:,}  {percent} %"
        bar.add_row(self._name, ProgressBar(total=max(1, progress.lines), completed=progress.done), counts)
        facts = Text(", ".join(progress_facts(progress)), no_wrap=True, overflow="ellipsis")
        lines: list[RenderableType] = [bar, facts]
        if self._reason:
            # `plain` and Text: the sentence may hold text of others, which must not be taken for markup.
            lines.append(Text(escape_unprintable(self._reason), style="dim", overflow="fold"))
        return Group(*lines)
