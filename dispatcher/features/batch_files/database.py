"""SQLite file of a journal: opening it with a lock, and removing it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from dispatcher.common.errors import BatchError

_CACHE_KIB = 16_384
_OPEN_ATTEMPTS = 5
"""Number of attempts to open a file that other processes keep replacing."""


class JournalError(BatchError):
    """The journal cannot be used. The message says why, and what to do."""


def open_locked(path: Path) -> sqlite3.Connection:
    """Return a connection with a transaction begun, which locks the file against other processes.

    Raises JournalError.
    """
    for _ in range(_OPEN_ATTEMPTS):
        pinned = _pin_inode(path)
        try:
            database = _connect_locked(path)
            if _is_same_file(path, pinned):
                return database
            # The owner removed the file between our open and our lock. We would lock a file without a name.
            database.close()
        except JournalError:  # SQLite may also fail because the file was removed: then try again
            if _is_same_file(path, pinned):
                raise
        finally:
            os.close(pinned)
    raise JournalError(f"{path} is in use: other processes open and remove it")


def remove_locked(path: Path) -> None:
    """Remove the file of an open connection. The caller closes the connection afterwards.

    Once the connection is closed, another process may have opened the file.
    """
    # The log is removed first. Once the database is gone, a new one may have a log of the same name.
    path.with_name(path.name + "-wal").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def journal_error(path: Path, error: sqlite3.Error) -> JournalError:
    """Return an error that says what went wrong in SQLite and what to do."""
    name: str = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return JournalError(f"{path} is in use: another process works on this output")
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
        return _not_opened(path)
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
        return JournalError(f"{path} cannot be read or written: {error}")
    return JournalError(f"{path} is no journal of a batch file, or damaged ({error})")


def _not_opened(path: Path) -> JournalError:
    why = "the directory of the output must be there, and this user must be allowed to write in it"
    return JournalError(f"{path} cannot be opened: {why}")


def _connect_locked(path: Path) -> sqlite3.Connection:
    try:
        # No timeout: a locked journal means that another process works on this output. Transactions are begun
        # explicitly (`isolation_level`), and another thread may interrupt a statement.
        database = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise journal_error(path, error) from error
    try:
        # Keep the lock until the connection is closed, not only during a transaction.
        database.execute("pragma locking_mode = exclusive")
        database.execute("pragma journal_mode = wal")
        # A commit must survive a power failure: results are deleted in Redis after it.
        database.execute("pragma synchronous = full")
        database.execute(f"pragma cache_size = -{_CACHE_KIB}")
        database.execute("begin immediate")
    except sqlite3.Error as error:
        database.close()
        raise journal_error(path, error) from error
    return database


def _pin_inode(path: Path) -> int:
    """Return a descriptor that keeps the number of the file's inode from being given to another file.

    It must be O_PATH: closing any other descriptor of the file would release SQLite's locks on it.
    """
    try:
        with suppress(FileExistsError):
            os.mknod(path, 0o644)
        return os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise _not_opened(path) from error


def _is_same_file(path: Path, pinned: int) -> bool:
    """Return whether the path still names the pinned file. If not, another process may lock the new file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(pinned), path.stat())
    return False
