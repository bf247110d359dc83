"""Simulator, stand-in servers and the in-memory queue. Production code never imports this package."""
