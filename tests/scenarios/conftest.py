"""Fixtures of the scenarios."""

from tests.scenarios.fixtures import cluster, own_stage, queue_server, stage

__all__ = ["cluster", "own_stage", "queue_server", "stage"]
