"""The dispatcher process: builds the parts, starts and stops them, and builds the status."""
