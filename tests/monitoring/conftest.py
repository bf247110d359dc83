"""The stage of the process scenarios, here too."""

from tests.scenarios.conftest import queue_server, stage

__all__ = ["queue_server", "stage"]
