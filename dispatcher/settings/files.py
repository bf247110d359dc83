"""Files that others replace while we run: whether one has changed, and the one reader of bearer tokens."""

from __future__ import annotations

import re
from pathlib import Path

_VISIBLE = re.compile(rb"[!-~]+")


class TokenFileError(ValueError):
    """A file without a token that could be used. Its words never repeat what the file holds."""

    def __init__(self, path: str | Path, why: str, *, readable: bool) -> None:
        super().__init__(f"{path} {why}")
        self.why = why
        """The end of a sentence that begins with the file, or with the setting that names it."""
        self.readable = readable


def looks(path: str | Path) -> tuple[int, int, int] | None:
    """What changes with a file, whether it is written in place or replaced; None: it is not there.

    It is looked at, not read, for that is done each second.
    """
    try:
        seen = Path(path).stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_ino, seen.st_size


def read_token(path: str | Path) -> str:
    """The token: visible ASCII characters, with white space around it at the most. Raises TokenFileError."""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
        raise TokenFileError(path, why, readable=False) from error
    if not _VISIBLE.fullmatch(token):
        what = "holds no bearer token (visible ASCII characters without a blank)" if token else "is empty"
        raise TokenFileError(path, what, readable=True)
    return token.decode("ascii")
