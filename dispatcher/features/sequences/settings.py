"""Settings of sequences: requests that belong together, and run in order, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.features.sequences.decisions import SequenceOverride, SequenceTerms
from dispatcher.features.sequences.turns import OnError
from dispatcher.requests.headers import AFFINITY_TOKEN, normalize_name
from dispatcher.settings.section import Section
from dispatcher.settings.values import ModelName, Text, check_own_header, setting_error

MAX_OVERRIDES = 20
"""Largest number of overrides. Each may cost the scripts of the queue one read."""


class SequenceModelSettings(Section):
    """Settings for the sequences of some models, in place of the general ones."""

    match: ModelName = Field(
        description="Name of the model, in which `*` matches any characters. It is the name in the body of "
        "the first request of the sequence, or in a path such as `/v2/models/m/infer`."
    )
    max_idle_s: float | None = Field(
        None, gt=0, le=2_592_000, description="As sequences.max_idle_s. If null, that applies."
    )
    max_active: int | None = Field(
        None,
        ge=1,
        description="Largest number of active sequences of these models together, within "
        "sequences.max_active. The others wait, without delaying those of other models. If null, only "
        "sequences.max_active applies.",
    )


class SequenceSettings(Section):
    """Requests that belong together, such as the turns of a conversation (docs/reference/queue-contract.md).

    Use the same settings for all dispatchers of a queue.
    """

    max_idle_s: float = Field(
        600.0,
        gt=0,
        le=2_592_000,
        description="Seconds after which a sequence without running or waiting requests ends. The queue "
        "remembers for as long that a sequence was aborted or, with `after_end: refuse`, that it has ended.",
    )
    max_age_s: float = Field(
        86_400.0,
        gt=0,
        le=31_536_000,
        description="Seconds after its first request at which a sequence ends. A request that runs at that "
        "time is its last one.",
    )
    max_active: int | None = Field(
        None,
        ge=1,
        description="Largest number of active sequences, of all models. The others wait. If null, there is "
        "no limit.",
    )
    max_waiting: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Largest number of waiting requests of one sequence. Further requests fail with "
        "SEQUENCE_FULL.",
    )
    on_error: Literal["continue", "abort", "hold"] = Field(
        "abort",
        description="What happens to later requests of a sequence after a request that has no answer, and "
        "that does not set `on_error` itself. `continue`: they are sent. `abort`: they fail with "
        "SEQUENCE_ABORTED. `hold`: they wait for an operator.",
    )
    after_end: Literal["new", "refuse"] = Field(
        "new",
        description="What happens to requests after the end of a sequence. `new`: they begin the sequence "
        "anew. `refuse`: they fail with SEQUENCE_ENDED as long as the end is remembered.",
    )
    header: Text = Field(
        AFFINITY_TOKEN,
        description="Header of an answer that is sent with the next request of the sequence, so that it "
        "reaches the same server. The session affinity of the endpoint picker reads and writes it. If empty, "
        "no such header is sent.",
    )
    session_id_header: Text = Field(
        "x-session-id",
        description="Header with the id of the sequence for the gateway. If empty, the id is not sent.",
    )
    carry: Literal["off", "messages"] = Field(
        "off",
        description="Default for requests that do not set `carry`. `messages`: each turn is sent with the "
        "conversation so far, for chat bodies and /v1/responses. `off`: turns are sent as they are.",
    )
    max_carry_bytes: int = Field(
        1_048_576,
        ge=1,
        le=67_108_864,
        description="Largest size of a stored conversation, in bytes. A turn that would make it larger fails "
        "with INVALID_REQUEST.",
    )

    models: Annotated[tuple[SequenceModelSettings, ...], Field(strict=False)] = Field(
        (),
        max_length=MAX_OVERRIDES,
        description="Other values for the sequences of some models. The first entry whose `match` fits the "
        "model applies.",
    )

    @field_validator("models")
    @classmethod
    def _check_matches_differ(
        cls, models: tuple[SequenceModelSettings, ...]
    ) -> tuple[SequenceModelSettings, ...]:
        matches = [model.match for model in models]
        for number, match in enumerate(matches):
            if match in matches[:number]:
                raise setting_error(f"{match} is there twice, and only the first entry would apply")
        return models

    @field_validator("header", "session_id_header")
    @classmethod
    def _check_header(cls, name: str) -> str:
        return check_own_header(name)

    @field_validator("session_id_header")
    @classmethod
    def _check_headers_differ(cls, name: str, info: ValidationInfo) -> str:
        if name and normalize_name(name) == normalize_name(info.data.get("header", "")):
            raise setting_error("must not be sequences.header")
        return name

    @property
    def reserved_headers(self) -> Mapping[str, str]:
        return {"header": self.header, "session_id_header": self.session_id_header}

    def build_terms(self) -> SequenceTerms:
        """Return the settings as the queue uses them."""
        return SequenceTerms(
            max_idle_s=self.max_idle_s,
            max_age_s=self.max_age_s,
            max_active=self.max_active,
            max_waiting=self.max_waiting,
            on_error=OnError(self.on_error),
            refuse_after_end=self.after_end == "refuse",
            overrides=tuple(
                SequenceOverride(model.match, model.max_idle_s, model.max_active) for model in self.models
            ),
        )


class Sections(Section, defer_build=True):
    """The section of sequences."""

    sequences: SequenceSettings = SequenceSettings()


PLACE = 2
