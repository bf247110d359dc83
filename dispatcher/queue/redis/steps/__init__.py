"""Steps of the queue: one module for each Lua script, or for a few that share their arguments. It has the
arguments by name, the call, and the decoded reply.

Each step is atomic and safe to repeat. The header of the Lua file says what it guarantees. Everything that
needs several steps is part of the owner or of the queue admin. The steps of producers and consumers are in
producer.py, so that a program which only submits loads little.
"""
