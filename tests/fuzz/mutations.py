"""Mutations of valid inputs, and limits on the CPU time of their processing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence

FUZZ_S = float(os.environ.get("FUZZ_S", "600"))
"""Duration of each long test."""
SECONDS_PER_MB = 0.25
"""Allowed CPU seconds per MB. Smaller inputs may cost as much as one MB."""
MB = 2**20
UNUSUAL_FRAGMENTS = (
    *(
        b"",
        b"\0",
        b"\xff",
        b"\xc3\x28",
        b"\r\n",
        b"\n",
        b"\t",
        b"\\",
        b'"',
        b"'",
        b"#",
        b"%0d%0a",
        b"\x1b]0;x\x07",
    ),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b"{}",
        b"[]",
        b":",
        b",",
        b"null",
        b"true",
        b"-",
        b"--",
        b"..",
        b"/",
        b"//",
        b"@",
        b"?",
    ),
    *(
        b"NaN",
        b"+Inf",
        b"-Inf",
        b"1e308",
        b"1e999",
        b"5e-324",
        b"-0",
        b"1_0",
        b"9" * 30,
        b"9" * 5000,
        b"0x1",
        b".5",
    ),
    *(
        b'"\\ud800"',
        "\u202e\u2028é日".encode(),
        "²".encode(),
        b"&a *a",
        b"!!python/object",
        b"<<: *x",
        b"---",
        b"$(",
    ),
)
OPENING_FRAGMENTS = (b"[", b"{", b'{"a":', b"- ", b"(", b"\\")


def mutate(random_source: random.Random, valid_inputs: Sequence[bytes], max_bytes: int) -> bytes:
    """Change one or two valid inputs at a few places. Sometimes return an input of the maximum size."""
    data = bytearray(random_source.choice(valid_inputs))
    for _ in range(random_source.choice((1, 1, 2, 3, 8))):
        start = random_source.randrange(len(data) + 1)
        end = min(len(data), start + random_source.choice((1, 2, 8, 64)))
        match random_source.randrange(8):
            case 0:
                data[start:end] = random_source.randbytes(end - start)
            case 1 | 2:
                data[start:start] = random_source.choice(UNUSUAL_FRAGMENTS)
            case 3:
                data[start:end] = random_source.choice(UNUSUAL_FRAGMENTS)
            case 4:
                del data[start:end]
            case 5:
                data[start:start] = data[start:end] * random_source.choice((1, 2, 50))
            case 6:
                other = random_source.choice(valid_inputs)
                data[start:] = other[random_source.randrange(len(other) + 1) :]
            case _:
                data[start:start] = random_source.choice(OPENING_FRAGMENTS) * random_source.choice(
                    (1, 20, 5000)
                )
    if random_source.random() < 0.01:
        start = random_source.randrange(len(data) + 1)
        fragment = bytes(data[start : start + random_source.choice((1, 7, 100))]) or b"x"
        data[start:start] = fragment * (max_bytes // len(fragment))
    return bytes(data[:max_bytes])


def compute_allowed_s(data: bytes) -> float:
    return SECONDS_PER_MB * max(1.0, len(data) / MB)


def measure_cost_s(consume: Callable[[bytes], None], data: bytes) -> float:
    """Return the CPU seconds of this thread for an input.

    If they exceed the limit, take the minimum of three.
    """
    minimum_s = float("inf")
    for _ in range(3):
        started_at = time.thread_time()
        consume(data)
        minimum_s = min(minimum_s, time.thread_time() - started_at)
        if minimum_s <= compute_allowed_s(data):
            break
    return minimum_s


def find_problem(consume: Callable[[bytes], None], data: bytes) -> str:
    """Process an input, and return the problem (an exception or too much CPU time), or an empty string."""
    try:
        cost_s = measure_cost_s(consume, data)
    except Exception as error:
        return f"{error!r}"
    return f"{cost_s:.2f} s of CPU for {len(data)} bytes" if cost_s > compute_allowed_s(data) else ""


def generate_inputs(
    seed: int, count: int | None, seconds: float, valid_inputs: Sequence[bytes], max_bytes: int
) -> Iterator[bytes]:
    """Yield `count` mutated inputs, or inputs for this number of seconds if `count` is None."""
    random_source = random.Random(seed)
    end_at = time.monotonic() + seconds
    count_done = 0
    while count_done < count if count is not None else time.monotonic() < end_at:
        count_done += 1
        yield mutate(random_source, valid_inputs, max_bytes)
