"""Answers of the gateway: what they mean for the request, for its tenant and for the gateway itself."""
