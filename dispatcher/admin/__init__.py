"""The admin port: probes, metrics, status and the live page."""

from dispatcher.admin.server import AdminServer, Limits, Views

__all__ = ["AdminServer", "Limits", "Views"]
