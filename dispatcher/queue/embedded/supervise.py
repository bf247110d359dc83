"""Supervisor that keeps one server process for as long as its parent lives. A script that is never imported.

    python -I -S supervise.py SERVER ARGUMENT…

The parent holds the other end of standard input. When the parent ends, whatever the cause, that pipe is
closed: the server is then stopped (by SIGTERM, so that it writes and syncs its file), and killed if it does
not end. A line on the pipe says that the server has answered once. From then on, a server that dies is
started again.

This is a process of its own, because no thread of the parent outlives a SIGKILL, and the kernel's signal for
this purpose (PR_SET_PDEATHSIG) is bound to the thread that forked. This process has one thread only, so the
server also gets that signal if this process is killed.
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
RESTART_PAUSES_S = (0.1, 5.0)
"""First and longest pause before a server that died is started again."""
STABLE_AFTER_S = 30.0
"""Seconds of running after which the next restart has the first pause again."""
_PARENT_POLL_S = 1.0


class _StopRequested(Exception):  # noqa: N818 - a request, not an error
    """The parent has ended, or this process was stopped."""


def main(command: list[str]) -> int:
    """Run the server until the parent stops it. Return the exit code of a server that never answered."""
    parent = os.getppid()
    # Signals write to this pipe, so that `select` returns at once when the server dies. SIGCHLD needs a
    # handler of its own, because Python writes nothing for signals without one.
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
    signal.signal(signal.SIGTERM, _on_sigterm)

    def wait_for_parent(timeout_s: float) -> bool:
        """Wait for a line of the parent, a signal, or the timeout. Raises _StopRequested if the parent closed
        its end of the pipe."""
        readable, _, _ = select.select([0, woken], [], [], timeout_s)
        if woken in readable:
            os.read(woken, 64)
        if 0 in readable and not os.read(0, 64):
            raise _StopRequested
        if os.getppid() != parent:  # another child of the parent may keep the pipe open
            raise _StopRequested
        return 0 in readable

    answered = False
    pause_s = 0.0
    while True:
        started_at = time.monotonic()
        server = _start_server(command)
        try:
            while server.poll() is None:
                answered |= wait_for_parent(_PARENT_POLL_S)
            if not answered:
                return server.returncode
            is_stable = time.monotonic() - started_at > STABLE_AFTER_S
            pause_s = (
                RESTART_PAUSES_S[0]
                if is_stable
                else min(max(RESTART_PAUSES_S[0], 2 * pause_s), RESTART_PAUSES_S[1])
            )
            wait_for_parent(pause_s)
        except _StopRequested:
            _stop_server(server)
            return 0


def _start_server(command: list[str]) -> subprocess.Popen[bytes]:
    # close_fds=False: the server inherits the lock on the data directory, so that no second server can start
    # on the same file while this one still writes it.
    return subprocess.Popen(  # noqa: S603 - the command is our parent's own
        command, stdin=subprocess.DEVNULL, close_fds=False, umask=0o077, preexec_fn=_die_with_parent
    )


def _die_with_parent() -> None:
    """Let the kernel send SIGKILL to the server when this process dies (on Linux only). Runs in the child
    before exec."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG


def _on_sigterm(_signum: int, _frame: FrameType | None) -> None:
    raise _StopRequested


def _stop_server(server: subprocess.Popen[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the end of the server
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
