"""What every section of the settings is."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,  # "8080" is not a port, nor is true a number
        allow_inf_nan=False,
        validate_default=True,  # a default may be at odds with what is given beside it
        hide_input_in_errors=True,  # it may be a secret
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_all_defaults(cls, data: Any) -> Any:
        """A section whose keys are all commented out reads as null."""
        return {} if data is None else data
