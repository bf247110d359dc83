"""Merged calls: which requests are sent together, and how large a call may be."""
