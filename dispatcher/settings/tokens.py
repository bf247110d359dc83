"""Bearer tokens in files that others replace while we run: one reader for all that send or ask for one."""

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
