"""Queue in memory: does what the Redis scripts do, without Redis, on a clock that is passed in.

It is for simulation in virtual time and for fast tests. `MemoryStore` holds what would be in Redis, and is
the side of producers and operators (`ports.QueueAdmin`). Each dispatcher has a `MemoryQueue` of its own on it
(`ports.Queue`). Both pass the conformance suite that the Redis queue passes. The protocols in `ports` say
what they guarantee, so only what is peculiar to this implementation is described here.
"""

from dispatcher.lab.memory_queue.owner import MemoryQueue
from dispatcher.lab.memory_queue.queue_admin import MemoryStore

__all__ = ["MemoryQueue", "MemoryStore"]
