"""Bars of characters that show the shares of a whole on a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def count_cells(amounts: Sequence[float], total: float, width: int) -> list[int]:
    """Return the number of characters for each amount, in a bar of `width` characters for `total`.

    The sum never exceeds `width`: if the amounts exceed `total`, their sum is used instead. Each amount above
    0 gets at least one character, taken from the unused part or from the longest part, while there are
    enough.
    """
    shares = [max(0.0, amount) for amount in amounts]
    total = max(total, sum(shares))
    if total <= 0 or width <= 0:
        return [0] * len(shares)
    # Round the positions of the ends and not the lengths, so that rounding errors do not add up.
    ends = [round(sum(shares[: n + 1]) / total * width) for n in range(len(shares))]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for n, amount in enumerate(shares):
        if amount > 0 and counts[n] == 0:
            if sum(counts) == width:
                longest = max(range(len(counts)), key=counts.__getitem__)
                if counts[longest] <= 1:  # more amounts than characters: the later ones get none
                    break
                counts[longest] -= 1
            counts[n] = 1
    return counts


def draw_bar(parts: Sequence[tuple[str, float]], total: float, width: int, fill: str = "·") -> str:
    """Return a bar of `width` characters: the parts in order, then `fill`.

    Each part is its character and its amount.
    """
    counts = count_cells([amount for _, amount in parts], total, width)
    drawn = "".join(glyph * count for (glyph, _), count in zip(parts, counts, strict=True))
    return drawn + fill * (width - len(drawn))


REALTIME, WAITING, BATCH, FREE, RESERVE = "█", "▓", "▒", "·", "░"


def draw_pool(
    *, realtime: float, waiting: float, batch: float, reserve: float, capacity: float, width: int
) -> str:
    """Return a bar that shows how the capacity of a pool is used. The unused reserve is at its end."""
    used = realtime + waiting + batch
    # Realtime may use the reserve; only its unused part is drawn.
    unused_reserve = max(0.0, min(reserve, capacity - used))
    free = max(0.0, capacity - reserve - used)
    parts = [
        (REALTIME, realtime),
        (WAITING, waiting),
        (BATCH, batch),
        (FREE, free),
        (RESERVE, unused_reserve),
    ]
    return draw_bar(parts, capacity, width, FREE)


def format_legend(*, realtime: float, waiting: float, batch: float, reserve: float, capacity: float) -> str:
    """Return the legend of `draw_pool`: each character with its meaning and its amount."""
    free = max(0.0, capacity - reserve - realtime - waiting - batch)
    parts = [(REALTIME, "realtime", realtime), (WAITING, "waiting", waiting), (BATCH, "batch", batch)]
    parts += [(FREE, "free", free), (RESERVE, "reserve", reserve)]
    return "  ".join(f"{glyph} {name} {amount:.3g}" for glyph, name, amount in parts)
