"""Simulator: policies against a simulated pool, in virtual time."""
