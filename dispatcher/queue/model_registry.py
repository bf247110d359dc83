"""Rules of the model registry that all implementations of the queue share."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from dispatcher.core.printable import plain, shortened
from dispatcher.core.requests.lanes import MODEL_BYTES
from dispatcher.ports import CallRefusedError
from dispatcher.queue.constants import DECIDED_MOST

_WHO_CHARS, _WHY_CHARS = 100, 300
_FAR = 253_402_300_799.0
"""Latest time that a date can show."""


def fits(*names: str) -> bool:
    """Return whether each name is valid for a model or an endpoint. Nothing is recorded for other names."""
    return all(name and name.isprintable() and len(name.encode()) <= MODEL_BYTES for name in names)


def fitting(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs of model and endpoint that are valid, each once."""
    return [pair for pair in dict.fromkeys(pairs) if fits(*pair)]


def check_names(**names: str) -> None:
    """Raise CallRefusedError for the first name that is invalid."""
    for what, name in names.items():
        if not fits(name):
            told = repr(shortened(name, 40))
            raise CallRefusedError(f"{what} {told} must be 1 to {MODEL_BYTES} bytes of printable text")


def too_many(what: str) -> CallRefusedError:
    """Return the error for one label or drain too many."""
    return CallRefusedError(f"there are {DECIDED_MOST} {what} already: take some back first")


def told_who(who: str) -> str:
    return shortened(plain(who), _WHO_CHARS)


def told_why(why: str) -> str:
    return shortened(plain(why), _WHY_CHARS)


def decided_by(who: str, why: str, at: float) -> str:
    """Describe who decided something about a version, when (Unix seconds) and why, as the end of a
    sentence."""
    since = f" since {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if 0 <= at <= _FAR else ""
    return f"by {told_who(who) or 'somebody'}{since}{f': {told_why(why)}' if why else ''}"
