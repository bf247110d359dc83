"""The verbs of batch files, declared for the list of all verbs (`dispatcher.cli.VERBS`)."""

from __future__ import annotations

VERBS = {
    "submit": ("Submit", "cli", "Submit one request and print its result, or submit a whole batch file.")
}
