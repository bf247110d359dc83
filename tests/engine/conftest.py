"""Fixtures of tests with a real engine and a dispatcher process."""

from tests.scenarios.fixtures import queue_server, stage

__all__ = ["queue_server", "stage"]
