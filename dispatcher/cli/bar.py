"""A bar of characters: shares of a whole, as a terminal can show them. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def cells(amounts: Sequence[float], whole: float, width: int) -> list[int]:
    """How many of `width` characters each amount takes; the rest of them is what is left of the whole.

    They never come to more than `width`: more than the whole is the whole. What is there is seen: an amount
    above 0 has a character at the least, taken from the rest or the longest, while there are enough.
    """
    given = [max(0.0, amount) for amount in amounts]
    whole = max(whole, sum(given))
    if whole <= 0 or width <= 0:
        return [0] * len(given)
    # By their ends, so that roundings do not add up.
    ends = [round(sum(given[: n + 1]) / whole * width) for n in range(len(given))]
    found = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for n, amount in enumerate(given):
        if amount > 0 and found[n] == 0:
            if sum(found) == width:
                longest = max(range(len(found)), key=found.__getitem__)
                if found[longest] <= 1:
                    break
                found[longest] -= 1
            found[n] = 1
    return found


def bar(parts: Sequence[tuple[str, float]], whole: float, width: int, rest: str = "·") -> str:
    """One character for each share of the parts, in their order, then `rest`; `width` long."""
    shares = cells([amount for _, amount in parts], whole, width)
    drawn = "".join(glyph * share for (glyph, _), share in zip(parts, shares, strict=True))
    return drawn + rest * (width - len(drawn))


REALTIME, WAITING, OURS, FREE, RESERVE = "█", "▓", "▒", "·", "░"


def pool(*, realtime: float, waiting: float, ours: float, reserve: float, capacity: float, width: int) -> str:
    """A pool's capacity and who has it; what the reserve still keeps free is at the end."""
    used = realtime + waiting + ours
    kept = max(0.0, min(reserve, capacity - used))
    free = max(0.0, capacity - reserve - used)
    parts = [(REALTIME, realtime), (WAITING, waiting), (OURS, ours), (FREE, free), (RESERVE, kept)]
    return bar(parts, capacity, width, FREE)


def legend(*, realtime: float, waiting: float, ours: float, reserve: float, capacity: float) -> str:
    """What the characters of the bar mean, and how much each is."""
    free = max(0.0, capacity - reserve - realtime - waiting - ours)
    told = [(REALTIME, "realtime", realtime), (WAITING, "waiting", waiting), (OURS, "ours", ours)]
    told += [(FREE, "free", free), (RESERVE, "reserve", reserve)]
    return "  ".join(f"{glyph} {name} {amount:.3g}" for glyph, name, amount in told)
