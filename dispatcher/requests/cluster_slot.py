"""Rules for the `{tag}` in a queue's name, which keeps all keys of the queue in one slot of a Redis
Cluster."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"[^{}]*\{([^{}]+)\}[^{}]*")


def explain_brace_fault(name: str) -> str | None:
    """Return why the keys of a queue of this name would not share one slot, as the end of a sentence. `None`
    if they do.

    A name with one `{tag}` is kept, and a name without braces is wrapped in braces. With any other braces,
    Redis would hash an unintended part of the name.
    """
    if "{" not in name and "}" not in name:
        return None
    if _TAGGED.fullmatch(name) is None:
        return "must hold one {tag} that is not empty, or no braces at all"
    return None


def extract_hash_tag(name: str) -> str:
    """Return the part of a queue's name that Redis hashes."""
    match = _TAGGED.fullmatch(name)
    return match[1] if match is not None else name
