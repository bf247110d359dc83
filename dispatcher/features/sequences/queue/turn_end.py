"""State that a request leaves to its sequence, and turns as the scripts of sequences get them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from dispatcher.common.printable import truncate_text
from dispatcher.features.sequences.turns import Turn, digest_owner

if TYPE_CHECKING:
    from dispatcher.queue.keys import QueueNames

_MAX_REASON_CHARS = 300


class TurnEnd(msgspec.Struct, frozen=True):
    """State that a request leaves to its sequence when it ends, whether its turn was checked or not.

    Only a request that its sequence rejected leaves none. The turn of a checked request ends in any case, as
    one that has not failed.
    """

    turn: Turn
    """Turn of the request. With it, a request that ends before it has claimed its turn is not waited for."""
    has_failed: bool = False
    """True if the request has no answer on which the next one could build."""
    cause: str = ""
    """One sentence that says how the request failed."""
    sticky_token: str | None = None
    """Sticky token, which routes the next request to the same server. `None` keeps the present one; empty
    removes it."""
    conversation: bytes | None = None
    """Conversation state for the next request. `None` keeps the present one."""

    @property
    def size_bytes(self) -> int:
        return len(self.conversation or b"")

    def to_columns(self, names: QueueNames) -> dict[str, Any]:
        """Return the columns of a result (`end_turn` in sequences.lua)."""
        turn_end = {
            **describe_turn(names, self.turn),
            "on_error": "" if self.turn.on_error is None else self.turn.on_error.value,
            "failed": int(self.has_failed),
            "cause": clean_reason(self.cause),
            "sticky_token": None if self.sticky_token is None else replace_surrogates(self.sticky_token),
            "has_conversation": self.conversation is not None,
        }
        return {"turn_end": turn_end, "conversation": self.conversation or b""}


def describe_turn(names: QueueNames, turn: Turn) -> dict[str, Any]:
    return {
        "id": turn.id,
        "index": turn.index,
        "last": int(turn.last),
        "reset": turn.reset,
        "owner": get_sequence_owner(names, turn),
        "submitted_at": turn.submitted_at,
        "override": turn.override,
    }


def clean_reason(why: str) -> str:
    """Return a reason in the form in which it is stored."""
    return truncate_text(replace_surrogates(why), _MAX_REASON_CHARS) if why else ""


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, because no server accepts them."""
    return text.encode(errors="replace").decode()


_digest_default_owner = cache(lambda result_list: digest_owner("", result_list))


def get_sequence_owner(names: QueueNames, turn: Turn) -> str:
    """Return the producer that may use the sequence of this turn. The users of the default list have an empty
    name, whether they name the list or not."""
    return "" if turn.owner == _digest_default_owner(names.result_list) else turn.owner
