"""Stand-ins for a gateway, an endpoint picker and a pool, over HTTP: to try the dispatcher against."""
