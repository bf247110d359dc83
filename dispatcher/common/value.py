"""Base class of immutable values that are created for every request."""

from __future__ import annotations

from typing import Any, Self

import msgspec


class Value(msgspec.Struct, frozen=True):
    """Immutable value with equality by class and fields. Creating one takes a twentieth of the time of a
    frozen dataclass."""

    def copy_with(self, **changes: Any) -> Self:
        """Return a copy with other values of the given fields. Raises TypeError for an unknown field."""
        return msgspec.structs.replace(self, **changes)
