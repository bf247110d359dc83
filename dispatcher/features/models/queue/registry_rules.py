"""Rules of the model registry: its limits, and which names are valid."""

from __future__ import annotations

from datetime import UTC, datetime

from dispatcher.common.printable import escape_unprintable, truncate_text
from dispatcher.queue.lua_files import LUA_FEATURES
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.requests.submission import CallRefusedError

_CONSTANTS = LUA_FEATURES["models"].constants
WARM_MARKER_S = _CONSTANTS["WARM_MARKER_S"]
WARM_UP_LOCK_S = _CONSTANTS["WARM_UP_LOCK_S"]
MODEL_IN_USE_S = _CONSTANTS["MODEL_IN_USE_S"]
"""Seconds for which an entry holds: a warm marker, a warm-up lock, and a model in use."""
MAX_MARKERS = _CONSTANTS["MAX_MARKERS"]
"""Largest number of markers of one kind that are read at once."""
MAX_PINS, MAX_PIN_S = 100_000, _CONSTANTS["MAX_PIN_S"]
"""Largest number of pins that are remembered, and the longest time in seconds for which one is kept."""
MAX_LABELS_OR_DRAINS = _CONSTANTS["MAX_LABELS_OR_DRAINS"]
"""Largest number of labels, and of drains, that operators may set."""
_MAX_WHO_CHARS, _MAX_WHY_CHARS = 100, 300
_LATEST_DATE_S = 253_402_300_799.0
"""Latest time that a date can show."""


def are_valid_names(*names: str) -> bool:
    """Return whether each name is valid for a model or an endpoint. Nothing is recorded for other names."""
    return all(name and name.isprintable() and len(name.encode()) <= MAX_MODEL_NAME_BYTES for name in names)


def check_names(**names: str) -> None:
    """Raise CallRefusedError for the first name that is invalid."""
    for what, name in names.items():
        if not are_valid_names(name):
            shown_name = repr(truncate_text(name, 40))
            raise CallRefusedError(
                f"{what} {shown_name} must be 1 to {MAX_MODEL_NAME_BYTES} bytes of printable text"
            )


def make_limit_error(what: str) -> CallRefusedError:
    return CallRefusedError(f"there are {MAX_LABELS_OR_DRAINS} {what} already: remove some first")


def clean_who(who: str) -> str:
    return truncate_text(escape_unprintable(who), _MAX_WHO_CHARS)


def clean_why(why: str) -> str:
    return truncate_text(escape_unprintable(why), _MAX_WHY_CHARS)


def describe_decision(who: str, why: str, at: float) -> str:
    """Describe who decided something about a version, when (Unix seconds) and why, as the end of a
    sentence."""
    since = (
        f" since {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if 0 <= at <= _LATEST_DATE_S else ""
    )
    return f"by {clean_who(who) or 'an unknown user'}{since}{f': {clean_why(why)}' if why else ''}"
