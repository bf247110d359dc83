"""The verbs of named streams, declared for the list of all verbs (`dispatcher.cli.VERBS`)."""

from __future__ import annotations

VERBS = {"streams": ("Submit", "cli", "Named streams of the Python client.")}
