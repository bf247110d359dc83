"""Lanes: requests that wait apart from others of their line, for only so many of them may run at once. Pure.

What is known of a request says in which lane it lies (`lane_of`), and it keeps its place in the order.
With each claim an owner says how many of each lane it may lease, by the rule of that lane
(dispatch/lanes.py). Those that it may not are passed over at no cost, however many they are: a full lane's
set is not looked at. Of a closed lane nobody may claim any: a step of the queue takes them out of it.

A new lane is a member here, a set in queue/keys.py, a row of LANES in queue/lua/common.lua, the word for its
place in core/requests/found_request.py, and a rule.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SUSPECT_DEATHS = 2
"""Owners that died holding a request before it runs apart from others like it."""

MODEL_BYTES = 256
"""Of a model's name, in UTF-8: by so much of it requests wait for it."""


class Lane(enum.Enum):
    """By the suffix of its set. In the order in which a claim tells the scripts of them."""

    __hash__ = object.__hash__  # each is there once; Enum's own hashes its name, each time

    SUSPECTS = "suspects"
    """Its owners died, often enough that it may be what killed them."""
    SEQUENCED = "sequenced"
    """It waits for its turn in its sequence. Closed: what ends the one before takes it out."""
    ABSENT = "absent"
    """Its model is not served. Closed: `Queue.recall` takes it out once that is."""


CLOSED = frozenset({Lane.SEQUENCED, Lane.ABSENT})
ONE_OF_EACH: Mapping[Lane, int] = MappingProxyType(dict.fromkeys(Lane, 1))


def rooms(lanes: Mapping[Lane, int]) -> dict[Lane, int]:
    """How many of each lane a claim may take that asks for so many: none of one that is closed, or not
    named."""
    return {lane: 0 if lane in CLOSED else max(0, lanes.get(lane, 0)) for lane in ONE_OF_EACH}


def lane_of(deaths: int, *, in_line: bool = False, awaits: bool = False) -> Lane | None:
    """Where a request waits whose owners died so often; None: with all others. `in_line`: for its turn in a
    sequence. `awaits`: for its model; it comes back to where it would wait without."""
    if in_line:
        return Lane.SEQUENCED
    if awaits:
        return Lane.ABSENT
    return Lane.SUSPECTS if deaths >= SUSPECT_DEATHS else None


def awaited_as(model: str) -> str:
    """The name under which requests wait for a model: what is longer than MODEL_BYTES is cut, and a lone
    surrogate is a question mark, so that every queue takes it. Two that are cut alike are recalled
    together."""
    name = model.encode(errors="replace")
    return name[:MODEL_BYTES].decode(errors="ignore")


def losses_of(deaths: int) -> int:
    """Owners that died with it since it runs apart from others like it."""
    return max(0, deaths - SUSPECT_DEATHS)
