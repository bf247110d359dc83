"""The admin port: probes, metrics, status, the live page."""

from dispatcher.admin.server import AdminServer, Limits, Views

__all__ = ["AdminServer", "Limits", "Views"]
