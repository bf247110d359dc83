"""Base class for state that counts its changes, so that a derived value knows when it is out of date."""

from __future__ import annotations


class Revisioned:
    """Increment `revision` whenever an attribute gets a different value.

    Only assignment is noticed. Values must therefore be replaced and never changed in place.
    """

    __slots__ = ("revision",)
    revision: int

    def __setattr__(self, name: str, value: object) -> None:
        # The first assignment of an attribute initialises the object and is no change.
        if not hasattr(self, name):
            object.__setattr__(self, "revision", 0)
        elif getattr(self, name) != value:
            object.__setattr__(self, "revision", self.revision + 1)
        object.__setattr__(self, name, value)
