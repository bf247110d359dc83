"""The queue against real servers."""
