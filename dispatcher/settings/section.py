"""Base class of the sections of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # the text "8080" is not a port, and true is not a number
        allow_inf_nan=False,
        validate_default=True,  # a default may conflict with the value of another key
        hide_input_in_errors=True,  # the value may be a secret
    )

    @property
    def reserved_headers(self) -> Mapping[str, str]:
        """Headers that only the dispatcher may set, by the key that names the header."""
        return {}

    @property
    def endpoints_header(self) -> str:
        """Header that names the endpoints to which the gateway may send a request. Empty if the section has
        none."""
        return ""

    @model_validator(mode="before")
    @classmethod
    def _empty_is_all_defaults(cls, data: Any) -> Any:
        # YAML reads a section whose keys are all commented out as null.
        return {} if data is None else data
