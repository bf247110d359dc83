"""Which model server a request needs, because the server keeps something of earlier requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dispatcher.common.value import Value
from dispatcher.requests.headers import AFFINITY_ID, AFFINITY_TOKEN


class Affinity(Value, frozen=True):
    """Headers that tell gateway and model server where a request belongs."""

    headers: Mapping[str, str]
    """Names in lower case. They replace headers of the caller."""
    token_header: str
    """Header of the answer that contains the sticky token for the next request. In a request only the
    dispatcher may set it."""
    group_id: str = ""
    """Name of the requests for which the server keeps one state."""
    is_first: bool = False
    """True if the group begins with this request."""
    is_last: bool = False
    """True if the group ends with this request."""

    @property
    def sticky_token(self) -> str:
        """Token of the server that the request must reach. Empty if any server may answer."""
        return self.headers.get(self.token_header, "")


@dataclass(frozen=True, slots=True)
class AffinityOptions:
    """Names of the headers of all affinities."""

    token_header: str = AFFINITY_TOKEN
    """Header of an answer that names the server, and that is sent with the next request that needs the same
    server. Empty for none."""
    id_header: str = AFFINITY_ID
    """Header with the id of a group, sent to the gateway. Empty for none."""
