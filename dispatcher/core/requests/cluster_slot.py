"""What keeps all keys of a queue in one slot of a Redis Cluster: one `{tag}` in its name, or none. Pure."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"[^{}]*\{([^{}]+)\}[^{}]*")


def fault_of_braces(name: str) -> str | None:
    """Why a queue's name could not keep all its keys in one slot, as the end of a sentence; None when it can.

    One `{tag}` is kept; a name without braces is wrapped whole. Anything else would be hashed in a way that
    nobody meant.
    """
    if "{" not in name and "}" not in name:
        return None
    if _TAGGED.fullmatch(name) is None:
        return "must hold one {tag} that is not empty, or no braces at all"
    return None


def tag_of(name: str) -> str:
    """What of a queue's name is hashed."""
    found = _TAGGED.fullmatch(name)
    return found[1] if found is not None else name
