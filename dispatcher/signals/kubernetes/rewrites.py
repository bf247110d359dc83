"""Watch the InferenceModelRewrites of the pool: model names that the endpoint picker turns into others.

    rule: requests for `chat` ──▶ chat-v1 (90), chat-v2 (10)        rule without a name: all other requests

Servers list the targets, and requests have the names. Therefore a name counts as served if one of its targets
is listed. A name that is listed itself stays served whatever a rule does with it, because only an answer
shows the result of the rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.settings.model import PoolSettings
from dispatcher.signals.kubernetes.api import Api, ClusterProblem
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from dispatcher.signals.kubernetes.mirror import Mirror, Resource
from dispatcher.signals.kubernetes.objects import ModelRewrite, parse_rewrite
from dispatcher.telemetry.events import Event, emit

GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")
"""API groups of llm-d, and of the Gateway API Inference Extension before it. A cluster may serve both, one or
none of them."""
_VERSION, _PLURAL = "v1alpha2", "inferencemodelrewrites"
MAX_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class ModelAliases:
    """Result of all rewrites of a pool together."""

    exact: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Targets by model name."""
    default_targets: tuple[str, ...] = ()
    """Targets of every other name. Empty if other names are not rewritten."""

    def add_aliases(self, listed: Sequence[str], configured_names: Set[str]) -> tuple[str, ...]:
        """Return the names that requests may use if these models are listed.

        A rule for any name adds only those in `configured_names`, which are the names in the settings.
        """
        there = set(listed)
        more = [name for name, targets in self.exact.items() if not there.isdisjoint(targets)]
        if not there.isdisjoint(self.default_targets):
            more += sorted(configured_names - self.exact.keys())
        return tuple(dict.fromkeys((*listed, *more)))


def merge_rewrites(rewrites: Iterable[tuple[str, ModelRewrite]], pool: str) -> ModelAliases:
    """Return the result of these rewrites, given by object name.

    A rule that has the name counts before a rule for any name. Among several, the older object counts, and
    then the first rule.
    """
    exact: dict[str, tuple[str, ...]] = {}
    default_targets: tuple[str, ...] | None = None
    for _, rewrite in sorted(rewrites, key=lambda each: (each[1].created, each[0])):
        if rewrite.pool != pool:
            continue
        for rule in rewrite.rules:
            if not rule.names and default_targets is None:
                default_targets = rule.targets
            for name in rule.names:
                if name and len(name.encode()) <= MAX_MODEL_NAME_BYTES and len(exact) < MAX_NAMES:
                    exact.setdefault(name, rule.targets)
    return ModelAliases(exact, default_targets or ())


class RewriteWatch:
    """Watches the rewrites in the pool's namespace, and calls `on_change` in the event loop after a change.

    A group that the cluster does not serve has no rewrites. While the API cannot be asked, the rewrites that
    were seen last stay in force.
    """

    def __init__(
        self,
        pool: PoolSettings,
        on_change: Callable[[], None],
        *,
        access: ClusterAccess,
    ) -> None:
        self._pool = pool
        self._on_change = on_change
        self._access = access
        self._mirrors: list[Mirror[ModelRewrite]] = []
        self.aliases = ModelAliases()
        self.problems: tuple[ClusterProblem, ...] = ()
        """Problems with reading the rewrites."""
        self.is_settled = not access
        """True once the rewrites were read, or once it is known why they cannot be read."""

    async def run(self) -> None:
        """Watch until cancelled. Returns at once if there is no cluster."""
        if not self._access:
            return
        api = Api(self._access)
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in GROUPS:
                    resource = Resource(group, _VERSION, _PLURAL, self._pool.namespace)
                    self._mirrors.append(Mirror(api, resource, parse_rewrite, self._update_aliases))
                for mirror in self._mirrors:
                    tasks.create_task(mirror.run(), name=f"watch of {mirror.resource.plural}")
        finally:
            self._mirrors.clear()
            await api.close()

    def _update_aliases(self) -> None:
        before = self.aliases, self.is_settled
        served_mirrors = [mirror for mirror in self._mirrors if not mirror.is_unserved]
        items = [item for mirror in served_mirrors for item in mirror.items.items()]
        self.aliases = merge_rewrites(items, self._pool.name)
        self.is_settled = self.is_settled or all(mirror.is_settled for mirror in self._mirrors)
        problems = [mirror.problem for mirror in served_mirrors]
        self._report_problems(tuple(dict.fromkeys(problem for problem in problems if problem is not None)))
        if before[0] != self.aliases:
            # Rewrites that disappear from one group may have moved to the other one. A group that is not
            # served is otherwise asked only every few minutes.
            for mirror in self._mirrors:
                if mirror.is_unserved:
                    mirror.retry_now()
        if before != (self.aliases, self.is_settled):
            self._on_change()

    def _report_problems(self, problems: tuple[ClusterProblem, ...]) -> None:
        before, self.problems = self.problems, problems
        for problem in problems:
            if problem not in before:
                emit(Event.KUBERNETES_PROBLEM, problem=problem.what, hint=problem.hint)
