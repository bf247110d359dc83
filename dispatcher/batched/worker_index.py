"""Index of a worker process among the workers of its class."""

from __future__ import annotations

import os

INDEX_VARIABLE = "BATCHED_WORKER_INDEX"
"""Environment variable of a worker process that contains its index."""


def worker_index() -> int:
    """Return the index of this worker process: 0 to `workers` - 1, and 0 in any other process.

    A process that replaces a dead one has the same index, so each index can stand for one device:
    `self.device = f"cuda:{worker_index()}"`.
    """
    return int(os.environ.get(INDEX_VARIABLE, "0"))
