"""Constants that every implementation of the queue shares. The scripts get those of `LUA_CONSTANTS` as
locals.

They are not settings, because all dispatchers of a queue must use the same values, including dispatchers of
different versions.
"""

from __future__ import annotations

from dispatcher.core.requests.lanes import SUSPECT_DEATHS
from dispatcher.core.requests.oversize import HEAD_BYTES
from dispatcher.core.requests.score import PRIORITIES, PRIORITY_STEP, TOLD_FROM
from dispatcher.core.sequences.turns import LINE_SEEN, LIVES_MOST, LOOK_S, UNPARK_MOST

PREFIX_BYTES = 512
"""Number of bytes of a member that order entries with equal scores, once the request was claimed."""
PASSED_MOST = 500
"""Largest number of requests that one claim passes over because they need more units than the limit."""
CLAIM_BYTES = 2**20
"""Largest sum of the bytes of the members of one claim."""
YOUNG_S = 0.02
"""Seconds after a claim or renewal for which a lease counts as just leased: its request may not have been
sent yet."""
SAME_READING_S = 0.001
"""Largest difference in seconds between the times of one reading. Clocks are not known more precisely."""
AHEAD_S = 1.0
"""Seconds that a time may be in the future. A later time is from before a step of the clock."""
GAP_S = 2.0
"""Seconds between two sweeps after which the queue counts as having been unreachable. Every owner sweeps each
second."""
LOOKED_MOST = 200
"""Largest number of due sequences that one sweep checks."""
RECALL_MOST = 200
"""Largest number of requests that wait for their model and that one step returns to the queue."""
REVOKED_MOST = 250
"""Largest number of requests that wait for their model and that one sweep checks for a cancel marker. The
check takes 1 to 2 ms of the server's time."""
AWAITED_MOST = 1000
"""Largest number of models in one count of the requests that wait for their model."""
WARM_S, WARMING_S, USED_S = 60, 30, 15
"""Seconds for which an entry of the model registry holds: a warm marker, a warm-up lock, and a model in
use."""
MARKS_MOST = 100_000
"""Largest number of markers of one kind that are read at once."""
PINS_MOST = 100_000
PIN_MOST_S = 365 * 86_400.0
"""Largest number of pins that are remembered, and the longest time in seconds for which one is kept."""
DECIDED_MOST = 1000
"""Largest number of labels, and of drains, that operators may set."""
REPLY_TTL_S = 60
"""Seconds for which a repeated call gets the same reply."""
ACTIVE_BYTES = 65_536
"""Largest packed list of the tokens that can be cancelled under one id: some thousand tokens."""
TOKENS_SOUGHT = 16
"""Largest number of tokens under one id whose requests are looked up by token. For more, all requests with
their deadlines are read."""
CANCEL_TTL_S = 604_800
"""Seconds for which the cancel of a request that was found under `request-active:<id>` stays in force."""

DONE, LOST, BAD_LIST, STUCK, TOO_LARGE = range(5)
"""Status of a result. DONE: it was written. LOST: the lease has ended or belongs to another owner, or the
unleased request has moved. BAD_LIST: the list cannot be pushed to, so INVALID_REQUEST goes to the default
list. UNWRITABLE: the default list cannot be pushed to either, so the request stays as it is. TOO_LARGE: the
server took a TOO_LARGE result in its place; no script returns this."""

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
