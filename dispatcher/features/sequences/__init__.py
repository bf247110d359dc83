"""Sequences: requests that run in order, one at a time."""
