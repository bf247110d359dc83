"""Recorder of the states that a Kubernetes watch publishes."""

from __future__ import annotations

from dataclasses import replace

from dispatcher.settings.model import PoolSettings
from dispatcher.signals.kubernetes.capacity import CapacityWatch, Endpoints
from tests.support import wait_until

QWEN = PoolSettings(name="qwen", namespace="default")


class CapacityRecorder:
    """Callback for a `CapacityWatch` that records each published state in order."""

    def __init__(self) -> None:
        self.history: list[Endpoints] = []
        self.watch: CapacityWatch

    def __call__(self, endpoints: Endpoints) -> None:
        assert not self.history or endpoints != self.history[-1]
        self.history.append(endpoints)

    @property
    def latest(self) -> Endpoints:
        return self.history[-1] if self.history else Endpoints()

    def is_complete_with(self, ready: int, *epp_addresses: str) -> bool:
        """Return whether the latest state has these values and no problem."""
        return replace(self.latest, addresses=None, pool_uid="") == Endpoints(
            ready, epp_addresses or None, is_complete=True
        )

    async def wait_for_ready(self, number: int | None) -> None:
        await wait_until(
            lambda: bool(self.history) and self.latest.ready == number, what=f"ready == {number}"
        )

    async def wait_for_problem(self, *parts: str) -> str:
        """Wait for a problem whose text has all these parts, and return its text."""

        def matching() -> list[str]:
            problems = map(str, self.latest.problems)
            return [problem for problem in problems if all(part in problem for part in parts)]

        await wait_until(matching, what=f"a problem with {parts}")
        (problem,) = matching()
        return problem
