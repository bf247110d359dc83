"""A page in a terminal that is drawn anew each second, until q or Ctrl-C."""

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

from dispatcher.cli.terminal import fold, paint

LOOK_S = 0.1
"""A key, and a terminal that has another size, are noticed within that."""
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The other screen, without a cursor; and back."""
Draw = Callable[[int], Sequence[str]]
"""The rows of the page, given the terminal's width."""


def page(rows: Sequence[str], width: int, height: int) -> list[str]:
    """What of the rows fits; the last says what does not."""
    folded = fold(rows, width)
    if len(folded) <= height:
        return folded
    kept = max(0, height - 1)
    return [*folded[:kept], f"… {len(folded) - kept} more lines"[:width]][: max(1, height)]


def refresh(draw: Draw, each_s: float) -> None:
    """Draw the page each `each_s`, and at once where the terminal has changed its size."""
    with suppress(KeyboardInterrupt), _other_screen():
        while True:
            size = shutil.get_terminal_size()
            # One column less: a terminal may break a line that fills it.
            shown = page(draw(size.columns - 1), size.columns - 1, size.lines - 1)
            painted = map(paint, shown)
            # Each row is cleared as it is written, so that nothing flickers.
            sys.stdout.write("\x1b[H" + "".join(f"{row}\x1b[K\r\n" for row in painted) + "\x1b[J")
            sys.stdout.flush()
            if _asked_to_end(each_s, size):
                break


def _asked_to_end(within_s: float, size: os.terminal_size) -> bool:
    """Wait so long, or until the size changes; whether q was typed meanwhile."""
    until = time.monotonic() + within_s
    while (left := until - time.monotonic()) > 0 and shutil.get_terminal_size() == size:
        if not sys.stdin.isatty():
            time.sleep(min(LOOK_S, left))
        elif select.select([sys.stdin], [], [], min(LOOK_S, left))[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            if not typed or b"q" in typed.lower():
                return True
    return False


@contextmanager
def _other_screen() -> Iterator[None]:
    """What was on the screen before is there again afterwards, however it ends."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    if before is not None:
        tty.setcbreak(sys.stdin)
    sys.stdout.write(_BEGIN)
    try:
        yield
    finally:
        sys.stdout.write(_END)
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)
