"""The dispatch loop: allowance → claim → forward → settle, and the maintenance of leases."""

from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.loop import Dispatcher
from dispatcher.dispatch.options import Options, SequenceOptions

__all__ = ["Dispatcher", "Journal", "Options", "SequenceOptions"]
