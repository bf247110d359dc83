"""What an older version left: recorded by its own code, and that code itself, to run beside today's.

`4b348e7.zip` is the queue's part of the package at commit 4b348e7, `4b348e7.json` what it wrote into a Redis,
`embedded` the directory in which it kept a Valkey. `record.py` has made the latter two.
"""
