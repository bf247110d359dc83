"""The verbs of models, declared for the list of all verbs (`dispatcher.cli.VERBS`)."""

from __future__ import annotations

VERBS = {
    "models": (
        "Operate",
        "cli.models",
        "Models: which ones the pool serves, and which requests wait for them.",
    )
}
