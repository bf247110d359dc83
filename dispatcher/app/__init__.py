"""The dispatcher process: builds the parts, starts and stops them, and puts the status together."""
