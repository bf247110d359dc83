"""The admin port: probes, metrics, status and the live page."""

from dispatcher.service.admin.server import AdminLimits, AdminServer, AdminViews

__all__ = ["AdminLimits", "AdminServer", "AdminViews"]
