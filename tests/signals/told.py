"""What a watch of Kubernetes tells, kept for a test."""

from __future__ import annotations

from dataclasses import replace

from dispatcher.settings import PoolSettings
from dispatcher.signals.kubernetes.capacity import CapacityWatch, Endpoints
from tests.support import wait_until

QWEN = PoolSettings(name="qwen", namespace="default")


class Seen:
    """What the watch told, in order."""

    def __init__(self) -> None:
        self.history: list[Endpoints] = []
        self.watch: CapacityWatch

    def __call__(self, endpoints: Endpoints) -> None:
        assert not self.history or endpoints != self.history[-1]
        self.history.append(endpoints)

    @property
    def now(self) -> Endpoints:
        return self.history[-1] if self.history else Endpoints()

    def fine(self, ready: int, *epp_addresses: str) -> bool:
        """So much is known, and nothing is wrong."""
        return replace(self.now, addresses=None) == Endpoints(ready, epp_addresses or None, is_complete=True)

    async def ready(self, number: int | None) -> None:
        await wait_until(lambda: bool(self.history) and self.now.ready == number, what=f"ready == {number}")

    async def problem(self, *parts: str) -> str:
        """The one problem that has all these parts."""

        def found() -> list[str]:
            told = map(str, self.now.problems)
            return [problem for problem in told if all(part in problem for part in parts)]

        await wait_until(found, what=f"a problem with {parts}")
        (problem,) = found()
        return problem
