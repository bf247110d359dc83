"""Keeps one server process for as long as its parent lives; run as a script, never imported.

    python -I -S supervise.py SERVER ARGUMENT…

The parent holds the other end of standard input. Its end, by whatever cause, is the end of that pipe: the
server is then told to stop (SIGTERM: it writes and syncs its file), and killed where it does not. A line on
the pipe says that the server once answered: from then on one that dies is started again.

A process of its own, because no thread of the parent outlives a SIGKILL, and the kernel's own signal for
this (PR_SET_PDEATHSIG) is bound to the thread that forked. Here there is one thread only, so the server gets
that signal as well, should this process be killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

STOP_S = 10.0
RESTART_S = (0.1, 5.0)
"""First and longest pause before a server that died is started again."""
STEADY_S = 30.0
"""One that ran this long begins with the first pause again."""
_PARENT_POLL_S = 1.0


class _Stop(Exception):  # noqa: N818 - a request, not an error
    """The parent is gone, or somebody wants this to end."""


def main(command: list[str]) -> int:
    """Run the server until told to stop; its exit code where it never answered."""
    parent = os.getppid()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
    signal.signal(signal.SIGTERM, _on_sigterm)

    def parent_speaks(timeout_s: float) -> bool:
        """Wait for a word of the parent, a signal, or the time-out. Its end of the pipe closed: _Stop."""
        readable, _, _ = select.select([0, woken], [], [], timeout_s)
        if woken in readable:
            os.read(woken, 64)
        if 0 in readable and not os.read(0, 64):
            raise _Stop
        if os.getppid() != parent:  # the pipe may live on in a child of the parent's
            raise _Stop
        return 0 in readable

    answered = False
    pause_s = 0.0
    while True:
        started_at = time.monotonic()
        server = _start(command)
        try:
            while server.poll() is None:
                answered |= parent_speaks(_PARENT_POLL_S)
            if not answered:
                return server.returncode
            steady = time.monotonic() - started_at > STEADY_S
            pause_s = RESTART_S[0] if steady else min(max(RESTART_S[0], 2 * pause_s), RESTART_S[1])
            parent_speaks(pause_s)
        except _Stop:
            _end(server)
            return 0


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # close_fds: the lock on the data directory is the server's too, so that no second one can start on the
    # same file while this one still writes it.
    return subprocess.Popen(  # noqa: S603 - the command is our parent's own
        command, stdin=subprocess.DEVNULL, close_fds=False, umask=0o077, preexec_fn=_die_with_parent
    )


def _die_with_parent() -> None:
    """In the server before it is one: SIGKILL when this process dies (Linux; elsewhere there is no such)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _on_sigterm(_signum: int, _frame: FrameType | None) -> None:
    raise _Stop


def _end(server: subprocess.Popen[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
