"""Values: what is made for each request, many times, and never changes. Pure."""

from __future__ import annotations

from typing import Any, Self

import msgspec


class Value(msgspec.Struct, frozen=True):
    """Equal to another of its class with equal fields. To make one takes a twentieth of what a frozen
    dataclass takes."""

    def but(self, **changes: Any) -> Self:
        """The same with other values of these fields. Raises TypeError for a field that it has not."""
        return msgspec.structs.replace(self, **changes)
