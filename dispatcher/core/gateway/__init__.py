"""What answers of the gateway mean for the request, for its tenant and for the gateway."""
