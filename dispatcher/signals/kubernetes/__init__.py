"""Watch the Kubernetes objects of a pool: endpoints, endpoint pickers and model rewrites."""
