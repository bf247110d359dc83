"""Where lines are written: files that a crash may tear, and streams that cannot be taken back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO, Protocol

from dispatcher.client.errors import BatchError


class SinkError(BatchError):
    """A file cannot be written as it should; the message says why and what to do."""


class Sink(Protocol):
    """Takes lines, and has them durable on demand."""

    def add(self, text: bytes) -> None: ...

    def sync(self) -> int:
        """What was added is where it should be; how many bytes that are in all."""
        ...

    def close(self) -> None: ...


class FileSink:
    """A file of a known length: what stands behind that, a crash has left there, and it is cut off."""

    def __init__(self, path: Path, size: int, journal: Path) -> None:
        self.path = path
        try:
            self._file = path.open("r+b" if path.exists() else "x+b")
            there = self._file.seek(0, os.SEEK_END)
            if there < size:
                self._file.close()
                told = f"{path} has {there} bytes, but {size} were written: put it back as it was"
                raise SinkError(f"{told}, or remove it and {journal} to begin anew")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise SinkError(f"{path}: {error.strerror or error}") from error

    def add(self, text: bytes) -> None:
        try:
            self._file.write(text)
        except OSError as error:
            raise self._told(error) from error

    def sync(self) -> int:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._told(error) from error
        return self._file.tell()

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, at)

    def close(self) -> None:
        self._file.close()

    def _told(self, error: OSError) -> SinkError:
        return SinkError(f"{self.path} cannot be written: {error.strerror or error}; nothing of it is lost")


class StreamSink:
    """A stream, such as standard output: what it has taken is gone."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = 0

    def add(self, text: bytes) -> None:
        self._stream.write(text)
        self._size += len(text)

    def sync(self) -> int:
        try:
            self._stream.flush()
        except BrokenPipeError as error:
            raise SinkError("whoever read the output has gone") from error
        return self._size

    def close(self) -> None:
        if self._stream not in (sys.stdout.buffer, sys.stderr.buffer):
            self._stream.flush()
