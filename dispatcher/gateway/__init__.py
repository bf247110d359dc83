"""Send one attempt of a request over HTTP and translate the answer into an Outcome.

`docs/reference/forwarding.md` lists what is sent, what is rejected, and which answer leads to which outcome.
"""
