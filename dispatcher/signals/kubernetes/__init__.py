"""What the Kubernetes API tells of a pool: endpoints, pickers and model rewrites."""
