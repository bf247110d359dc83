"""Constants that every implementation of the queue shares. The values of `LUA_CONSTANTS` are
written into the scripts.

They are not settings, because all dispatchers of a queue must use the same values, including dispatchers of
different versions.
"""

from __future__ import annotations

from dispatcher.core.requests.lanes import SUSPECT_DEATHS
from dispatcher.core.requests.oversize import KEPT_BYTES
from dispatcher.core.requests.score import EARLIEST_DEADLINE, PRIORITIES, PRIORITY_STEP
from dispatcher.core.sequences.turns import (
    MAX_RUNS,
    MAX_UNPARKED_PER_STEP,
    MAX_WAITING_SHOWN,
    TURN_CHECK_INTERVAL_S,
)

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
MAX_SEQUENCES_PER_SWEEP = 200
"""Largest number of due sequences that one sweep checks."""
MAX_RETURNED_PER_CALL = 200
"""Largest number of requests that wait for their model and that one step returns to the queue."""
MAX_CANCEL_CHECKS_PER_SWEEP = 250
"""Largest number of requests that wait for their model and that one sweep checks for a cancel marker. The
check takes 1 to 2 ms of the server's time."""
MAX_COUNTED_MODELS = 1000
"""Largest number of models in one count of the requests that wait for their model."""
WARM_MARKER_S, WARM_UP_LOCK_S, MODEL_IN_USE_S = 60, 30, 15
"""Seconds for which an entry of the model registry holds: a warm marker, a warm-up lock, and a model in
use."""
MAX_MARKERS = 100_000
"""Largest number of markers of one kind that are read at once."""
MAX_PINS = 100_000
MAX_PIN_S = 365 * 86_400.0
"""Largest number of pins that are remembered, and the longest time in seconds for which one is kept."""
MAX_LABELS_OR_DRAINS = 1000
"""Largest number of labels, and of drains, that operators may set."""
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
    "CHECK_INTERVAL_S": TURN_CHECK_INTERVAL_S,
    "MAX_SEQUENCES_PER_SWEEP": MAX_SEQUENCES_PER_SWEEP,
    "MAX_UNPARKED_PER_STEP": MAX_UNPARKED_PER_STEP,
    "MAX_RUNS": MAX_RUNS,
    "MAX_WAITING_SHOWN": MAX_WAITING_SHOWN,
    "MAX_CANCEL_CHECKS_PER_SWEEP": MAX_CANCEL_CHECKS_PER_SWEEP,
    "MAX_COUNTED_MODELS": MAX_COUNTED_MODELS,
    "WARM_MARKER_S": WARM_MARKER_S,
    "WARM_UP_LOCK_S": WARM_UP_LOCK_S,
    "MODEL_IN_USE_S": MODEL_IN_USE_S,
    "MAX_MARKERS": MAX_MARKERS,
    "MAX_PIN_S": MAX_PIN_S,
    "MAX_LABELS_OR_DRAINS": MAX_LABELS_OR_DRAINS,
    "DONE": DONE,
    "LOST": LOST,
    "BAD_LIST": BAD_LIST,
    "UNWRITABLE": UNWRITABLE,
    "PRIORITIES": len(PRIORITIES),
    "PRIORITY_STEP": PRIORITY_STEP,
    "EARLIEST_DEADLINE": EARLIEST_DEADLINE,
}
