"""Queue in memory: does what the Redis scripts do, without Redis, on a clock that is passed in.

It is for simulation in virtual time and for fast tests, which add sequences and models to it
(tests/memory_queue). `MemoryStore` holds what would be in Redis, and is the side of producers and operators,
without their lookups. Each dispatcher has a `MemoryQueue` of its own on it (`contract.Queue`). Both pass
those tests of the conformance suite that do not have the mark `server`. The contracts say what they
guarantee, so only what is peculiar to this implementation is described here.
"""

from dispatcher.lab.memory_queue.owner import MemoryQueue
from dispatcher.lab.memory_queue.queue_admin import MemoryStore

__all__ = ["MemoryQueue", "MemoryStore"]
