"""Lanes: requests that wait apart from the rest of the queue, because only a limited number of them may run
at once.

The state of a request determines its lane (`choose_lane`), and the request keeps its place in the order,
except that started requests go before all others of their priority (`score.floor_to_priority`). With each
claim an owner says how many requests of each lane it may lease, by the rule of that lane (kernel/lanes.py).
Requests beyond that are skipped at no cost, because the set of a full lane is not read. A new lane needs a
member of `Lane`, a set and a letter in the Lua file of its feature (queue/lua_files.py), a location in
requests/found_request.py, and a rule.

A feature may also have a closed lane, from which no claim takes requests: a step of the queue moves them out
of it. Only the Lua file of the feature declares it.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from dispatcher.requests.score import floor_to_priority

if TYPE_CHECKING:
    from collections.abc import Mapping

SUSPECT_DEATHS = 2
"""Number of owners that must die while they hold a request before it becomes a suspect, which runs apart from
others."""

MAX_MODEL_NAME_BYTES = 256
"""Number of UTF-8 bytes of a model's name that the queue stores."""


class Lane(enum.Enum):
    """A lane. Its value is the suffix of its Redis set. The order is that in which claims pass lanes to the
    scripts."""

    __hash__ = object.__hash__  # members are singletons; the hash of Enum would hash the name each time

    SUSPECTS = "suspects"
    """The owners of the request died so often that the request may be the cause."""
    STARTED = "started"
    """Earlier calls have generated a part of the answer (`Release.progress`), and the request waits for its
    next call. It goes before all requests of its priority that have not started."""


ONE_PER_LANE: Mapping[Lane, int] = MappingProxyType(dict.fromkeys(Lane, 1))


def compute_lane_room(lanes: Mapping[Lane, int]) -> dict[Lane, int]:
    """Return how many requests of each lane a claim with these numbers may take. 0 for missing lanes."""
    return {lane: max(0, lanes.get(lane, 0)) for lane in ONE_PER_LANE}


def choose_lane(deaths: int, *, has_progress: bool = False) -> Lane | None:
    """Return the lane from which a claim takes a request whose owners died this often. `None` if the request
    waits with all others. `has_progress`: earlier calls have generated a part of its answer."""
    if deaths >= SUSPECT_DEATHS:
        return Lane.SUSPECTS
    return Lane.STARTED if has_progress else None


def rank_in_queue(score: float, lane: Lane | str | None) -> tuple[float, bool]:
    """Return what orders requests of different lanes: started ones go before all others of their priority."""
    return (floor_to_priority(score), False) if lane is Lane.STARTED else (score, True)


def shorten_model_name(model: str) -> str:
    """Return the name of a model as the queue stores it.

    Names longer than MAX_MODEL_NAME_BYTES are cut, and a lone surrogate becomes a question mark, so that
    every queue accepts the name. Two models with the same shortened name are one model for the queue.
    """
    name = model.encode(errors="replace")
    return name[:MAX_MODEL_NAME_BYTES].decode(errors="ignore")


def count_losses(deaths: int) -> int:
    """Return the number of owners that died with the request since it became a suspect."""
    return max(0, deaths - SUSPECT_DEATHS)
