"""Metrics of the endpoint picker (EPP): series, latencies, and the source that scrapes them."""
