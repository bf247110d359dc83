"""The settings of sequences: requests that belong together, in order, one at a time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.core.requests.headers import SESSION_TOKEN, plain
from dispatcher.core.sequences.decisions import SequenceTerms
from dispatcher.core.sequences.turns import Carry, OnError
from dispatcher.settings.section import Section
from dispatcher.settings.values import Text, header_of_ours, refuse


class SequenceSettings(Section):
    """Requests that belong together, such as the turns of a conversation (docs/queue-contract.md).

    Give all dispatchers of a queue the same.
    """

    max_idle_s: float = Field(
        600.0,
        gt=0,
        le=2_592_000,
        description="Seconds after which a sequence of which nothing runs or waits has ended; as long it is "
        "remembered that one was aborted or, with `after_end: refuse`, has ended.",
    )
    max_age_s: float = Field(
        86_400.0,
        gt=0,
        le=31_536_000,
        description="Seconds from its first request after which a sequence ends, with the request that runs.",
    )
    max_active: int | None = Field(
        None, ge=1, description="Sequences that are alive at once; the others wait. null: any number."
    )
    max_waiting: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Requests of one sequence that wait; further ones end as SEQUENCE_FULL.",
    )
    on_error: Literal["continue", "abort", "hold"] = Field(
        "abort",
        description="What becomes of the later requests when one has no answer and does not say: they go, "
        "end as SEQUENCE_ABORTED, or wait for an operator.",
    )
    gap_s: float = Field(
        60.0, ge=0, le=86_400, description="Seconds that an index which is missing is waited for."
    )
    after_end: Literal["new", "refuse"] = Field(
        "new",
        description="What comes after the end of a sequence begins a new life of it, or ends as "
        "SEQUENCE_ENDED for as long as the end is remembered.",
    )
    header: Text = Field(
        SESSION_TOKEN,
        description="Header of an answer that goes out with the next request, so that it comes to the same "
        "server: what the endpoint picker's session affinity reads and writes. Empty: none.",
    )
    session_id_header: Text = Field(
        "x-session-id", description="Header in which the gateway gets the sequence's id. Empty: none."
    )
    carry: Literal["off", "messages"] = Field(
        "off",
        description="For requests that do not say: `messages` sends each turn with the conversation so far, "
        "of chat bodies and /v1/responses.",
    )
    max_carry_bytes: int = Field(
        1_048_576,
        ge=1,
        le=67_108_864,
        description="Bytes of a conversation that is carried on; a turn that would make more of it ends as "
        "INVALID_REQUEST.",
    )

    @field_validator("header", "session_id_header")
    @classmethod
    def _may_be_sent(cls, name: str) -> str:
        return header_of_ours(name)

    @field_validator("session_id_header")
    @classmethod
    def _not_the_same(cls, name: str, info: ValidationInfo) -> str:
        if name and plain(name) == plain(info.data.get("header", "")):
            raise refuse("must not be sequences.header")
        return name

    def terms(self) -> SequenceTerms:
        """What the queue goes by."""
        return SequenceTerms(
            max_idle_s=self.max_idle_s,
            max_age_s=self.max_age_s,
            max_active=self.max_active,
            max_waiting=self.max_waiting,
            on_error=OnError(self.on_error),
            gap_s=self.gap_s,
            refuse_after_end=self.after_end == "refuse",
        )

    def carries(self) -> Carry:
        """For a request that does not say."""
        return Carry(self.carry)
