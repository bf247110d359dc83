"""Named streams: requests and results under a name, read by several programs."""
