"""Metrics read through Prometheus."""
