"""Full-screen page on a terminal that is redrawn periodically, until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dispatcher.cli.terminal import colour_bar, wrap_lines

POLL_S = 0.1
"""Time within which a key or a new size of the terminal is noticed."""
_ENTER_SCREEN, _LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Escape sequences that enter the alternate screen and hide the cursor, and that leave it again."""
Draw = Callable[[int], Sequence[str]]
"""Function that returns the rows of the page for the width of the terminal."""


def fit_page(rows: Sequence[str], width: int, height: int) -> list[str]:
    """Wrap the rows and return those that fit. If some do not fit, the last row says how many."""
    folded = wrap_lines(rows, width)
    if len(folded) <= height:
        return folded
    kept = max(0, height - 1)
    return [*folded[:kept], f"… {len(folded) - kept} more lines"[:width]][: max(1, height)]


def show_live_page(draw: Draw, interval_s: float) -> None:
    """Show a page, and redraw it every `interval_s` and whenever the size of the terminal changes."""
    with suppress(KeyboardInterrupt), _alternate_screen():
        while True:
            size = shutil.get_terminal_size()
            # One column less, because a terminal may wrap a line that fills the whole width.
            page_rows = fit_page(draw(size.columns - 1), size.columns - 1, size.lines - 1)
            painted = map(colour_bar, page_rows)
            # Clear the rest of each row as it is written. Clearing the whole screen first would flicker.
            sys.stdout.write("\x1b[H" + "".join(f"{row}\x1b[K\r\n" for row in painted) + "\x1b[J")
            sys.stdout.flush()
            if _wait_for_quit(interval_s, size):
                break


def _wait_for_quit(timeout_s: float, size: os.terminal_size) -> bool:
    """Wait for the timeout or a new size of the terminal. Return true if q was typed."""
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0 and shutil.get_terminal_size() == size:
        if not sys.stdin.isatty():  # standard input may be a file while the output is a terminal
            time.sleep(min(POLL_S, left))
        elif select.select([sys.stdin], [], [], min(POLL_S, left))[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or b"q" in typed.lower():  # empty: the terminal was closed
                return True
    return False


@contextmanager
def _alternate_screen() -> Iterator[None]:
    """Switch to the alternate screen, and always restore screen and terminal modes afterwards."""
    terminal_attributes = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    # SIGTERM raises KeyboardInterrupt, so that the terminal is restored.
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    if terminal_attributes is not None:
        tty.setcbreak(sys.stdin)  # single keys without Enter and without echo
    sys.stdout.write(_ENTER_SCREEN)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE_SCREEN)
        sys.stdout.flush()
        if terminal_attributes is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, terminal_attributes)
        signal.signal(signal.SIGTERM, handler)
