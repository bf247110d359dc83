"""Bytes that were bent out of good ones, and what taking them in may cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

SECONDS_PER_MB = 0.25
"""Of CPU; what is smaller than one may cost as much."""
MB = 2**20
ODD = (
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
NESTED = (b"[", b"{", b'{"a":', b"- ", b"(", b"\\")


def bent(chance: random.Random, good: Sequence[bytes], most_bytes: int) -> bytes:
    """One of the good ones, or two, changed a few times; now and then as large as is asked for."""
    found = bytearray(chance.choice(good))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(len(found) + 1)
        end = min(len(found), at + chance.choice((1, 2, 8, 64)))
        match chance.randrange(8):
            case 0:
                found[at:end] = chance.randbytes(end - at)
            case 1 | 2:
                found[at:at] = chance.choice(ODD)
            case 3:
                found[at:end] = chance.choice(ODD)
            case 4:
                del found[at:end]
            case 5:
                found[at:at] = found[at:end] * chance.choice((1, 2, 50))
            case 6:
                other = chance.choice(good)
                found[at:] = other[chance.randrange(len(other) + 1) :]
            case _:
                found[at:at] = chance.choice(NESTED) * chance.choice((1, 20, 5000))
    if chance.random() < 0.01:
        at = chance.randrange(len(found) + 1)
        piece = bytes(found[at : at + chance.choice((1, 7, 100))]) or b"x"
        found[at:at] = piece * (most_bytes // len(piece))
    return bytes(found[:most_bytes])


def allowed_s(data: bytes) -> float:
    return SECONDS_PER_MB * max(1.0, len(data) / MB)


def cost_s(act: Callable[[bytes], None], data: bytes) -> float:
    """CPU seconds of this thread that the act takes: the least of three, where one was too much."""
    least = float("inf")
    for _ in range(3):
        began = time.thread_time()
        act(data)
        least = min(least, time.thread_time() - began)
        if least <= allowed_s(data):
            break
    return least


def flaw(act: Callable[[bytes], None], data: bytes) -> str:
    """What is wrong with how the bytes were taken in; empty: nothing."""
    try:
        took_s = cost_s(act, data)
    except Exception as error:
        return f"{error!r}"
    return f"{took_s:.2f} s of CPU for {len(data)} bytes" if took_s > allowed_s(data) else ""


def cases(seed: int, count: int | None, seconds: float, good: Sequence[bytes], most: int) -> Iterator[bytes]:
    """So many bent inputs; None: for so many seconds."""
    chance = random.Random(seed)
    until = time.monotonic() + seconds
    made = 0
    while made < count if count is not None else time.monotonic() < until:
        made += 1
        yield bent(chance, good, most)
