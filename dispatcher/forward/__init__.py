"""One try of one request over HTTP, translated into an Outcome.

`docs/forwarding.md` has the tables: what is sent, what is refused, which answer leads to what.
"""

from dispatcher.forward.direct import DirectServers
from dispatcher.forward.gateway import HttpGateway
from dispatcher.forward.transport import CONNECT_S, STREAMED_BYTES

__all__ = ["CONNECT_S", "STREAMED_BYTES", "DirectServers", "HttpGateway"]
