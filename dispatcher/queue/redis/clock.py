"""Clock of the server, as far as its replies show how it differs from the clock of the event loop."""

from __future__ import annotations

import time


class ServerClock:
    """Translates between loop time and the server's Unix time.

    A reply that carries the server's time T proves T − received ≤ offset ≤ T − sent. The offset moves only as
    far as the newest proof demands. So a slow reply changes nothing, a fast one corrects the offset at once,
    drift is followed, and a step of either clock is corrected by the first reply after it.
    """

    def __init__(self) -> None:
        self._offset: float | None = None

    def __repr__(self) -> str:
        return f"<ServerClock {'unknown' if self._offset is None else f'{self._offset:+.6f} s'}>"

    @property
    def is_known(self) -> bool:
        return self._offset is not None

    def observe_reply(self, sent_at: float, received_at: float, server_time: float) -> None:
        # The server read its clock between the two loop times, which bounds the offset from both sides.
        low, high = server_time - received_at, server_time - sent_at
        offset = (low + high) / 2 if self._offset is None else self._offset
        self._offset = min(max(offset, low), high)

    def to_server_time(self, at: float) -> float:
        """Convert a loop time to the server's Unix time."""
        return at + self.get_offset(at)

    def to_loop_time(self, at: float, now: float) -> float:
        """Convert the server's Unix time to a loop time. `now` is a loop time."""
        return at - self.get_offset(now)

    def get_offset(self, now: float) -> float:
        """Return the server's Unix time minus the loop time. Before the first reply, the clock of this
        machine is used."""
        return time.time() - now if self._offset is None else self._offset
