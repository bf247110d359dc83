"""Implementation of the queue in Redis or Valkey.

`scripts` runs Lua scripts on one server, `steps` has one module per step of the queue, and `connect` makes a
client for a URL. `owner` is the queue as one dispatcher uses it, `queue_admin` as producers and operators
do.
"""
