"""The dispatch loop: allowance → claim → forward → settle, and the maintenance of leases."""

from dispatcher.kernel.journal import Journal
from dispatcher.kernel.loop import Dispatcher
from dispatcher.kernel.options import Options

__all__ = ["Dispatcher", "Journal", "Options"]
