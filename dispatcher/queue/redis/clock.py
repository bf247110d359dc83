"""The server's clock, as far as its replies prove where it stands against the loop's."""

from __future__ import annotations

import time


class ServerClock:
    """Translates between loop time and the server's Unix time.

    A reply that carries the server's time T proves T − received ≤ offset ≤ T − sent. The offset moves only
    as far as the newest proof demands: so a slow reply disturbs nothing, a tight one corrects at once, drift
    is followed, and a step of either clock is taken over with the first reply after it.
    """

    def __init__(self) -> None:
        self._offset: float | None = None

    def __repr__(self) -> str:
        return f"<ServerClock {'unknown' if self._offset is None else f'{self._offset:+.6f} s'}>"

    @property
    def known(self) -> bool:
        return self._offset is not None

    def observe(self, sent_at: float, received_at: float, server: float) -> None:
        low, high = server - received_at, server - sent_at
        offset = (low + high) / 2 if self._offset is None else self._offset
        self._offset = min(max(offset, low), high)

    def server(self, at: float) -> float:
        """Loop time → the server's Unix time."""
        return at + self.offset(at)

    def loop(self, at: float, now: float) -> float:
        """The server's Unix time → loop time; `now`: loop time."""
        return at - self.offset(now)

    def offset(self, now: float) -> float:
        """Before the first reply this machine's own clock has to do."""
        return time.time() - now if self._offset is None else self._offset
