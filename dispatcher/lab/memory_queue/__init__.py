"""The queue in memory: what the Redis scripts do, without Redis, on a clock that is passed in.

For simulation in virtual time and for fast tests. `MemoryStore` is what would be in Redis, and the side of
producers and operators (`ports.Desk`); each dispatcher attaches to it with a `MemoryQueue` of its own
(`ports.Queue`). Both pass the conformance suite that the Redis queue passes, so the promises stand in
`ports.py` and only what is peculiar to this form is said here.
"""

from dispatcher.lab.memory_queue.owner import MemoryQueue
from dispatcher.lab.memory_queue.queue_admin import MemoryStore

__all__ = ["MemoryQueue", "MemoryStore"]
