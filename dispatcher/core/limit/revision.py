"""State whose changes count, so that what was derived from it knows when it is out of date. Pure."""

from __future__ import annotations


class Revised:
    """Whenever an attribute gets another value, that is a new revision.

    Nothing but assignment is seen: what an attribute holds is replaced and never changed in place.
    """

    __slots__ = ("revision",)
    revision: int

    def __setattr__(self, name: str, value: object) -> None:
        if not hasattr(self, name):
            object.__setattr__(self, "revision", 0)
        elif getattr(self, name) != value:
            object.__setattr__(self, "revision", self.revision + 1)
        object.__setattr__(self, name, value)
