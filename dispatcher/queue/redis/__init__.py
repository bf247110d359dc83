"""The queue in Redis or Valkey: scripts, the typed steps over them, and who takes these steps.

scripts   one server, seen through its scripts           connect   from a URL to a client
owner     the queue as one dispatcher sees it            desk      as producers and operators see it
"""
