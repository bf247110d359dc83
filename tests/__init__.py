"""Tests mirror the package; what they share is in tests.support."""
