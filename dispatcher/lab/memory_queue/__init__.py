"""Queue in memory: does what the Redis scripts do, without Redis, on a clock that is passed in.

It is for simulation in virtual time. Tests add the calls of producers and operators (tests/memory_queue.py),
then sequences and models (tests/features/memory_queue), and with these it passes those tests of the
conformance suite that do not have the mark `server`. `MemoryStore` holds what would be in Redis. Each
dispatcher has a `MemoryQueue` of its own on it (`contract.Queue`). The contract says what it guarantees, so
only what is peculiar to this implementation is described here.
"""

from dispatcher.lab.memory_queue.owner import MemoryQueue
from dispatcher.lab.memory_queue.store import MemoryStore

__all__ = ["MemoryQueue", "MemoryStore"]
