"""Fixtures of the process scenarios."""

from tests.scenarios.fixtures import queue_server, stage

__all__ = ["queue_server", "stage"]
