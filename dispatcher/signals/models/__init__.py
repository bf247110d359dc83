"""Observe which models the endpoints of a pool serve."""
