"""Calls of this feature to the queue: turns, what is left of ended sequences, and what operators decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatcher.features.sequences.queue.calls import SequenceAdminCalls
    from dispatcher.queue.admin_contract import QueueAdmin


def open_sequences(admin: QueueAdmin) -> SequenceAdminCalls:
    """Return the calls of producers and operators for sequences."""
    # Imported on use, because a client that uses none starts faster without the client of Redis.
    from dispatcher.features.sequences.queue.calls import SequenceAdminCalls

    return admin.open_calls(SequenceAdminCalls)
