"""Bars of characters that show the shares of a whole on a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def cells(amounts: Sequence[float], whole: float, width: int) -> list[int]:
    """Return the number of characters for each amount, in a bar of `width` characters for `total`.

    The sum never exceeds `width`: if the amounts exceed `total`, their sum is used instead. Each amount above
    0 gets at least one character, taken from the unused part or from the longest part, while there are
    enough.
    """
    given = [max(0.0, amount) for amount in amounts]
    whole = max(whole, sum(given))
    if whole <= 0 or width <= 0:
        return [0] * len(given)
    # Round the positions of the ends and not the lengths, so that rounding errors do not add up.
    ends = [round(sum(given[: n + 1]) / whole * width) for n in range(len(given))]
    found = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for n, amount in enumerate(given):
        if amount > 0 and found[n] == 0:
            if sum(found) == width:
                longest = max(range(len(found)), key=found.__getitem__)
                if found[longest] <= 1:  # more amounts than characters: the later ones get none
                    break
                found[longest] -= 1
            found[n] = 1
    return found


def bar(parts: Sequence[tuple[str, float]], whole: float, width: int, rest: str = "·") -> str:
    """Return a bar of `width` characters: the parts in order, then `fill`.

    Each part is its character and its amount.
    """
    shares = cells([amount for _, amount in parts], whole, width)
    drawn = "".join(glyph * share for (glyph, _), share in zip(parts, shares, strict=True))
    return drawn + rest * (width - len(drawn))


REALTIME, WAITING, OURS, FREE, RESERVE = "█", "▓", "▒", "·", "░"


def pool(*, realtime: float, waiting: float, ours: float, reserve: float, capacity: float, width: int) -> str:
    """Return a bar that shows how the capacity of a pool is used. The unused reserve is at its end."""
    used = realtime + waiting + ours
    # Realtime may use the reserve; only its unused part is drawn.
    kept = max(0.0, min(reserve, capacity - used))
    free = max(0.0, capacity - reserve - used)
    parts = [(REALTIME, realtime), (WAITING, waiting), (OURS, ours), (FREE, free), (RESERVE, kept)]
    return bar(parts, capacity, width, FREE)


def legend(*, realtime: float, waiting: float, ours: float, reserve: float, capacity: float) -> str:
    """Return the legend of `draw_pool`: each character with its meaning and its amount."""
    free = max(0.0, capacity - reserve - realtime - waiting - ours)
    told = [(REALTIME, "realtime", realtime), (WAITING, "waiting", waiting), (OURS, "ours", ours)]
    told += [(FREE, "free", free), (RESERVE, "reserve", reserve)]
    return "  ".join(f"{glyph} {name} {amount:.3g}" for glyph, name, amount in told)
