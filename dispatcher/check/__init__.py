"""Checks of `batch-dispatcher check`. Adapters return facts, and this package puts them into words."""
