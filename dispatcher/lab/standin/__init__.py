"""Stand-in servers over HTTP for tests and demos: a gateway, an endpoint picker and a pool."""
