"""The process: what it is made of, start and stop, reload, status, and the admin port."""
