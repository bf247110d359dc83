"""Files that are replaced while the dispatcher runs: detection of changes, and reading of bearer tokens."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from dispatcher.settings.small_files import BackgroundRead, read_regular_file, read_with_timeout

MAX_TOKEN_BYTES = 64 * 1024
"""Largest token file. Servers accept only much smaller headers."""
_VISIBLE = re.compile(rb"[!-~]+")


class TokenFileError(ValueError):
    """The file contains no usable token. The message never repeats the content of the file."""

    def __init__(self, path: str | Path, problem: str, *, is_readable: bool) -> None:
        super().__init__(f"{path} {problem}")
        self.problem = problem
        """End of a sentence that begins with the file, or with the setting that names it."""
        self.is_readable = is_readable
        """True if the file could be read, so that only its content is wrong."""


def file_fingerprint(path: str | Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file is written or replaced, or `None` if there is no file.

    The file is not read, because this is called every second.
    """
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def read_token(path: str | Path) -> str:
    """Return the token in a file, without the white space around it. It must be visible ASCII.

    Raises TokenFileError, and blocks for up to READ_TIMEOUT_S. On an event loop, use a TokenReader.
    """
    try:
        return read_with_timeout(partial(read_token_blocking, path))
    except TimeoutError as error:
        raise _unreadable_error(path, error) from error


def read_token_blocking(path: str | Path) -> str:
    """Return the token in a file. Raises TokenFileError. Blocks for as long as the file system hangs."""
    try:
        content = read_regular_file(path, MAX_TOKEN_BYTES)
    except OSError as error:
        raise _unreadable_error(path, error) from error
    if len(content) > MAX_TOKEN_BYTES:
        raise TokenFileError(
            path, f"is larger than {MAX_TOKEN_BYTES // 1024} KiB: not a token", is_readable=True
        )
    token = content.strip()
    if not _VISIBLE.fullmatch(token):
        what = "holds no bearer token (visible ASCII characters without a blank)" if token else "is empty"
        raise TokenFileError(path, what, is_readable=True)
    return token.decode("ascii")


class TokenReader:
    """Reads a token file in a thread, so that the event loop goes on if the file system hangs."""

    def __init__(self) -> None:
        self._path = ""
        self._background_read: BackgroundRead[str] | None = None

    async def read_token(self, path: str) -> str:
        """Return the token that the file holds now. Raises TokenFileError."""
        if self._background_read is None or path != self._path:
            self._path, self._background_read = path, BackgroundRead(partial(read_token_blocking, path))
        try:
            return await self._background_read()
        except TimeoutError as error:
            raise _unreadable_error(path, error) from error


def _unreadable_error(path: str | Path, error: OSError) -> TokenFileError:
    return TokenFileError(path, f"cannot be read: {error.strerror or error}", is_readable=False)
