"""Send one attempt of a request over HTTP and translate the answer into an Outcome.

`docs/reference/forwarding.md` lists what is sent, what is rejected, and which answer leads to which outcome.
"""

from dispatcher.forward.direct import DirectServers
from dispatcher.forward.gateway import HttpGateway
from dispatcher.forward.transport import CONNECT_S, STREAMED_BYTES

__all__ = ["CONNECT_S", "STREAMED_BYTES", "DirectServers", "HttpGateway"]
