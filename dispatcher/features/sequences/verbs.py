"""The verbs of sequences, declared for the list of all verbs (`dispatcher.cli.VERBS`)."""

from __future__ import annotations

VERBS = {
    "cancel": (
        "Submit",
        "cancel",
        "Cancel requests or a sequence, also those that run. The result is CANCELLED.",
    ),
    "sequences": ("Operate", "cli", "Sequences: requests that run in order, one at a time."),
}
