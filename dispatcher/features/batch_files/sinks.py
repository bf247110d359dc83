"""Sinks for written lines: files, which are cut to a known length after a crash, and streams."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from dispatcher.common.errors import BatchError


class SinkError(BatchError):
    """An output file cannot be written. The message says why, and what to do."""


class Sink(Protocol):
    """Target of written lines, which makes them durable on request."""

    def add_line(self, text: bytes) -> None: ...

    def sync(self) -> int:
        """Make all added lines durable, and return the total number of bytes."""
        ...

    def close(self) -> None: ...


class FileSink:
    """File of a known length. Bytes after that length are left over from a crash, and are cut off."""

    def __init__(self, path: Path, size: int, journal: Path) -> None:
        self.path = path
        try:
            self._file = path.open("r+b" if path.exists() else "x+b")
        except OSError as error:
            raise SinkError(f"{path}: {error.strerror or error}") from error
        try:
            self._lock_and_truncate(size, journal)
        except OSError as error:
            self._file.close()
            raise SinkError(f"{path}: {error.strerror or error}") from error
        except SinkError:
            self._file.close()
            raise

    def _lock_and_truncate(self, size: int, journal: Path) -> None:
        try:  # two runs may name the same errors file; the lock ends with the process
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SinkError(f"{self.path} is in use: another process writes to it") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise  # with these errors the file system has no locks, and the journal's lock must suffice
        actual_size = self._file.seek(0, os.SEEK_END)
        _check_size(self.path, actual_size, size, journal)
        self._file.truncate(size)
        self._file.seek(size)

    def add_line(self, text: bytes) -> None:
        try:
            self._file.write(text)
        except OSError as error:
            raise self._write_error(error) from error

    def sync(self) -> int:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._write_error(error) from error
        return self._file.tell()

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset)

    def close(self) -> None:
        with suppress(OSError):  # lines that cannot be flushed are not recorded as done in the journal
            self._file.close()

    def _write_error(self, error: OSError) -> SinkError:
        return SinkError(f"{self.path} cannot be written: {error.strerror or error}; nothing of it is lost")


def check_written_file(path: Path, size: int, journal: Path) -> None:
    """Raise SinkError if a file is missing, or shorter than what was written to it."""
    try:
        actual_size = path.stat().st_size
    except FileNotFoundError:
        actual_size = 0
    except OSError as error:
        raise SinkError(f"{path}: {error.strerror or error}") from error
    _check_size(path, actual_size, size, journal)


def _check_size(path: Path, actual_size: int, size: int, journal: Path) -> None:
    if actual_size < size:
        message = f"{path} has {actual_size} bytes, but {size} were written: put it back as it was"
        raise SinkError(f"{message}, or remove it and {journal} to begin anew")


class StreamSink:
    """Stream, such as standard output. Lines that were written to it cannot be taken back."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = 0

    def add_line(self, text: bytes) -> None:
        try:
            self._stream.write(text)
        except OSError as error:
            raise _stream_error(error) from error
        self._size += len(text)

    def sync(self) -> int:
        try:
            self._stream.flush()
        except OSError as error:
            raise _stream_error(error) from error
        return self._size

    def close(self) -> None:
        if self._stream not in (sys.stdout.buffer, sys.stderr.buffer):
            with suppress(OSError, ValueError):  # the caller closed it
                self._stream.flush()


def _stream_error(error: OSError) -> SinkError:
    if isinstance(error, BrokenPipeError):
        return SinkError("the program that read the output has gone")
    return SinkError(f"the output cannot be written: {error.strerror or error}")
