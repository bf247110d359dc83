"""What both forms of the queue agree about where versions of models are marked, labelled and drained."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from dispatcher.core.printable import plain, shortened
from dispatcher.core.requests.lanes import MODEL_BYTES
from dispatcher.ports import CallRefusedError
from dispatcher.queue.constants import DECIDED_MOST

_WHO_CHARS, _WHY_CHARS = 100, 300
_FAR = 253_402_300_799.0
"""The last second that a date can tell."""


def fits(*names: str) -> bool:
    """Whether each can be the name of a model or an endpoint. Of others nothing is marked."""
    return all(name and name.isprintable() and len(name.encode()) <= MODEL_BYTES for name in names)


def fitting(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Model and endpoint, each once."""
    return [pair for pair in dict.fromkeys(pairs) if fits(*pair)]


def check_names(**names: str) -> None:
    """Raise CallRefusedError for the first that is none."""
    for what, name in names.items():
        if not fits(name):
            told = repr(shortened(name, 40))
            raise CallRefusedError(f"{what} {told} must be 1 to {MODEL_BYTES} bytes of printable text")


def too_many(what: str) -> CallRefusedError:
    """The refusal of one more."""
    return CallRefusedError(f"there are {DECIDED_MOST} {what} already: take some back first")


def told_who(who: str) -> str:
    return shortened(plain(who), _WHO_CHARS)


def told_why(why: str) -> str:
    return shortened(plain(why), _WHY_CHARS)


def decided_by(who: str, why: str, at: float) -> str:
    """Who said it of a version, when (Unix seconds) and why, as a sentence goes on."""
    since = f" since {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if 0 <= at <= _FAR else ""
    return f"by {told_who(who) or 'somebody'}{since}{f': {told_why(why)}' if why else ''}"
