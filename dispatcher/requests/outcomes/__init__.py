"""Answers of the gateway: what they mean for the request, for its group and for the gateway itself."""
