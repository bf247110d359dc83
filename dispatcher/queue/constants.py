"""Numbers by which every form of the queue works. The scripts get those of `LUA` as locals of these names.

They are no settings: all dispatchers of a queue must agree about them, and so must those of two versions.
"""

from __future__ import annotations

from dispatcher.core.requests.lanes import SUSPECT_DEATHS
from dispatcher.core.requests.oversize import HEAD_BYTES
from dispatcher.core.requests.score import PRIORITIES, PRIORITY_STEP, TOLD_FROM
from dispatcher.core.sequences.turns import LINE_SEEN, LIVES_MOST, LOOK_S, UNPARK_MOST

PREFIX_BYTES = 512
"""Of a member: so much decides the order of equal scores once it was claimed."""
PASSED_MOST = 500
"""Requests that are heavier than the limit: so many a claim passes over at the most."""
CLAIM_BYTES = 2**20
"""A claim stops before its members sum to more than this."""
YOUNG_S = 0.02
"""A lease claimed or renewed within this is young: its request is not surely sent yet."""
SAME_READING_S = 0.001
"""Clocks are known no better: two readings this close are the same."""
AHEAD_S = 1.0
"""Nothing is of so much later than now, unless a clock stepped."""
GAP_S = 2.0
"""Between sweeps this is an outage at the latest, for every owner sweeps each second."""
LOOKED_MOST = 200
"""Sequences whose time has come: so many one sweep looks at."""
RECALL_MOST = 200
"""Requests that one step brings back from the lane of those that wait for their model."""
REVOKED_MOST = 250
"""Of the requests there, how many one sweep looks at for whether they were cancelled: 1 to 2 ms of the
server's time."""
AWAITED_MOST = 1000
"""Models that one look tells of."""
WARM_S, WARMING_S, USED_S = 60, 30, 15
"""How long each holds that is said of a version: it is warm; somebody warms it; somebody has it under way."""
MARKS_MOST = 100_000
"""Marks of a kind that one look tells of."""
PINS_MOST = 100_000
PIN_MOST_S = 365 * 86_400.0
"""Versions that were given to sequences and jobs: how many are remembered, and the longest."""
DECIDED_MOST = 1000
"""Labels, and drains, that operators may set."""
REPLY_TTL_S = 60
"""How long a repetition of a call gets the same reply."""
ACTIVE_BYTES = 65_536
"""Largest packed list of the tokens that can be cancelled under one id: some thousand tokens."""
TOKENS_SOUGHT = 16
"""Largest number of tokens under one id whose requests are looked up by token. For more, all requests with
their deadlines are read."""
CANCEL_TTL_S = 604_800
"""Seconds for which the cancel of a request that was found under `request-active:<id>` stays in force."""

DONE, LOST, BAD_LIST, STUCK, TOO_LARGE = range(5)
"""What became of a result. DONE: written. LOST: its lease, or its place, is another's by now. BAD_LIST: its
list cannot be pushed to, so that INVALID_REQUEST goes to the default list. STUCK: nor can that one, so that
the request stays as it is. TOO_LARGE, as no script says: the server took a TOO_LARGE result in its place."""

LUA = {
    "ACTIVE_BYTES": ACTIVE_BYTES,
    "TOKENS_SOUGHT": TOKENS_SOUGHT,
    "SUSPECT_DEATHS": SUSPECT_DEATHS,
    "PREFIX_BYTES": PREFIX_BYTES,
    "HEAD_BYTES": HEAD_BYTES,
    "PASSED_MOST": PASSED_MOST,
    "YOUNG_S": YOUNG_S,
    "SAME_READING_S": SAME_READING_S,
    "AHEAD_S": AHEAD_S,
    "GAP_S": GAP_S,
    "LOOK_S": LOOK_S,
    "LOOKED_MOST": LOOKED_MOST,
    "UNPARK_MOST": UNPARK_MOST,
    "LIVES_MOST": LIVES_MOST,
    "LINE_SEEN": LINE_SEEN,
    "REVOKED_MOST": REVOKED_MOST,
    "AWAITED_MOST": AWAITED_MOST,
    "WARM_S": WARM_S,
    "WARMING_S": WARMING_S,
    "USED_S": USED_S,
    "MARKS_MOST": MARKS_MOST,
    "PIN_MOST_S": PIN_MOST_S,
    "DECIDED_MOST": DECIDED_MOST,
    "DONE": DONE,
    "LOST": LOST,
    "BAD_LIST": BAD_LIST,
    "STUCK": STUCK,
    "PRIORITIES": len(PRIORITIES),
    "PRIORITY_STEP": PRIORITY_STEP,
    "TOLD_FROM": TOLD_FROM,
}
