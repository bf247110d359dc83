"""The admin port: probes, metrics, status and the live page."""

from dispatcher.admin.server import AdminLimits, AdminServer, AdminViews

__all__ = ["AdminLimits", "AdminServer", "AdminViews"]
