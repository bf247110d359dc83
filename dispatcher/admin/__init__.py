"""The admin port: probes, metrics, status."""

from dispatcher.admin.server import AdminServer, Views

__all__ = ["AdminServer", "Views"]
