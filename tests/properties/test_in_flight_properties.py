"""Law of readings that show priorities."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.budget import round_down
from tests.properties.adversarial_pool import AdversarialPool


@given(
    seed=st.integers(0, 10**6),
    max_sys=st.integers(20, 30),
    foreign_batch_count=st.sampled_from([0, 3]),
    later_s=st.sampled_from([0.0, 0.3]),
)
def test_limit_exceeds_the_room_only_by_requests_of_others_with_a_negative_priority(
    seed: int, max_sys: int, foreign_batch_count: int, later_s: float
) -> None:
    """Without priorities it may exceed the room by all requests in transit within the window of a reading.
    The pool checks all other laws."""
    rng = Random(seed)
    pool = AdversarialPool(
        rng, max_sys, realtime=rng.randrange(max_sys), foreign_batch_count=foreign_batch_count
    )
    for _ in range(10):
        pool.finish_requests(rng.randrange(max_sys))
        realtime = pool.realtime
        pool.advance(pool.take_sample(0.2 * rng.random(), later_s, rng.random()))
        # Until requests of the dispatcher were certainly in a reading, their priority is not known.
        if pool.limiter._tracker._has_batch_priority:
            room = max(0, round_down(pool.usable_capacity - realtime))
            assert pool.last_limit <= room + min(foreign_batch_count, realtime)
        pool.realtime = rng.randrange(max_sys)
        pool.advance(rng.choice((0.0, 0.1, 1.0)))
