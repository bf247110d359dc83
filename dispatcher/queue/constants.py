"""Constants that every implementation of the queue shares. The values of `LUA_CONSTANTS` are
written into the scripts.

They are not settings, because all dispatchers of a queue must use the same values, older and newer ones. The
numbers of a feature are in the header of its main Lua file (lua_files.py).
"""

from __future__ import annotations

from dispatcher.requests.lanes import SUSPECT_DEATHS
from dispatcher.requests.oversize import KEPT_BYTES
from dispatcher.requests.score import EARLIEST_DEADLINE, PRIORITIES, PRIORITY_STEP

PREFIX_BYTES = 512
"""Number of bytes of a member that order entries with equal scores, once the request was claimed."""
MAX_PASSED_OVER = 500
"""Largest number of requests that one claim passes over because they need more units than the limit."""
CLAIM_BYTES = 2**20
"""Largest sum of the bytes of the members of one claim."""
JUST_LEASED_S = 0.02
"""Seconds after a claim or renewal for which a lease counts as just leased: its request may not have been
sent yet."""
SAME_READING_S = 0.001
"""Largest difference in seconds between the times of one reading. Clocks are not known more precisely."""
CLOCK_STEP_S = 1.0
"""Seconds that a time may be in the future. A later time is from before a step of the clock."""
SWEEP_GAP_S = 2.0
"""Seconds between two sweeps after which the queue counts as having been unreachable. Every owner sweeps each
second."""
MAX_POOL_IDENTITIES = 16
"""Largest number of identities of pools that are read from one queue."""
REPLY_TTL_S = 60
"""Seconds for which a repeated call gets the same reply."""
MAX_ACTIVE_BYTES = 65_536
"""Largest packed list of the tokens that can be cancelled under one id: some thousand tokens."""
MAX_TOKEN_LOOKUPS = 16
"""Largest number of tokens under one id whose requests are looked up by token. For more, all requests with
their deadlines are read."""
CANCEL_TTL_S = 604_800
"""Seconds for which the cancel of a request that was found under `request-active:<id>` stays in force."""

DONE, LOST, BAD_LIST, UNWRITABLE, TOO_LARGE = range(5)
"""Status of a result. DONE: it was written. LOST: the lease has ended or belongs to another owner, or the
unleased request has moved. BAD_LIST: the list cannot be pushed to, so INVALID_REQUEST goes to the default
list. UNWRITABLE: the default list cannot be pushed to either, so the request stays as it is. TOO_LARGE: the
server took a TOO_LARGE result in its place; no script returns this."""

LUA_CONSTANTS = {
    "MAX_ACTIVE_BYTES": MAX_ACTIVE_BYTES,
    "MAX_TOKEN_LOOKUPS": MAX_TOKEN_LOOKUPS,
    "SUSPECT_DEATHS": SUSPECT_DEATHS,
    "PREFIX_BYTES": PREFIX_BYTES,
    "KEPT_BYTES": KEPT_BYTES,
    "MAX_PASSED_OVER": MAX_PASSED_OVER,
    "JUST_LEASED_S": JUST_LEASED_S,
    "SAME_READING_S": SAME_READING_S,
    "CLOCK_STEP_S": CLOCK_STEP_S,
    "SWEEP_GAP_S": SWEEP_GAP_S,
    "DONE": DONE,
    "LOST": LOST,
    "BAD_LIST": BAD_LIST,
    "UNWRITABLE": UNWRITABLE,
    "PRIORITIES": len(PRIORITIES),
    "PRIORITY_STEP": PRIORITY_STEP,
    "EARLIEST_DEADLINE": EARLIEST_DEADLINE,
}
